"""The one face of KV memory that the scheduler sees.

Invariants
----------
* A sequence that runs has a slot, and blocks for all of its known tokens; one that does not run has
  neither.
* Row `slot` of `block_tables` lists the blocks in order of position and is zero (the null block) after
  them; a free slot's row is all zero.
* Every call either does the whole of what it says or changes nothing.
"""

from __future__ import annotations

import numpy as np

from samebit.rollout.cache.blocks import NULL_BLOCK, BlockPool
from samebit.rollout.request import Sequence


class CacheManager:
    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.block_tables = np.zeros((max_num_seqs, self.blocks_for(max_model_len)), dtype=np.int32)
        self._owned: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._capacity = [0] * max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_admit(self, num_tokens: int, headroom: int) -> bool:
        """Whether a slot and the blocks are free, with `headroom` blocks to spare for the others."""
        return bool(self._free_slots) and self.blocks_for(num_tokens) + headroom <= self.pool.num_free

    def admit(self, sequence: Sequence, num_tokens: int, *, headroom: int = 0) -> bool:
        """Give a sequence a slot and blocks for `num_tokens`."""
        if not self.can_admit(num_tokens, headroom):
            return False
        sequence.slot = self._free_slots.pop()
        self._extend(sequence.slot, self.blocks_for(num_tokens))
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make a running sequence's blocks cover `num_tokens`."""
        slot = sequence.slot
        if num_tokens <= self._capacity[slot]:
            return True
        count = self.blocks_for(num_tokens) - len(self._owned[slot])
        if count > self.pool.num_free:
            return False
        self._extend(slot, count)
        return True

    def release(self, sequence: Sequence) -> None:
        """Take back a running sequence's slot and blocks."""
        slot = sequence.slot
        owned = self._owned[slot]
        self.pool.free(reversed(owned))
        self.block_tables[slot, : len(owned)] = NULL_BLOCK
        owned.clear()
        self._capacity[slot] = 0
        self._free_slots.append(slot)
        sequence.slot = -1

    def owned_blocks(self, sequence: Sequence) -> list[int]:
        """A copy of the blocks of a running sequence, in order of position."""
        return list(self._owned[sequence.slot])

    def _extend(self, slot: int, count: int) -> None:
        owned = self._owned[slot]
        blocks = self.pool.allocate(count)
        self.block_tables[slot, len(owned) : len(owned) + count] = blocks
        owned.extend(blocks)
        self._capacity[slot] = len(owned) * self.block_size

    def check(self) -> None:
        """Raise unless blocks, tables and slots agree."""
        self.pool.check()
        owned = [block for blocks in self._owned for block in blocks]
        if len(set(owned)) != len(owned):
            raise AssertionError("a block has two owners")
        if len(owned) + self.pool.num_free != self.pool.num_blocks:
            raise AssertionError(f"{len(owned)} owned + {self.pool.num_free} free != {self.pool.num_blocks}")
        for slot, blocks in enumerate(self._owned):
            row = self.block_tables[slot]
            if row[: len(blocks)].tolist() != blocks or row[len(blocks) :].any():
                raise AssertionError(f"the table of slot {slot} is not its blocks")
            if self._capacity[slot] != len(blocks) * self.block_size:
                raise AssertionError(f"the capacity of slot {slot} is not that of its blocks")
            if blocks and slot in self._free_slots:
                raise AssertionError(f"free slot {slot} owns blocks")
