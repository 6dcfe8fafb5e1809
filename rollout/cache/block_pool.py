"""Know how many owners each KV block has, and in which order the free ones are taken.

Invariants
----------
* Blocks are `1 .. num_blocks`; block 0 is the null block, which is never handed out (padding rows write
  to it).
* A block is owned (its refcount is above 0) or free; `num_free` plus the owned ones is `num_blocks`.
* A free block is blank, or kept: still hittable, with the least recently released first. Blank ones are
  taken first, so a kept one is evicted only when nothing else is left.
* Claiming, releasing and evicting cost O(1) a block, forgetting all kept ones O(1), whatever the size of
  the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from samebit.rollout.cache.freed_later import FreedLater

NULL_BLOCK = 0

_NOTHING: frozenset[int] = frozenset()


class BlockPool:
    """Counts the owners of each block, and keeps the free ones in the order in which they are taken."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._refcounts = [0] * (num_blocks + 1)
        self._blank = list(range(num_blocks, 0, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._forgotten: FreedLater[int, None] = FreedLater()

    @property
    def num_kept(self) -> int:
        """Return how many free blocks can still be hit."""
        return len(self._kept)

    def refcount(self, block: int) -> int:
        """Return how many owners a block has."""
        return self._refcounts[block]

    def allocate(self, count: int) -> tuple[list[int], list[int]]:
        """Take `count` blocks, which the caller has seen to be free; return them, and the evicted ones among them."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} are free")
        taken: list[int] = []
        while len(taken) < count and (self._blank or self._forgotten):
            taken.append(self._blank.pop() if self._blank else self._forgotten.pop()[0])
        evicted = [self._kept.popitem(last=False)[0] for _ in range(count - len(taken))]
        taken += evicted
        for block in taken:
            self._refcounts[block] = 1
        self.num_free -= count
        return taken, evicted

    def claim(self, blocks: Iterable[int]) -> None:
        """Add an owner to blocks that are owned or kept."""
        counts = self._refcounts
        for block in blocks:
            if counts[block] == 0:
                del self._kept[block]
                self.num_free -= 1
            counts[block] += 1

    def release(self, blocks: Iterable[int], hittable: Container[int] = _NOTHING) -> None:
        """Take an owner from each; those without any become free, the hittable ones kept."""
        counts = self._refcounts
        for block in blocks:
            if counts[block] < 1:
                raise RuntimeError(f"block {block} is not owned and can not be given back")
            counts[block] -= 1
            if counts[block] == 0:
                self.num_free += 1
                if block in hittable:
                    self._kept[block] = None
                else:
                    self._blank.append(block)

    def forget_kept(self) -> None:
        """Make every kept block blank, at once."""
        self._forgotten.add(self._kept)
        self._kept = OrderedDict()

    def sweep(self, limit: int) -> None:
        """Do a little of the work that `forget_kept` left."""
        while limit > 0 and self._forgotten:
            self._blank.append(self._forgotten.pop()[0])
            limit -= 1
