"""Do the parts of the cache agree? For tests: it costs as much as the pool is large."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from samebit.rollout.cache.index import CachedBlock, PrefixIndex
from samebit.rollout.cache.manager import CacheManager


def check_cache(cache: CacheManager) -> None:
    """Raise `AssertionError` unless blocks, tables, slots, index, checkpoints and followers agree."""
    cache.pool.check()
    cache.tables.check()
    _check_owners(cache)
    if cache.leaders is not None:
        cache.leaders.check()
    if cache.index is not None:
        _check_index(cache, cache.index)
    if cache.states is not None and cache.tails is not None:
        cache.states.check(cache.tails.state_slots())


def _check_owners(cache: CacheManager) -> None:
    owners = np.zeros(cache.pool.num_blocks + 1, np.int64)
    for blocks in [*cache.tables.all_blocks(), *(() if cache.tails is None else cache.tails.blocks())]:
        if len(set(blocks)) != len(blocks):
            raise AssertionError("a sequence lists a block twice")
        owners[blocks] += 1
    counts = [cache.pool.refcount(block) for block in range(cache.pool.num_blocks + 1)]
    if counts != owners.tolist():
        raise AssertionError("refcounts are not the numbers of owners")


def _check_index(cache: CacheManager, index: PrefixIndex) -> None:
    reachable = list(_reachable(index))
    if len(reachable) != len(index) or any(index.by_block.get(entry.block) is not entry for entry in reachable):
        raise AssertionError("the tree and the map of the index differ")
    if any(not entry.stands or entry.epoch != index.epoch for entry in reachable):
        raise AssertionError("an entry that is gone or of an old epoch can be hit")
    free = {block for block in index.by_block if cache.pool.refcount(block) == 0}
    if len(free) != cache.pool.num_kept:
        raise AssertionError(f"{cache.pool.num_kept} free blocks are kept, {len(free)} can be hit")


def _reachable(index: PrefixIndex) -> Iterator[CachedBlock]:
    """Every entry that a chain can lead to."""
    left = [index.root]
    while left:
        entry = left.pop()
        more = entry.more_children or {}
        children = [*([] if entry.child is None else [entry.child]), *more.values()]
        if any(child.digest != digest for digest, child in more.items()):
            raise AssertionError("a child is known by another's digest")
        if len({child.digest for child in children}) != len(children):
            raise AssertionError("two children have one digest")
        if any(child.parent is not entry for child in children):
            raise AssertionError("a child does not know its parent")
        left += children
        yield from children
