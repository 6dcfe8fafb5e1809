"""Slots of running sequences, and the block table that each of them has.

Invariants
----------
* Row `slot` of `rows` lists the blocks of its sequence in order of position and is zero (the null block)
  after them; a free slot's row is all zero.
* `blocks(slot)` is the same as a list, and `capacity(slot)` the tokens that they hold.
"""

from __future__ import annotations

import numpy as np

from samebit.rollout.cache.blocks import NULL_BLOCK


class BlockTables:
    def __init__(self, num_slots: int, blocks_per_slot: int, block_size: int) -> None:
        self.rows = np.zeros((num_slots, blocks_per_slot), dtype=np.int32)
        self.block_size = block_size
        self._blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self._capacity = [0] * num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def take_slot(self) -> int:
        return self._free_slots.pop()

    def blocks(self, slot: int) -> list[int]:
        return self._blocks[slot]

    def capacity(self, slot: int) -> int:
        return self._capacity[slot]

    def extend(self, slot: int, blocks: list[int]) -> None:
        listed = self._blocks[slot]
        self.rows[slot, len(listed) : len(listed) + len(blocks)] = blocks
        listed.extend(blocks)
        self._capacity[slot] = len(listed) * self.block_size

    def replace(self, slot: int, number: int, block: int) -> None:
        self._blocks[slot][number] = self.rows[slot, number] = block

    def give_back(self, slot: int) -> None:
        """Empty a slot's table and free the slot."""
        listed = self._blocks[slot]
        self.rows[slot, : len(listed)] = NULL_BLOCK
        listed.clear()
        self._capacity[slot] = 0
        self._free_slots.append(slot)

    def all_blocks(self) -> list[list[int]]:
        """The blocks of each slot."""
        return self._blocks

    def check(self) -> None:
        """Raise unless rows, lists and free slots agree."""
        for slot, blocks in enumerate(self._blocks):
            row = self.rows[slot]
            if row[: len(blocks)].tolist() != blocks or row[len(blocks) :].any():
                raise AssertionError(f"the table of slot {slot} is not its blocks")
            if self._capacity[slot] != len(blocks) * self.block_size:
                raise AssertionError(f"the capacity of slot {slot} is not that of its blocks")
            if blocks and slot in self._free_slots:
                raise AssertionError(f"free slot {slot} owns blocks")
