"""Queue the sequences that wait, in order of arrival.

Invariants
----------
* The head is the earliest to arrive, wherever it came from: newly added, preempted, or from behind a
  leader. While admission is closed only sequences of requests that have started count.
* Adding costs O(log waiting), removing O(1): an entry whose sequence has gone is dropped when it surfaces.
"""

from __future__ import annotations

import heapq

from samebit.rollout.requests.request import Sequence
from samebit.rollout.requests.shared import Shared

_Entry = tuple[int, Sequence]


class WaitingQueue:
    """Holds the sequences that no longer wait for another one, and do not run yet."""

    def __init__(self) -> None:
        self._members: set[Sequence] = set()
        self._fresh: list[_Entry] = []
        self._started: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence, at the place of its arrival."""
        self._members.add(sequence)
        heapq.heappush(
            self._started if sequence.shared.progress.started else self._fresh, (sequence.schedule.arrival, sequence)
        )

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out, if it waits."""
        self._members.discard(sequence)

    def promote(self, request: Shared) -> None:
        """Let the waiting sequences of a request that has just started go on while admission is closed.

        The one with which it started was the head: the others, which came right behind it, are first in line now.
        """
        while self._fresh and (self._fresh[0][1].shared is request or self._fresh[0][1] not in self._members):
            entry = heapq.heappop(self._fresh)
            if entry[1] in self._members:
                heapq.heappush(self._started, entry)

    def head(self, admission_open: bool) -> Sequence | None:
        """Return the earliest to arrive of those that may be admitted."""
        started = self._top(self._started)
        if not admission_open:
            return started
        fresh = self._top(self._fresh)
        if started is None or fresh is None:
            return started or fresh
        return min(started, fresh, key=lambda sequence: sequence.schedule.arrival)

    @property
    def any_started(self) -> bool:
        """Return whether a sequence waits whose request has started."""
        return self._top(self._started) is not None

    def _top(self, heap: list[_Entry]) -> Sequence | None:
        """Return the first sequence of a heap that still waits there."""
        while heap:
            sequence = heap[0][1]
            moved = heap is self._fresh and sequence.shared.progress.started
            if sequence in self._members and not moved:
                return sequence
            heapq.heappop(heap)
        return None
