"""Which digests were added lately."""

from __future__ import annotations


class RecentDigests:
    """At least the last `capacity` digests, at most twice as many.

    Two sets take turns: nothing old is touched to forget it one by one. What is dropped is freed by `sweep`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._now: set[bytes] = set()
        self._before: set[bytes] = set()
        self._dropped: list[set[bytes]] = []

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._now or digest in self._before

    @property
    def num_dropped(self) -> int:
        """Digests that are no longer known and not yet freed."""
        return sum(map(len, self._dropped))

    def add(self, digest: bytes) -> None:
        if len(self._now) == self._capacity:
            self._drop(self._before)
            self._before, self._now = self._now, set()
        self._now.add(digest)

    def clear(self) -> None:
        """Forget all of them; O(1)."""
        self._drop(self._before)
        self._drop(self._now)
        self._before, self._now = set(), set()

    def sweep(self) -> bool:
        """Free one that was dropped; False when there is none."""
        if not self._dropped:
            return False
        self._dropped[-1].pop()
        if not self._dropped[-1]:
            self._dropped.pop()
        return True

    def _drop(self, digests: set[bytes]) -> None:
        if digests:
            self._dropped.append(digests)
