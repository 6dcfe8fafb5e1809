"""Manage KV memory: which block belongs to whom, and what of it can be used again.

The way through: `contract` says what the scheduler may ask, and answers where nothing is shared; `prefix_cache` shares.
Blocks are owned in `block_pool`, reached by sequences through `block_tables`, found again in `prefix_tree`;
`cache_entry` is what a sequence has in it, `leaders` who computes what several need, `held_prompts` what waits for the
samples of a group. `counters` count, `recent_digests` and `freed_later` keep bookkeeping cheap. `checkpoints` are of
recurrent states.

Imports `requests`, `keys`, `publishing` and the grids of `samebit.kernels.layout`; nothing above `requests`.
"""

from samebit.rollout.cache.block_pool import NULL_BLOCK, BlockPool
from samebit.rollout.cache.checkpoints.pool import CheckpointPool
from samebit.rollout.cache.contract import Cache, NoPrefixCache
from samebit.rollout.cache.prefix_cache import PrefixCache
from samebit.rollout.keys.digest_key import DigestKey

__all__ = ["NULL_BLOCK", "BlockPool", "Cache", "CacheManager", "NoPrefixCache", "PrefixCache", "build_cache"]


def build_cache(
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    *,
    prefix_caching: bool = True,
    eviction_policy: str = "lru",
    checkpoints: CheckpointPool | None = None,
    digest_key: DigestKey | None = None,
) -> Cache:
    """Build the cache of a worker. checkpoints: of a model with recurrent states. digest_key: names its blocks."""
    if not prefix_caching:
        return NoPrefixCache(num_blocks, block_size, max_num_seqs, max_model_len)
    return PrefixCache(
        num_blocks, block_size, max_num_seqs, max_model_len, eviction_policy=eviction_policy, checkpoints=checkpoints,
        digest_key=digest_key,
    )  # fmt: skip


CacheManager = build_cache
"""Is the promised name (docs/prefix-cache.md) under which other code builds a cache; nothing here uses it."""
