"""Where a sequence with recurrent states goes on from, and which of its states are kept on the way.

Invariants
----------
* A state is kept where it will be wanted: at the last full block of what an admitted sequence knows and at the last
  one before its last token, where it leaves what is cached, where a sequence that waits leaves it, and at the last
  block of one that stops.
* A checkpoint is of a published block whose KV, with all before it, is of the current epoch; a request that fails
  leaves none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebit.rollout.cache.index import CachedBlock, PrefixIndex
from samebit.rollout.cache.prefix_state import PrefixState
from samebit.rollout.cache.states import StateCache
from samebit.rollout.cache.tables import BlockTables
from samebit.rollout.cache.waiting_chains import WaitingChains

if TYPE_CHECKING:
    from samebit.rollout.request import Sequence

Captures = tuple[tuple[int, int], ...]
"""(position, checkpoint) of the states that a step keeps."""


class Checkpoints:
    def __init__(self, states: StateCache, index: PrefixIndex, tables: BlockTables) -> None:
        self.states = states
        self.waiting = WaitingChains()
        self._index = index
        self._tables = tables
        self._size = index.block_size

    # -- of a sequence that waits ------------------------------------------------------------------

    def announce(self, state: PrefixState, num_tokens: int) -> None:
        """A sequence waits that could resume behind any full block before the last of its tokens."""
        if self.states.num_checkpoints:
            state.announced = state.chain.head((num_tokens - 1) // self._size)
            self.waiting.announce(state.announced)

    def withdraw(self, state: PrefixState) -> None:
        """It does not wait any more."""
        self.waiting.withdraw(state.announced)
        state.announced = []

    def reach(self, sequence: Sequence, end: int) -> int:
        """How many of `end` blocks a waiting sequence may resume behind, given a state."""
        return min(end, (sequence.num_tokens - 1) // self._size) if self.states.num_checkpoints else 0

    # -- of one that is admitted and runs ----------------------------------------------------------

    def resume(self, sequence: Sequence, state: PrefixState, start: int) -> None:
        """Bring the live state of an admitted sequence to `start`, and note where it will take checkpoints."""
        size, last = self._size, sequence.num_tokens - 1
        source = None if state.tail is None else state.tail.state_slot
        if start == last and source is not None:
            self.states.fork(source, sequence.slot)
        else:
            if not sequence.prompt_logprobs_wanted:
                self.states.count(state.match, start // size, sequence.num_tokens)
            if start:
                self.states.restore(state.match[start // size - 1], sequence.slot)
        ends = {len(state.match), last // size, sequence.num_tokens // size}
        state.wanted = {end * size for end in ends if end * size > start}

    def plan(self, sequence: Sequence, state: PrefixState, end: int) -> Captures:
        """What to keep while a step computes this sequence up to `end`."""
        if not (state.wanted or self.waiting) or not self.states.num_checkpoints:
            return ()
        reached = {position for position in state.wanted if position <= end}
        state.wanted -= reached
        reached |= self._left_by_waiting(sequence, state, end)
        taken = ((position, self.states.take()) for position in sorted(reached))
        return tuple((position, checkpoint) for position, checkpoint in taken if checkpoint is not None)

    def keep(self, sequence: Sequence, captures: Captures, num_published: int) -> None:
        """What a step has kept belongs to the blocks that end there, if these are among the first published ones."""
        for position, checkpoint in captures:
            number = position // self._size
            self.states.attach(self._entry(sequence, number - 1) if number <= num_published else None, checkpoint)

    @property
    def awaited(self) -> bool:
        """Whether a sequence waits that could resume behind a state which is taken on the way."""
        return bool(self.waiting)

    def save(self, sequence: Sequence, num_published: int) -> None:
        """Keep the state of a sequence that stops as of its last block boundary, if that block is published and no
        step has gone beyond the next one."""
        number = sequence.num_computed // self._size
        gone_on = (sequence.num_computed + sequence.num_ahead) // self._size > number
        if 0 < number <= num_published and not gone_on:
            entry = self._entry(sequence, number - 1)
            if entry is not None:
                self.states.save(sequence.slot, entry)

    def _entry(self, sequence: Sequence, number: int) -> CachedBlock | None:
        return self._index.by_block.get(self._tables.blocks(sequence.slot)[number])

    def _left_by_waiting(self, sequence: Sequence, state: PrefixState, end: int) -> set[int]:
        """The block boundaries that this step reaches at which a chain that waits leaves this one."""
        first, last = sequence.num_computed // self._size, end // self._size
        if first == last or not self.waiting:
            return set()
        chain = state.chain
        chain.cover(sequence.token_ids[:end])
        following = (chain[number + 1] if number + 1 < len(chain) else None for number in range(first, last))
        pairs = zip(range(first, last), following, strict=True)
        return {(number + 1) * self._size for number, after in pairs if self.waiting.leave(chain[number], after)}
