"""The block pool and the cache manager."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samebit.rollout.cache import NULL_BLOCK, BlockPool, CacheManager
from samebit.rollout.request import Request


def test_the_pool_hands_out_each_block_once_and_never_the_null_block() -> None:
    pool = BlockPool(5)
    taken = pool.allocate(3) + pool.allocate(2)
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert NULL_BLOCK not in taken
    assert pool.num_free == 0
    pool.check()


def test_a_block_that_was_given_back_is_handed_out_again() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.free([first])
    assert pool.allocate(1) == [first]
    pool.free([first, second])
    assert pool.num_free == 2
    pool.check()


@pytest.mark.parametrize("wrong", [[1, 1], [NULL_BLOCK], [3]])
def test_giving_back_what_is_not_owned_raises(wrong: list[int]) -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) == [1, 2]
    with pytest.raises(RuntimeError, match="not owned"):
        pool.free(wrong)


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(RuntimeError, match="4 blocks asked for, 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_admit_grow_and_release_keep_the_table(make_request: Callable[..., Request]) -> None:
    cache = CacheManager(num_blocks=4, block_size=4, max_num_seqs=2, max_model_len=16)
    a, b = (make_request(name, [1]).sequences[0] for name in "ab")
    assert cache.admit(a, 5)
    assert cache.admit(b, 4)
    cache.check()
    assert cache.grow(a, 8), "two blocks hold eight tokens already"
    assert cache.pool.num_free == 1
    assert cache.grow(a, 9)
    assert cache.block_tables[a.slot].tolist() == [*cache.owned_blocks(a), 0]
    assert not cache.grow(b, 5), "the pool is empty"
    assert len(cache.owned_blocks(b)) == 1
    slot = a.slot
    cache.release(a)
    assert (a.slot, cache.pool.num_free) == (-1, 3)
    assert not cache.block_tables[slot].any()
    cache.check()


def test_growing_is_all_or_nothing(make_request: Callable[..., Request]) -> None:
    cache = CacheManager(num_blocks=3, block_size=2, max_num_seqs=2, max_model_len=16)
    sequence = make_request("a", [1]).sequences[0]
    assert cache.admit(sequence, 2)
    assert not cache.grow(sequence, 8)
    assert cache.pool.num_free == 2
    cache.check()


def test_admission_needs_a_slot_the_blocks_and_the_headroom(make_request: Callable[..., Request]) -> None:
    cache = CacheManager(num_blocks=3, block_size=2, max_num_seqs=1, max_model_len=6)
    a, b = (make_request(name, [1]).sequences[0] for name in "ab")
    assert not cache.admit(a, 7), "four blocks do not fit in three"
    assert not cache.admit(a, 2, headroom=3)
    assert cache.admit(a, 2, headroom=2)
    assert not cache.admit(b, 2), "there is one slot"
    assert b.slot == -1
    cache.check()
