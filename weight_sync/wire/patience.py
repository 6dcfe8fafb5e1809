"""Limit how long one end of a link waits for the other.

Invariants
----------
* Only waiting uses patience up: this end's own work (gathering weights, letting requests finish) costs none.
* Only weights restore it, and no more of them than were announced: a peer that keeps sending anything else, or the same
  weights again and again, is waited for no longer than a silent one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

FOR_EVER = 1e9
"""Seconds, thirty years: sockets and gloo count nanoseconds in 64 bits, and overflow with ten times as many."""


class Patience:
    """Knows the time that is left to wait. `seconds`: how long the sync may stand still."""

    def __init__(self, seconds: float) -> None:
        self.seconds = check_timeout(seconds)
        self._left = self.seconds
        self._expected = 0

    def begin(self, expected: int = 0) -> None:
        """Start anew; up to `expected` bytes of weights count as progress."""
        self._left = self.seconds
        self._expected = expected

    def progress(self, num_bytes: int) -> None:
        if num_bytes and self._expected > 0:
            self._left = self.seconds
        self._expected -= num_bytes

    @contextmanager
    def waiting(self) -> Iterator[float]:
        """Yield the time (`time.monotonic`) at which a wait that begins now has to end."""
        began = time.monotonic()
        try:
            yield began + self._left
        finally:
            self._left -= time.monotonic() - began


def check_timeout(timeout: float) -> float:
    """Return the timeout as a float, or what counts as for ever. Raises `ValueError` for anything but a positive number
    of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= sys.float_info.max:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r:.200}")
    return min(float(timeout), FOR_EVER)
