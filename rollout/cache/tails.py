"""Prompts that are held for the samples of a request which have not begun.

Invariants
----------
* A held prompt owns its blocks, all of them, so that a partly filled last one never outlives those before it.
* It ends with the last sample that leaves it, or when all are dropped; a sample may still know a dropped one.
* With recurrent states it owns a slot with the prompt's, as far as there are such slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebit.rollout.cache.prefix_state import PrefixState
    from samebit.rollout.cache.states import StateCache
    from samebit.rollout.request import Sequence


@dataclass(slots=True, eq=False)
class PromptTail:
    """leader: the sample that computed the prompt; it goes on writing behind it, what the prompt filled stays.

    held_slot: where the state as of the prompt's end is kept; None where it is not.
    """

    blocks: list[int]
    leader: Sequence
    prompt_length: int
    users: int
    held_slot: int | None = None

    @property
    def state_slot(self) -> int | None:
        """Where the prompt's state is: kept, or that of the leader as long as it has not gone on."""
        if self.held_slot is not None:
            return self.held_slot
        return self.leader.slot if self.leader.slot >= 0 and self.leader.num_computed == self.prompt_length else None


class PromptTails:
    """give_back: releases blocks, in the order given. states: of a model that has recurrent ones."""

    def __init__(self, give_back: Callable[[list[int]], None], states: StateCache | None) -> None:
        self._give_back = give_back
        self._states = states
        self._held: dict[PromptTail, None] = {}

    def hold(self, tail: PromptTail) -> None:
        """Its blocks are claimed by the caller; its state is the leader's."""
        if self._states is not None:
            tail.held_slot = self._states.hold(tail.leader.slot)
        self._held[tail] = None

    def following(self, state: PrefixState, hits: int, block_size: int) -> PromptTail | None:
        """The prompt of which only the end is missing behind these hits, if it is still held."""
        tail = state.tail
        return tail if tail is not None and tail in self._held and tail.prompt_length // block_size == hits else None

    def leave(self, state: PrefixState) -> None:
        tail, state.tail = state.tail, None
        if tail is not None:
            tail.users -= 1
            if tail.users == 0 and tail in self._held:
                del self._held[tail]
                self._end(tail)

    def drop(self) -> bool:
        """Give up all; whether there were any."""
        dropped, self._held = self._held, {}
        for tail in dropped:
            self._end(tail)
        return bool(dropped)

    def blocks(self) -> list[list[int]]:
        """Of each prompt that is held."""
        return [tail.blocks for tail in self._held]

    def state_slots(self) -> list[int]:
        """That hold the state of a prompt."""
        return [tail.held_slot for tail in self._held if tail.held_slot is not None]

    def _end(self, tail: PromptTail) -> None:
        self._give_back(tail.blocks[::-1])
        if self._states is not None and tail.held_slot is not None:
            self._states.let_go(tail.held_slot)
            tail.held_slot = None
