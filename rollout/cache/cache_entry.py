"""Hold what the cache remembers for one sequence, and of a prompt that is kept for samples which have not begun."""

from __future__ import annotations

from dataclasses import dataclass, field

from samebit.rollout.cache.prefix_tree import CachedBlock
from samebit.rollout.requests.block_digests import TokenChain
from samebit.rollout.requests.request import Sequence

NEVER = -1


@dataclass(slots=True, eq=False)
class HeldPrompt:
    """Holds what is known of a prompt that several samples share.

    leader: the sample that computed it and goes on writing behind it; what the prompt filled stays.
    num_unstarted: samples that have not begun. held_slot: where the state as of the prompt's end is kept; None where
    it is not. running: samples that run and have the prompt in their blocks. keeper: the one of them that owns
    `blocks`, None when it has stopped.
    """

    leader: Sequence
    length: int
    num_unstarted: int
    blocks: list[int] = field(default_factory=list)
    held_slot: int | None = None
    running: dict[Sequence, None] = field(default_factory=dict)
    keeper: Sequence | None = None

    @property
    def state_slot(self) -> int | None:
        """Return where the prompt's state is: kept, or that of the leader as long as it has not gone on."""
        if self.held_slot is not None:
            return self.held_slot
        return self.leader.slot if self.leader.slot >= 0 and self.leader.num_computed == self.length else None


@dataclass(slots=True, eq=False)
class CacheEntry:
    """Holds what the cache remembers of one sequence; nothing else writes it.

    chain: the names of its blocks.
    match: the blocks of the tree that it begins with, while it waits.
    num_published: how many of its leading blocks are in the tree.
    num_passed: how many of its leading blocks lie before what it computes next. There are fewer of them than published
        ones while it computes cached blocks again, for their states.
    epoch: the epoch of its oldest live KV; `NEVER` if it must not publish.
    prompt: the prompt that the samples of its request share; None before that was computed.
    waits_for: the same prompt, while this sample has not begun.
    rebuilds_prompt: whether it computes that prompt again, to hold it for the samples that have not begun.
    checkpoints_due: the positions at which a checkpoint is taken when they are computed.
    counted_waiting: the names of its blocks that are counted as wanted by waiting sequences.
    """

    sequence: Sequence
    chain: TokenChain
    match: list[CachedBlock] = field(default_factory=list)
    num_published: int = 0
    num_passed: int = 0
    epoch: int = NEVER
    prompt: HeldPrompt | None = None
    waits_for: HeldPrompt | None = None
    rebuilds_prompt: bool = False
    checkpoints_due: set[int] = field(default_factory=set)
    counted_waiting: list[bytes] = field(default_factory=list)
