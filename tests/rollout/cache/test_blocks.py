"""The block pool keeps its counts, and both caches do with it what they should."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samebit.rollout.cache import NULL_BLOCK, BlockPool, Cache, NoPrefixCache, PrefixCache
from samebit.rollout.requests.request import Request

from ..conftest import tracked
from .cache_integrity import check_cache, check_pool, owned_blocks

BOTH = pytest.mark.parametrize("make", [PrefixCache, NoPrefixCache])


def test_the_pool_hands_out_each_block_once_and_never_the_null_block() -> None:
    pool = BlockPool(5)
    taken = pool.allocate(3)[0] + pool.allocate(2)[0]
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert NULL_BLOCK not in taken
    assert pool.num_free == 0
    check_pool(pool)


def test_a_block_that_was_given_back_is_handed_out_again() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)[0]
    pool.release([first])
    assert pool.allocate(1) == ([first], [])
    pool.release([first, second])
    assert pool.num_free == 2
    check_pool(pool)


def test_blank_blocks_are_taken_before_kept_ones_and_those_least_recently_released_first() -> None:
    pool = BlockPool(5)
    pool.allocate(4)
    pool.release([2, 1, 3], hittable={1, 2, 3})
    pool.release([4])
    pool.claim([2])
    pool.release([2], hittable={2})
    assert (pool.num_free, pool.num_kept) == (5, 3)
    assert [pool.allocate(1) for _ in range(5)] == [([4], []), ([5], []), ([1], [1]), ([3], [3]), ([2], [2])]
    check_pool(pool)


def test_a_block_is_free_when_its_last_owner_is_gone() -> None:
    pool = BlockPool(2)
    (block,), _ = pool.allocate(1)
    pool.claim([block])
    pool.release([block], hittable={block})
    assert (pool.refcount(block), pool.num_free) == (1, 1)
    pool.release([block], hittable={block})
    assert (pool.refcount(block), pool.num_free, pool.num_kept) == (0, 2, 1)
    check_pool(pool)


def test_forgotten_blocks_are_taken_like_blank_ones() -> None:
    pool = BlockPool(4)
    pool.release(pool.allocate(3)[0], hittable={1, 2, 3})
    pool.forget_kept()
    assert (pool.num_kept, pool.num_free) == (0, 4)
    check_pool(pool)
    pool.sweep(2)
    check_pool(pool)
    taken, evicted = pool.allocate(4)
    assert sorted(taken) == [1, 2, 3, 4]
    assert evicted == []
    check_pool(pool)


@pytest.mark.parametrize("wrong", [[1, 1], [NULL_BLOCK], [3]])
def test_giving_back_what_is_not_owned_raises(wrong: list[int]) -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) == ([1, 2], [])
    with pytest.raises(RuntimeError, match="not owned"):
        pool.release(wrong)


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(RuntimeError, match="4 blocks asked for, 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3


@BOTH
def test_admit_grow_and_release_keep_the_table(make: type[Cache], make_request: Callable[..., Request]) -> None:
    cache = make(num_blocks=4, block_size=4, max_num_seqs=2, max_model_len=16)
    a, b = (tracked(cache, make_request(name, [1] * length)) for name, length in (("a", 5), ("b", 4)))
    assert cache.admit(a)
    assert cache.admit(b)
    check_cache(cache)
    assert cache.reserve(a, 8), "two blocks hold eight tokens already"
    assert cache.pool.num_free == 1
    assert cache.reserve(a, 9)
    assert cache.tables.rows[a.slot].tolist() == [*owned_blocks(cache, a), 0]
    assert not cache.reserve(b, 5), "the pool is empty"
    assert len(owned_blocks(cache, b)) == 1
    slot = a.slot
    cache.take_back(a)
    assert (a.slot, cache.pool.num_free) == (-1, 3)
    assert not cache.tables.rows[slot].any()
    check_cache(cache)


@BOTH
def test_growing_is_all_or_nothing(make: type[Cache], make_request: Callable[..., Request]) -> None:
    cache = make(num_blocks=3, block_size=2, max_num_seqs=2, max_model_len=16)
    sequence = tracked(cache, make_request("a", [1, 2]))
    assert cache.admit(sequence)
    assert not cache.reserve(sequence, 8)
    assert cache.pool.num_free == 2
    check_cache(cache)


@BOTH
def test_admission_needs_a_slot_the_blocks_and_the_headroom(
    make: type[Cache], make_request: Callable[..., Request]
) -> None:
    cache = make(num_blocks=3, block_size=2, max_num_seqs=1, max_model_len=6)
    a, b, long = (tracked(cache, make_request(name, [1] * length)) for name, length in (("a", 2), ("b", 2), ("c", 7)))
    assert not cache.admit(long), "four blocks do not fit in three"
    assert not cache.admit(a, headroom=3)
    assert cache.admit(a, headroom=2)
    assert not cache.admit(b), "there is one slot"
    assert b.slot == -1
    check_cache(cache)
