"""Wait until what a test waits for has happened. No test leans on a clock; a limit only ends a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HANG = 900.0
"""Counts seconds: whatever takes as long hangs, however busy the machine is."""


def wait_until(happened: Callable[[], object]) -> None:
    """Return once `happened()` is true.

    Raises:
        AssertionError: it hangs.
    """
    tick, limit = threading.Event(), time.monotonic() + HANG
    while not happened():
        assert time.monotonic() < limit, "it did not happen"
        tick.wait(0.001)
