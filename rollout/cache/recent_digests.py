"""Remember which digests were added lately."""

from __future__ import annotations

from samebit.rollout.cache.freed_later import FreedLater


class RecentDigests:
    """Remembers at least the last `capacity` digests, at most twice as many.

    Two dictionaries take turns: nothing old is touched to forget it one by one. What is dropped is freed by `sweep`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._now: dict[bytes, None] = {}
        self._before: dict[bytes, None] = {}
        self._dropped: FreedLater[bytes, None] = FreedLater()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._now or digest in self._before

    def add(self, digest: bytes) -> None:
        """Note a digest, the latest."""
        if len(self._now) == self._capacity:
            self._dropped.add(self._before)
            self._before, self._now = self._now, {}
        self._now[digest] = None

    def clear(self) -> None:
        """Forget all digests; O(1)."""
        self._dropped.add(self._before)
        self._dropped.add(self._now)
        self._before, self._now = {}, {}

    def sweep(self) -> bool:
        """Free one that was dropped; False when none is left."""
        if self._dropped:
            self._dropped.pop()
            return True
        return False
