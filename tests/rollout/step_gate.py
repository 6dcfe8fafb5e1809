"""Hold the steps of a fake model at a gate, and threads in the order that a test needs, without a clock."""

from __future__ import annotations

import threading

from ..patience import HANG, wait_until


class StepGate:
    """Lets as many steps end as it was released for; those behind them wait."""

    def __init__(self, steps: int = 0) -> None:
        self._permits = threading.Semaphore(steps)
        self._waiting = False

    def release(self, steps: int = 1) -> None:
        self._permits.release(steps)

    def pass_through(self) -> None:
        """Return when this step may end."""
        if self._permits.acquire(blocking=False):
            return
        self._waiting = True
        opened = self._permits.acquire(timeout=HANG)
        self._waiting = False
        assert opened, "the test never opened the gate"

    def wait_for_a_step(self) -> None:
        """Return when a step waits here: whoever commits it holds the worker's lock until the next `release`."""
        wait_until(lambda: self._waiting)

    def shut(self) -> None:
        """Take back what was released and not used."""
        while self._permits.acquire(blocking=False):
            pass
