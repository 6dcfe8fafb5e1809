"""Remember which blocks a replica has, as far as its messages tell.

Invariants
----------
* A block is held if the replica had it at its last message in order: after a message that is missing, is of another
  incarnation or breaks the order, nothing is held until a snapshot comes.
* A block is expected if a request that the router sent there is about to publish it. That ends with a request that
  fails, with a new epoch, with an eviction, and soon after a request's end: two messages later all of its blocks have
  been heard of.
* All shadows of a router share one `Room`; what finds no room there is not recorded. To promise less is always right.
* Clearing is O(1): what was there is freed in slices.

A replica that has a block has all blocks before it (`cache.prefix_tree`), so the deepest block that is known says what
the replica has; it is searched for by halving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from samebit.rollout.cache.freed_later import FreedLater
from samebit.rollout.publishing.journal import CacheNews, CacheSnapshot

SWEPT_PER_MESSAGE = 256


@dataclass
class Room:
    """Bounds what all shadows record. refused: digests that found no room."""

    left: int
    refused: int = 0
    freed: FreedLater[bytes, bool] = field(default_factory=FreedLater)

    def sweep(self, count: int) -> None:
        """Free some of what was cleared."""
        for _ in range(count):
            if not self.freed:
                return
            self.freed.pop()


class Shadow:
    """Knows one replica's cache, for one incarnation after the other."""

    def __init__(self, room: Room) -> None:
        self.in_step = False
        self._room = room
        self._incarnation = self._epoch = self._sequence = -1
        self._known: dict[bytes, bool] = {}  # True: held, False: expected
        self._num_held = 0
        self._ending: list[bytes] = []
        self._ended: list[bytes] = []

    def __len__(self) -> int:
        return self._num_held

    def matched(self, chain: Sequence[bytes], least: int = 0) -> int:
        """Return how many leading blocks of a chain the replica has, or is about to have; 0 if fewer than `least`."""
        known, count = self._known, len(chain)
        if least and (least > count or chain[least - 1] not in known):
            return 0
        if least == count or chain[least] not in known:
            return least
        low, width = least + 1, 1
        while low + width <= count and chain[low + width - 1] in known:
            low += width
            width += width
        high = min(low + width, count + 1)
        while high - low > 1:  # chain[low - 1] is known, chain[high - 1] is not
            middle = (low + high) >> 1
            if chain[middle - 1] in known:
                low = middle
            else:
                high = middle
        return low

    def has(self, digest: bytes) -> bool:
        """Tell whether the replica has said that it has this block."""
        return self._known.get(digest, False)

    # -- what the replica says ---------------------------------------------------------------------

    def apply(self, news: CacheNews) -> bool:
        """Take a message; False asks for a snapshot."""
        if not self.in_step or news.incarnation != self._incarnation:
            self._lose()
            return False
        if news.sequence <= self._sequence:
            return True  # it came twice
        if news.sequence != self._sequence + 1 or news.epoch < self._epoch:
            self._lose()
            return False
        if news.epoch > self._epoch:
            self.clear()
        self._epoch, self._sequence = news.epoch, news.sequence
        for digest in news.evicted:
            self._remove(digest)
        for digest in news.published:
            self._hold(digest)
        self._age()
        self._room.sweep(SWEPT_PER_MESSAGE + 2 * len(news.published))
        return True

    def replace(self, snapshot: CacheSnapshot) -> bool:
        """Take a snapshot; False if it is older than what is known."""
        later = (snapshot.incarnation, snapshot.sequence) >= (self._incarnation, self._sequence)
        if snapshot.incarnation < self._incarnation or (self.in_step and not later):
            return False
        expected: list[bytes] = []
        if (snapshot.incarnation, snapshot.epoch) == (self._incarnation, self._epoch):
            expected = [digest for digest, held in self._known.items() if not held]
        ending, ended = self._ending, self._ended
        self.clear()
        self._incarnation, self._epoch = snapshot.incarnation, snapshot.epoch
        self._sequence, self.in_step = snapshot.sequence, True
        for digest in snapshot.digests:
            self._hold(digest)
        self.expect(expected)
        if expected:
            self._ending, self._ended = ending, ended
        return True

    # -- what the router knows ---------------------------------------------------------------------

    def expect(self, chain: Sequence[bytes]) -> list[bytes]:
        """Note what a request will publish; returns those of the chain that nothing else promised."""
        known, room = self._known, self._room
        fresh = [digest for digest in chain if digest not in known]
        if len(fresh) > room.left:
            room.refused += len(fresh) - room.left
            del fresh[room.left :]
        room.left -= len(fresh)
        known.update(dict.fromkeys(fresh, False))
        return fresh

    def fulfil(self, digests: list[bytes]) -> None:
        """Note that the request that was to publish these blocks has ended well."""
        self._ending += digests

    def disappoint(self, digests: list[bytes]) -> None:
        """Note that these blocks will not be published."""
        known = self._known
        for digest in digests:
            if known.get(digest) is False:
                del known[digest]
                self._room.left += 1

    def clear(self) -> None:
        """Forget everything; O(1)."""
        self._room.left += len(self._known)
        self._room.freed.add(self._known)
        self._known, self._num_held, self._ending, self._ended = {}, 0, [], []

    # -- parts -------------------------------------------------------------------------------------

    def _lose(self) -> None:
        self.in_step = False
        self.clear()

    def _hold(self, digest: bytes) -> None:
        known = self._known.get(digest)
        if known is None:
            if not self._room.left:
                self._room.refused += 1
                return
            self._room.left -= 1
        if not known:
            self._num_held += 1
            self._known[digest] = True

    def _remove(self, digest: bytes) -> None:
        held = self._known.pop(digest, None)
        if held is not None:
            self._room.left += 1
            self._num_held -= held

    def _age(self) -> None:
        """Let the expectations of requests go that had ended before the message before this one came."""
        self.disappoint(self._ended)
        self._ended, self._ending = self._ending, []
