"""Give slots to running sequences, and a block table to each of them.

Invariants
----------
* Row `slot` of `rows` lists the blocks of its sequence in order of position and is zero (the null block)
  after them; a free slot's row is all zero.
* `blocks(slot)` is the same as a list, and `capacity(slot)` the tokens that they hold.
"""

from __future__ import annotations

import numpy as np

from samebit.rollout.cache.block_pool import NULL_BLOCK


class BlockTables:
    """Holds a slot and a block table for each of `num_slots` sequences."""

    def __init__(self, num_slots: int, blocks_per_slot: int, block_size: int) -> None:
        self.rows = np.zeros((num_slots, blocks_per_slot), dtype=np.int32)
        self.block_size = block_size
        self._blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self._capacity = [0] * num_slots  # asked of each running sequence in each step
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def has_free_slot(self) -> bool:
        """Return whether another sequence can run."""
        return bool(self._free_slots)

    def take_slot(self) -> int:
        """Take a free slot; its table is empty."""
        return self._free_slots.pop()

    def blocks(self, slot: int) -> list[int]:
        """Return the list of a slot's blocks itself: copy what is to outlive a change."""
        return self._blocks[slot]

    def capacity(self, slot: int) -> int:
        """Return how many tokens the blocks of a slot hold."""
        return self._capacity[slot]

    def extend(self, slot: int, blocks: list[int]) -> None:
        """Add blocks behind those of a slot."""
        listed = self._blocks[slot]
        self.rows[slot, len(listed) : len(listed) + len(blocks)] = blocks
        listed.extend(blocks)
        self._capacity[slot] = len(listed) * self.block_size

    def replace(self, slot: int, number: int, block: int) -> None:
        """Put another block in one place of a table."""
        self._blocks[slot][number] = self.rows[slot, number] = block

    def empty(self, slot: int) -> None:
        """Empty a slot's table and free the slot."""
        listed = self._blocks[slot]
        self.rows[slot, : len(listed)] = NULL_BLOCK
        listed.clear()
        self._capacity[slot] = 0
        self._free_slots.append(slot)
