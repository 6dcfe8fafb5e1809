"""Know the trainer's step of each version of what it trains.

Invariant: memory and time are bounded, however many updates come: the oldest versions are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

MOST_VERSIONS = 4096


class StepsOfVersions:
    """Knows the steps of the newest versions, which are noted as they come: in rising order.

    began: the step that was noted first, above 0 in a run that was resumed; None before.
    """

    def __init__(self) -> None:
        self._steps = OrderedDict({0: 0})
        self.began: int | None = None

    def note(self, version: int, step: int) -> None:
        """Note that this version, the newest, is that step's."""
        if self.began is None:
            self.began = step
        self._steps[version] = step
        if len(self._steps) > MOST_VERSIONS:
            self._steps.popitem(last=False)

    @property
    def newest(self) -> int:
        """Return the step of the newest version."""
        return next(reversed(self._steps.values()))

    def of(self, version: int) -> int:
        """Return the step of a version: the oldest known for one that was forgotten, lest it seem new; and the newest
        for one of no known step."""
        oldest = next(iter(self._steps))
        return self._steps.get(max(version, oldest), self.newest)
