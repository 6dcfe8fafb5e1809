"""Manage checkpoints of the recurrent state (Mamba2, Gated DeltaNet, windows of convolutions): which block has one, and
which slots they are in.

Beside them the slots that keep the whole live state of a prompt, for samples that begin later.

Invariants
----------
* A checkpoint is the state after the last token of a published block. It dies with that block: when the
  block leaves the index, or the index is cleared.
* A checkpoint has one slot and a slot at most one checkpoint; the least recently used one gives way.
* Clearing is O(1): the slots of what was cleared are taken one by one, when others are used up.
* Slots are filled and read by the runner in the order of `CheckpointMoves`, so nothing is read after it was
  overwritten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from samebit.rollout.cache.counters import CheckpointCounters
from samebit.rollout.cache.freed_later import FreedLater
from samebit.rollout.cache.prefix_tree import CachedBlock

Captures = tuple[tuple[int, int], ...]
"""Lists (position, checkpoint) of the states that a step keeps."""


@dataclass
class CheckpointMoves:
    """Lists what happens to states before a step computes anything: all saves, holds, restores, forks, in this order.

    saves: (live slot, checkpoint) of sequences that have stopped: the state at their last block boundary.
    restores: (checkpoint, live slot). holds and forks: (live slot, live slot), the whole of it.
    """

    saves: list[tuple[int, int]] = field(default_factory=list)
    holds: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)


class CheckpointPool:
    """Holds `num_checkpoints` slots for states as of block boundaries, and live slots `held_slots` for prompts."""

    def __init__(self, num_checkpoints: int, block_size: int, held_slots: range) -> None:
        self.num_checkpoints = num_checkpoints
        self.block_size = block_size
        self.counters = CheckpointCounters()
        self.moves = CheckpointMoves()
        self._free = list(range(num_checkpoints - 1, -1, -1))
        self._cleared: FreedLater[int, int] = FreedLater()
        self.by_block: OrderedDict[int, int] = OrderedDict()
        self.held_slots = held_slots
        self._free_held = list(reversed(held_slots))
        self._free_after_moves: list[int] = []

    def __len__(self) -> int:
        return len(self.by_block)

    def deepest(self, match: list[CachedBlock], num_tokens: int) -> int:
        """Return how many blocks of a match end at its last checkpoint before the last of `num_tokens` tokens."""
        deepest = min(len(match), (num_tokens - 1) // self.block_size)
        while deepest and match[deepest - 1].block not in self.by_block:
            deepest -= 1
        return deepest

    def count_misses(self, match: list[CachedBlock], resumed: int, num_tokens: int) -> None:
        """Count what an admission with this match lost, which resumed behind `resumed` of its blocks."""
        usable = match[resumed : (num_tokens - 1) // self.block_size]
        self.counters.replayed_tokens += len(match[resumed:]) * self.block_size
        if any(cached.had_checkpoint for cached in usable):
            self.counters.misses_evicted += 1
        elif usable and self.num_checkpoints and match[-1].has_children:
            self.counters.misses_diverged += 1
        elif usable or (match and not resumed):
            self.counters.misses_no_checkpoint += 1

    def restore(self, cached: CachedBlock, slot: int) -> None:
        """Let an admitted sequence go on behind this block."""
        self.by_block.move_to_end(cached.block)
        self.moves.restores.append((self.by_block[cached.block], slot))
        self.counters.restores += 1

    def fork(self, source: int, slot: int) -> None:
        """Let an admitted sequence go on from the whole state in `source`."""
        self.moves.forks.append((source, slot))
        self.counters.forks += 1

    @property
    def may_hold(self) -> bool:
        """Return whether there will be a slot for a prompt's state after the coming moves."""
        return bool(self._free_held or self._free_after_moves)

    def hold(self, slot: int) -> int | None:
        """Keep the whole state of a live slot; return where, or None when no slot is left for it."""
        if not self._free_held:
            return None
        held = self._free_held.pop()
        self.moves.holds.append((slot, held))
        self.counters.holds += 1
        return held

    def let_go(self, held: int) -> None:
        """Free the slot of a prompt's state; forks of the coming step may still copy it."""
        self._free_after_moves.append(held)

    def renew(self, block: int) -> bool:
        """Make the checkpoint of a block the newest, if it has one; tell whether it has."""
        if block not in self.by_block:
            return False
        self.by_block.move_to_end(block)
        return True

    def take(self) -> int | None:
        """Take a slot for a new checkpoint; None when the budget holds none."""
        if self._free:
            return self._free.pop()
        if self._cleared:
            return self._cleared.pop()[1]
        return self.by_block.popitem(last=False)[1] if self.by_block else None

    def attach(self, cached: CachedBlock | None, checkpoint: int) -> None:
        """Give a block in the tree its checkpoint; if it left, or has one already, the slot is free."""
        if cached is None or cached.block in self.by_block:
            self._free.append(checkpoint)
        else:
            self.by_block[cached.block] = checkpoint
            cached.had_checkpoint = True

    def free_captured(self, captures: Captures) -> None:
        """Free the slots of what a step kept of a sequence that had ended already."""
        self._free += [checkpoint for _, checkpoint in captures]

    def save(self, slot: int, cached: CachedBlock) -> None:
        """Keep the state that a stopping sequence has as of its last block boundary, which this block ends at."""
        checkpoint = None if cached.block in self.by_block else self.take()
        if checkpoint is not None:
            self.moves.saves.append((slot, checkpoint))
            self.attach(cached, checkpoint)

    def drop(self, block: int) -> None:
        """Free the checkpoint of a block that leaves the index, if it has one."""
        checkpoint = self.by_block.pop(block, None)
        if checkpoint is not None:
            self._free.append(checkpoint)

    def clear(self) -> None:
        """Forget all checkpoints; what was about to be saved is not."""
        self._cleared.add(self.by_block)
        self.by_block = OrderedDict()
        self.moves.saves.clear()
        self.moves.holds.clear()

    def take_moves(self) -> CheckpointMoves:
        """Hand over what happens before the coming step."""
        moves, self.moves = self.moves, CheckpointMoves()
        self._free_held += self._free_after_moves
        self._free_after_moves = []
        return moves
