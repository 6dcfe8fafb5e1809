"""Checkpoints of the recurrent state (Mamba layers): which block has one, and which slots they are in.

Beside them the slots that keep the whole live state of a prompt, for samples that begin later.

Invariants
----------
* A checkpoint is the state after the last token of a published block. It dies with that block: when the
  block leaves the index, or the index is cleared.
* A checkpoint has one slot and a slot at most one checkpoint; the least recently used one gives way.
* Clearing is O(1): the slots of what was cleared are taken one by one, when others are used up.
* Slots are filled and read by the runner in the order of `StateMoves`, so nothing is read after it was
  overwritten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from samebit.rollout.cache.counters import StateCounters
from samebit.rollout.cache.index import CachedBlock


@dataclass
class StateMoves:
    """What happens to states before anything is computed: all saves, holds, restores, forks, in this order.

    saves: (live slot, checkpoint) of sequences that have stopped: the state at their last block boundary.
    restores: (checkpoint, live slot). holds and forks: (live slot, live slot), the whole of it.
    """

    saves: list[tuple[int, int]] = field(default_factory=list)
    holds: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)


class StateCache:
    """`num_checkpoints` slots for states as of block boundaries; live slots `held_slots` for prompts."""

    def __init__(self, num_checkpoints: int, block_size: int, held_slots: range) -> None:
        self.num_checkpoints = num_checkpoints
        self.block_size = block_size
        self.counters = StateCounters()
        self.moves = StateMoves()
        self._free = list(range(num_checkpoints - 1, -1, -1))
        self._cleared: list[OrderedDict[int, int]] = []
        self.by_block: OrderedDict[int, int] = OrderedDict()
        self.held_slots = held_slots
        self._free_held = list(reversed(held_slots))
        self._free_after_moves: list[int] = []

    def __len__(self) -> int:
        return len(self.by_block)

    def __contains__(self, block: int) -> bool:
        return block in self.by_block

    def deepest(self, match: list[CachedBlock], num_tokens: int) -> int:
        """Blocks of a match up to its last checkpoint before the last of `num_tokens` tokens; 0 for none."""
        deepest = min(len(match), (num_tokens - 1) // self.block_size)
        while deepest and match[deepest - 1].block not in self.by_block:
            deepest -= 1
        return deepest

    def count(self, match: list[CachedBlock], resumed: int, num_tokens: int) -> None:
        """Note what an admission with this match lost, which resumed behind so many of its blocks."""
        usable = match[resumed : (num_tokens - 1) // self.block_size]
        self.counters.replayed_tokens += len(match[resumed:]) * self.block_size
        if any(entry.had_checkpoint for entry in usable):
            self.counters.misses_evicted += 1
        elif usable and self.num_checkpoints and match[-1].has_children:
            self.counters.misses_diverged += 1
        elif usable or (match and not resumed):
            self.counters.misses_no_checkpoint += 1

    def restore(self, entry: CachedBlock, slot: int) -> None:
        """An admitted sequence goes on behind this block."""
        self.by_block.move_to_end(entry.block)
        self.moves.restores.append((self.by_block[entry.block], slot))
        self.counters.restores += 1

    def fork(self, source: int, slot: int) -> None:
        self.moves.forks.append((source, slot))
        self.counters.forks += 1

    @property
    def may_hold(self) -> bool:
        """Whether there will be a slot for a prompt's state after the coming moves."""
        return bool(self._free_held or self._free_after_moves)

    def hold(self, slot: int) -> int | None:
        """Keep the whole state of a live slot; where, or None when there is no slot left for it."""
        if not self._free_held:
            return None
        held = self._free_held.pop()
        self.moves.holds.append((slot, held))
        self.counters.holds += 1
        return held

    def let_go(self, held: int) -> None:
        """The state of a prompt is no longer wanted; forks of the coming step may still copy it."""
        self._free_after_moves.append(held)

    def take(self) -> int | None:
        """A slot for a new checkpoint; None when the budget holds none."""
        if self._free:
            return self._free.pop()
        if self._cleared:
            checkpoint = self._cleared[-1].popitem()[1]
            if not self._cleared[-1]:
                self._cleared.pop()
            return checkpoint
        return self.by_block.popitem(last=False)[1] if self.by_block else None

    def attach(self, entry: CachedBlock | None, checkpoint: int) -> None:
        """The block of this entry has this checkpoint; without one, or if it has one already, the slot is free."""
        if entry is None or entry.block in self.by_block:
            self._free.append(checkpoint)
        else:
            self.by_block[entry.block] = checkpoint
            entry.had_checkpoint = True

    def save(self, slot: int, entry: CachedBlock) -> None:
        """Keep the state that a stopping sequence has as of its last block boundary, which this block ends at."""
        checkpoint = None if entry.block in self.by_block else self.take()
        if checkpoint is not None:
            self.moves.saves.append((slot, checkpoint))
            self.attach(entry, checkpoint)

    def drop(self, block: int) -> None:
        """A block leaves the index."""
        checkpoint = self.by_block.pop(block, None)
        if checkpoint is not None:
            self._free.append(checkpoint)

    def clear(self) -> None:
        """Nothing is hit again; what was about to be saved is not."""
        if self.by_block:
            self._cleared.append(self.by_block)
            self.by_block = OrderedDict()
        self.moves.saves.clear()
        self.moves.holds.clear()

    def take_moves(self) -> StateMoves:
        moves, self.moves = self.moves, StateMoves()
        self._free_held += self._free_after_moves
        self._free_after_moves = []
        return moves

    def check(self, held: list[int]) -> None:
        """Raise unless every slot is free, or of one block or one prompt (`held`)."""
        free = [*self._free_held, *self._free_after_moves]
        if sorted([*free, *held]) != list(self.held_slots):
            raise AssertionError(f"held slots {held} and free {free} of {self.held_slots}")
        used = [*self._free, *self.by_block.values(), *(slot for old in self._cleared for slot in old.values())]
        if sorted(used) != list(range(self.num_checkpoints)):
            raise AssertionError(f"checkpoint slots {sorted(used)} of {self.num_checkpoints} are accounted for")
