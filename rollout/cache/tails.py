"""Prompts that are held for the samples of a request which have not begun.

Invariants
----------
* A held prompt owns its blocks, all of them, so that a partly filled last one never outlives those before it.
* It ends with the last sample that leaves it, or when all are dropped; a sample may still know a dropped one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebit.rollout.cache.prefix_state import PrefixState
    from samebit.rollout.request import Sequence


@dataclass(slots=True, eq=False)
class PromptTail:
    """leader: the sample that computed the prompt; it goes on writing behind it, what the prompt filled stays."""

    blocks: list[int]
    leader: Sequence
    prompt_length: int
    users: int

    @property
    def has_live_state(self) -> bool:
        """Whether the leader's live state is still that of the prompt: it has not gone on."""
        return self.leader.slot >= 0 and self.leader.num_computed == self.prompt_length


class PromptTails:
    """give_back: releases blocks, in the order given."""

    def __init__(self, give_back: Callable[[list[int]], None]) -> None:
        self._give_back = give_back
        self._held: dict[PromptTail, None] = {}

    def hold(self, tail: PromptTail) -> None:
        """Its blocks are claimed by the caller."""
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
                self._give_back(tail.blocks[::-1])

    def drop(self) -> bool:
        """Give up all; whether there were any."""
        dropped, self._held = self._held, {}
        for tail in dropped:
            self._give_back(tail.blocks[::-1])
        return bool(dropped)

    def blocks(self) -> list[list[int]]:
        """Of each prompt that is held."""
        return [tail.blocks for tail in self._held]
