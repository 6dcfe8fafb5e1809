"""Keep what penalties count of a sequence from step to step, so that a step counts what has come since the last alone.

Invariant: a sequence's tokens are only ever appended. One that was preempted, or whose step was dropped, has those that
were counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from samebit.rollout.requests.request import Sequence

Ids = npt.NDArray[np.int64]

_ROOM = 64


class SeenTokens:
    """Counts the tokens of one sequence, given the ids of its prompt, each once, in ascending order."""

    __slots__ = ("_counts", "_num_counted", "_places", "_sampled", "_seen", "prompt_ids")

    def __init__(self, prompt_ids: Ids) -> None:
        self.prompt_ids = prompt_ids
        self._seen = _Growing(prompt_ids)
        self._sampled = _Growing(prompt_ids[:0])
        self._counts = _Growing(prompt_ids[:0])
        self._places: dict[int, int] = {}
        self._num_counted = 0

    @property
    def ids(self) -> Ids:
        """Return the ids of prompt and output, each once, in no order."""
        return self._seen.values

    @property
    def sampled(self) -> tuple[Ids, Ids]:
        """Return the ids of the output, each once, and how often each is there."""
        return self._sampled.values, self._counts.values

    def take(self, output_ids: Ids) -> SeenTokens:
        """Count those of the sampled tokens that were not counted yet."""
        for token in output_ids[self._num_counted :].tolist():
            self._count(token)
        self._num_counted = len(output_ids)
        return self

    def _count(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._sampled.values):
            self._sampled.append(token)
            self._counts.append(0)
            if not _holds(self.prompt_ids, token):
                self._seen.append(token)
        self._counts.values[place] += 1


class _Growing:
    """Holds numbers that others are appended to; those that it begins with are shared until then."""

    __slots__ = ("_memory", "values")

    def __init__(self, values: Ids) -> None:
        self.values = self._memory = values

    def append(self, value: int) -> None:
        size = len(self.values)
        if size == len(self._memory):
            self._memory = np.empty(2 * size + _ROOM, np.int64)
            self._memory[:size] = self.values
        self._memory[size] = value
        self.values = self._memory[: size + 1]


def seen_by(sequences: Iterable[Sequence], before: Mapping[Sequence, SeenTokens]) -> dict[Sequence, SeenTokens]:
    """Return what is kept of those sequences that are penalized: of one that is not among those `before`, its prompt
    is looked through, once for all samples of a request."""
    prompts = {sequence.shared: seen.prompt_ids for sequence, seen in before.items()}
    kept: dict[Sequence, SeenTokens] = {}
    for sequence in sequences:
        if sequence.params.penalizes:
            shared = sequence.shared
            if sequence not in before and shared not in prompts:
                prompts[shared] = np.unique(shared.prompt)
            kept[sequence] = before[sequence] if sequence in before else SeenTokens(prompts[shared])
    return kept


def _holds(ascending: Ids, token: int) -> bool:
    place = int(np.searchsorted(ascending, token))
    return place < len(ascending) and bool(ascending[place] == token)
