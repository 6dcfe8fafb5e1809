"""Name the weights as a trainer does: a version is a number to the worker, and may have a name beside it.

Invariant: a name belongs to one number; what was sampled before an update keeps the name of its weights. The oldest
names are forgotten, and then the number stands for them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from samebit.rollout.requests.version_history import Span

MOST_NAMES = 4096


class Versions:
    """Knows the names that versions were given."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, str] = OrderedDict()

    def give(self, version: int, name: str) -> None:
        """Name a version."""
        self._names[version] = name
        if len(self._names) > MOST_NAMES:
            self._names.popitem(last=False)

    def name(self, version: int) -> str:
        """Return the name of a version, its number where it has none."""
        return self._names.get(version, str(version))

    def spans(self, spans: list[Span]) -> list[dict[str, Any]]:
        """Return which weights tokens were sampled under, as vLLM writes it."""
        return [{"version": self.name(version), "start": start, "end": end} for start, end, version in spans]
