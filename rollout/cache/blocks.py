"""The pool of KV blocks.

Invariants
----------
* Blocks are `1 .. num_blocks`; block 0 is the null block, which is never handed out (padding rows write
  to it).
* A block is either free or owned; `num_free` plus the owned ones is `num_blocks`.
* Taking and giving back cost O(1) a block, whatever the size of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._is_free = bytearray(b"\x00" + b"\x01" * num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has seen that `num_free` allows it."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block == NULL_BLOCK or self._is_free[block]:
                raise RuntimeError(f"block {block} is not owned and can not be given back")
            self._is_free[block] = 1
            self._free.append(block)

    def check(self) -> None:
        """Raise unless the free list and the flags say the same."""
        if len(set(self._free)) != len(self._free):
            raise AssertionError("a block is on the free list twice")
        if sum(self._is_free) != len(self._free):
            raise AssertionError(f"{sum(self._is_free)} flags, {len(self._free)} free blocks")
        if any(not self._is_free[block] or block == NULL_BLOCK for block in self._free):
            raise AssertionError("a block on the free list is flagged as owned")
