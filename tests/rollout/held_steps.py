"""Let a worker compute, with steps that wait for the test: no request ends by itself, however late the test looks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..patience import wait_until
from .inside import engine_of, is_asked


@contextmanager
def held_steps(worker: Any) -> Iterator[threading.Semaphore]:
    """Let the worker make the steps that are released, and one whenever something waits for the end of a step: a
    command, a request, an abort."""
    runner, released, over = engine_of(worker).runner, threading.Semaphore(0), threading.Event()
    launch = runner.launch

    def launch_when_let(*args: Any) -> Any:
        wait_until(lambda: over.is_set() or released.acquire(blocking=False) or is_asked(worker))
        return launch(*args)

    runner.launch = launch_when_let
    try:
        yield released
    finally:
        over.set()
        del runner.launch
