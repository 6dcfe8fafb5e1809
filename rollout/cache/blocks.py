"""The pool of KV blocks: how many owners each has, and in which order the free ones are taken.

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

NULL_BLOCK = 0

_NOTHING: frozenset[int] = frozenset()


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._refcounts = [0] * (num_blocks + 1)
        self._blank = list(range(num_blocks, 0, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._forgotten: list[OrderedDict[int, None]] = []

    @property
    def num_kept(self) -> int:
        """Free blocks that are still hittable."""
        return len(self._kept)

    def refcount(self, block: int) -> int:
        return self._refcounts[block]

    def allocate(self, count: int) -> tuple[list[int], list[int]]:
        """Take `count` blocks, which the caller has seen to be free; and those of them that were evicted."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} are free")
        taken: list[int] = []
        while len(taken) < count and (self._blank or self._forgotten):
            taken.append(self._take_blank())
        evicted = [self._kept.popitem(last=False)[0] for _ in range(count - len(taken))]
        taken += evicted
        for block in taken:
            self._refcounts[block] = 1
        self.num_free -= count
        return taken, evicted

    def claim(self, block: int) -> None:
        """One more owner of a block that is owned or kept."""
        count = self._refcounts[block]
        if count == 0:
            del self._kept[block]
            self.num_free -= 1
        self._refcounts[block] = count + 1

    def release(self, blocks: Iterable[int], hittable: Container[int] = _NOTHING) -> None:
        """One owner less of each; those without any become free, the hittable ones kept."""
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
        if self._kept:
            self._forgotten.append(self._kept)
            self._kept = OrderedDict()

    def sweep(self, limit: int) -> None:
        """Do a little of the work that `forget_kept` left."""
        while limit > 0 and self._forgotten:
            self._blank.append(self._take_forgotten())
            limit -= 1

    def _take_blank(self) -> int:
        return self._blank.pop() if self._blank else self._take_forgotten()

    def _take_forgotten(self) -> int:
        last = self._forgotten[-1]
        block = last.popitem()[0]
        if not last:
            self._forgotten.pop()
        return block

    def check(self) -> None:
        """Raise unless the lists and the refcounts say the same."""
        free = [*self._blank, *self._kept, *(block for old in self._forgotten for block in old)]
        if len(set(free)) != len(free):
            raise AssertionError("a block is free twice")
        if len(free) != self.num_free:
            raise AssertionError(f"{len(free)} free blocks are listed, {self.num_free} counted")
        unowned = {block for block in range(1, self.num_blocks + 1) if self._refcounts[block] == 0}
        if set(free) != unowned:
            raise AssertionError(f"listed as free and without an owner differ in {sorted(unowned ^ set(free))}")
        if min(self._refcounts) < 0 or self._refcounts[NULL_BLOCK] != 0:
            raise AssertionError("a refcount is negative, or the null block has an owner")
