"""Count the tries to start one replica again.

Invariant: a replica that has run well for `well_seconds` has all its tries before it again. What it is lost to now and
then, as a node that is drained, does not add up over weeks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from samebit.rollout.fleet.options import LONGEST_PAUSE, FleetOptions

_MOST_DOUBLINGS = 60


class Tries:
    """Counts the tries since a replica ran well, and says how long to wait before each. now: a clock, in seconds."""

    def __init__(self, options: FleetOptions, now: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._now = now
        self._count = 0
        self._since = now()

    def note_start(self) -> None:
        """Note that the replica runs from now on."""
        self._since = self._now()

    def note_loss(self) -> None:
        """Note that the replica was lost; what came before counts no more if it had run well."""
        if self._now() - self._since >= self._options.well_seconds:
            self._count = 0

    @property
    def used_up(self) -> bool:
        """Return whether it is not to be started again."""
        return self._count >= self._options.max_restarts

    def take(self) -> float:
        """Begin a try; return how long to wait before it: not before the first, then twice as long each time."""
        self._count += 1
        if self._count == 1:
            return 0.0
        return min(LONGEST_PAUSE, self._options.restart_seconds * 2.0 ** min(self._count - 2, _MOST_DOUBLINGS))
