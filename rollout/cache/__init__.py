"""KV memory: which block belongs to whom, and what of it can be used again."""

from samebit.rollout.cache.blocks import NULL_BLOCK, BlockPool
from samebit.rollout.cache.manager import CacheManager

__all__ = ["NULL_BLOCK", "BlockPool", "CacheManager"]
