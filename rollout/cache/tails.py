"""Prompts that are held for the samples of a request which have not begun.

Invariants
----------
* A held prompt owns its blocks, all of them, so that a partly filled last one never outlives those before it.
* It ends with the last sample that leaves it, or when its memory is needed; then the first sample that computes
  it again holds it again, for those that still wait.
* While a sample that has the prompt runs (`running`), what is held costs no block: when memory is needed, the last
  block is swapped for that sample's own. So only a prompt of which no sample runs is ever given up for memory.
* With recurrent states it owns a slot with the prompt's, as far as there are such slots.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebit.rollout.cache.blocks import BlockPool
    from samebit.rollout.cache.prefix_state import PrefixState
    from samebit.rollout.cache.states import StateCache
    from samebit.rollout.cache.tables import BlockTables
    from samebit.rollout.request import Sequence


@dataclass(slots=True, eq=False)
class PromptTail:
    """leader: the sample that computed the prompt; it goes on writing behind it, what the prompt filled stays.

    users: samples that have not begun. held_slot: where the state as of the prompt's end is kept; None where it is
    not. running: samples that run and have the prompt in their blocks. keeper: the one of them that owns `blocks`,
    None when it has stopped.
    """

    leader: Sequence
    prompt_length: int
    users: int
    blocks: list[int] = field(default_factory=list)
    held_slot: int | None = None
    running: dict[Sequence, None] = field(default_factory=dict)
    keeper: Sequence | None = None

    @property
    def state_slot(self) -> int | None:
        """Where the prompt's state is: kept, or that of the leader as long as it has not gone on."""
        if self.held_slot is not None:
            return self.held_slot
        return self.leader.slot if self.leader.slot >= 0 and self.leader.num_computed == self.prompt_length else None


class PromptTails:
    """give_back: releases blocks, in the order given. states: of a model that has recurrent ones."""

    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTables,
        give_back: Callable[[list[int]], None],
        states: StateCache | None,
    ) -> None:
        self._pool = pool
        self._tables = tables
        self._give_back = give_back
        self._states = states
        self._held: dict[PromptTail, None] = {}
        self._alone: dict[PromptTail, None] = {}

    def __contains__(self, tail: PromptTail) -> bool:
        """Whether it is held."""
        return tail in self._held

    def hold_first(self, leader: Sequence, samples: Items[Sequence]) -> None:
        """Keep a prompt that was just computed for the other samples of its request."""
        tail = PromptTail(leader, leader.num_prompt_tokens, len(samples))
        for sample in (leader, *samples):
            if sample.prefix is not None:
                sample.prefix.group = tail
                sample.prefix.tail = None if sample is leader else tail
        self.hold(tail, leader)

    def hold(self, tail: PromptTail, leader: Sequence) -> None:
        """Keep what `leader` has computed of this prompt, all of it; its state is the leader's."""
        count = -(-tail.prompt_length // self._tables.block_size)
        tail.leader = tail.keeper = leader
        tail.running = {leader: None}
        tail.blocks = self._tables.blocks(leader.slot)[:count]
        for block in tail.blocks:
            self._pool.claim(block)
        if self._states is not None:
            tail.held_slot = self._states.hold(leader.slot)
        self._held[tail] = None

    def following(self, state: PrefixState, hits: int) -> PromptTail | None:
        """The prompt of which only the end is missing behind these hits, if it is held."""
        tail = state.group
        if tail is None or tail not in self._held or tail.prompt_length // self._tables.block_size != hits:
            return None
        return tail

    def lost(self, state: PrefixState, start: int) -> PromptTail | None:
        """The prompt that other samples wait for and that is not held, if one that goes on at `start` can hold it: with
        recurrent states it has to come past its end."""
        tail = state.group
        if tail is None or not tail.users or tail in self._held:
            return None
        may_hold = self._states is None or (start < tail.prompt_length and self._states.may_hold)
        return tail if may_hold else None

    def leave(self, state: PrefixState) -> None:
        """A sample begins, or never will."""
        tail, state.tail = state.tail, None
        if tail is not None:
            tail.users -= 1
            if tail.users == 0 and tail in self._held:
                self._end(tail)

    def started(self, sequence: Sequence, state: PrefixState, shared: int) -> None:
        """A sequence runs whose blocks have the KV of `shared` tokens."""
        tail = state.group
        if tail is not None and tail in self._held and shared >= tail.prompt_length:
            tail.running[sequence] = None

    def stopped(self, sequence: Sequence, state: PrefixState) -> None:
        """A sequence is about to give its blocks back."""
        tail = state.group
        if tail is None:
            return
        tail.running.pop(sequence, None)
        if tail.keeper is sequence:
            tail.keeper = None
            if tail in self._held:
                self._alone[tail] = None

    def make_room(self) -> bool:
        """Free the blocks that the last held of the prompts without a keeper owns alone; whether there was one."""
        if not self._alone:
            return False
        tail = self._alone.popitem()[0]
        if tail.running:
            self._keep_by(tail, next(iter(tail.running)))
        else:
            self._end(tail)
        return True

    def drop(self) -> bool:
        """Give up all; whether there were any."""
        dropped = list(self._held)
        for tail in dropped:
            self._end(tail)
        return bool(dropped)

    def blocks(self) -> list[list[int]]:
        """Of each prompt that is held."""
        return [tail.blocks for tail in self._held]

    def state_slots(self) -> list[int]:
        """That hold the state of a prompt."""
        return [tail.held_slot for tail in self._held if tail.held_slot is not None]

    def _keep_by(self, tail: PromptTail, sample: Sequence) -> None:
        """Swap the last block for the one that a running sample has in its place; they share the others."""
        own = self._tables.blocks(sample.slot)[len(tail.blocks) - 1]
        before, tail.blocks[-1] = tail.blocks[-1], own
        tail.keeper = sample
        self._pool.claim(own)
        self._give_back([before])

    def _end(self, tail: PromptTail) -> None:
        del self._held[tail]
        self._alone.pop(tail, None)
        self._give_back(tail.blocks[::-1])
        tail.running, tail.keeper = {}, None
        if self._states is not None and tail.held_slot is not None:
            self._states.let_go(tail.held_slot)
            tail.held_slot = None
