"""What the cache keeps for one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from samebit.rollout.cache.chain import TokenChain
from samebit.rollout.cache.index import CachedBlock
from samebit.rollout.cache.tails import PromptTail

NEVER = -1


@dataclass(slots=True, eq=False)
class PrefixState:
    """chain: what its blocks are called. match: the index entries that a waiting sequence begins with.

    num_published: leading blocks that the index knows. num_passed: leading blocks that are behind what it
    computes; fewer than published while it computes cached ones again for their states. epoch: that of the
    oldest live KV, `NEVER` for one that must not publish. group: the prompt that the samples of its request
    share, once it was computed; tail: the same, for a sample that has not begun. renews: it computes that prompt
    again, and will hold it for those that have not. wanted: positions of which a checkpoint will be taken when
    they are computed. announced: its blocks that are counted among those that wait.
    """

    chain: TokenChain
    match: list[CachedBlock] = field(default_factory=list)
    num_published: int = 0
    num_passed: int = 0
    epoch: int = NEVER
    group: PromptTail | None = None
    tail: PromptTail | None = None
    renews: bool = False
    wanted: set[int] = field(default_factory=set)
    announced: list[bytes] = field(default_factory=list)
