"""Check that the parts of a cache agree. It costs as much as the pool is large, and reads what only the parts know."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from samebit.rollout.cache import NULL_BLOCK, BlockPool, Cache, PrefixCache
from samebit.rollout.cache.block_tables import BlockTables
from samebit.rollout.cache.checkpoints.pool import CheckpointPool
from samebit.rollout.cache.held_prompts import HeldPrompts
from samebit.rollout.cache.leaders import Leaders
from samebit.rollout.cache.prefix_tree import CachedBlock, PrefixTree
from samebit.rollout.requests.request import Sequence


def owned_blocks(cache: Cache, sequence: Sequence) -> list[int]:
    """Return a copy of the blocks of a running sequence, in order of position."""
    return list(cache.tables.blocks(sequence.slot))


def num_unswept(index: PrefixTree) -> int:
    """Count what `clear` left and `sweep` has yet to free."""
    return len(index._cleared) + len(index._evicted._dropped)


def check_cache(cache: Cache) -> None:
    """Raise `AssertionError` unless blocks, tables, slots, index, checkpoints and followers agree."""
    check_pool(cache.pool)
    _check_tables(cache.tables)
    held = [prompt.blocks for prompt in cache.held._held] if isinstance(cache, PrefixCache) else []
    _check_owners(cache, [*cache.tables._blocks, *held])
    if isinstance(cache, PrefixCache):
        _check_leaders(cache.leaders)
        _check_index(cache, cache.index)
        _check_checkpoints(cache.checkpoints, cache.held)
        assert all(entry.sequence is sequence for sequence, entry in cache.entries.items())


def check_pool(pool: BlockPool) -> None:
    """Check that the lists and the refcounts say the same."""
    free = [*pool._blank, *pool._kept, *(block for old in pool._forgotten._left for block in old)]
    assert len(set(free)) == len(free), "a block is free twice"
    assert len(free) == pool.num_free, f"{len(free)} free blocks are listed, {pool.num_free} counted"
    unowned = {block for block in range(1, pool.num_blocks + 1) if pool.refcount(block) == 0}
    assert set(free) == unowned, f"listed as free and without an owner differ in {sorted(unowned ^ set(free))}"
    assert min(pool._refcounts) >= 0
    assert pool.refcount(NULL_BLOCK) == 0, "the null block has an owner"


def _check_tables(tables: BlockTables) -> None:
    for slot, blocks in enumerate(tables._blocks):
        row = tables.rows[slot]
        assert row[: len(blocks)].tolist() == blocks, f"the table of slot {slot} is not its blocks"
        assert not row[len(blocks) :].any(), f"the table of slot {slot} goes on behind its blocks"
        assert tables.capacity(slot) == len(blocks) * tables.block_size
        assert not blocks or slot not in tables._free_slots, f"free slot {slot} owns blocks"


def _check_owners(cache: Cache, tables: list[list[int]]) -> None:
    owners = np.zeros(cache.pool.num_blocks + 1, np.int64)
    for blocks in tables:
        assert len(set(blocks)) == len(blocks), "a sequence lists a block twice"
        owners[blocks] += 1
    counts = [cache.pool.refcount(block) for block in range(cache.pool.num_blocks + 1)]
    assert counts == owners.tolist(), "refcounts are not the numbers of owners"


def _check_leaders(leaders: Leaders) -> None:
    for sequence, awaited in leaders._waits_for.items():
        assert awaited in leaders._led, "a follower waits for a block that no sequence computes"
        assert sequence in leaders._followers[awaited]
    led = {awaited: leader for leader, all_of_it in leaders._leading.items() for awaited in all_of_it}
    assert led == leaders._led, "the blocks led and their leaders differ"


def _check_checkpoints(pool: CheckpointPool, prompts: HeldPrompts) -> None:
    """Check that every slot is free, or of one block or one prompt."""
    held = [prompt.held_slot for prompt in prompts._held if prompt.held_slot is not None]
    assert sorted([*pool._free_held, *pool._free_after_moves, *held]) == list(pool.held_slots)
    cleared = [slot for old in pool._cleared._left for slot in old.values()]
    assert sorted([*pool._free, *pool.by_block.values(), *cleared]) == list(range(pool.num_checkpoints))


def _check_index(cache: PrefixCache, index: PrefixTree) -> None:
    reachable = list(_reachable(index))
    assert len(reachable) == len(index), "the tree and the map of the index differ"
    assert all(index.by_block.get(entry.block) is entry for entry in reachable)
    assert all(entry.stands and entry.epoch == index.epoch for entry in reachable), "an entry that is gone can be hit"
    free = {block for block in index.by_block if cache.pool.refcount(block) == 0}
    assert len(free) == cache.pool.num_kept, f"{cache.pool.num_kept} free blocks are kept, {len(free)} can be hit"


def _reachable(index: PrefixTree) -> Iterator[CachedBlock]:
    """Return every entry that a chain can lead to."""
    left = [index.root]
    while left:
        entry = left.pop()
        more = entry.more_children or {}
        children = [*([] if entry.child is None else [entry.child]), *more.values()]
        assert all(child.digest == digest for digest, child in more.items()), "a child has another's digest"
        assert len({child.digest for child in children}) == len(children), "two children have one digest"
        assert all(child.parent is entry for child in children), "a child does not know its parent"
        left += children
        yield from children
