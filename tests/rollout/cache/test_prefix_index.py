"""The index alone: its tree, and what it remembers of evictions."""

from __future__ import annotations

import numpy as np
import pytest

from samebit.rollout.cache.prefix_tree import PrefixIndex


def test_the_last_evictions_are_known_as_many_as_there_are_blocks() -> None:
    index = PrefixIndex(num_blocks=3, block_size=1)
    digests = [bytes([number]) * 16 for number in range(20)]
    for number, digest in enumerate(digests):
        assert index.insert(1, digest, np.array([number]), None) == 1
        index.remove(1)
        known = [index.was_evicted(one) for one in digests[: number + 1]]
        assert all(known[-3:])
        assert sum(known) <= 6
    index.clear()
    assert not any(map(index.was_evicted, digests))


def test_a_block_has_children_until_the_last_is_evicted() -> None:
    index = PrefixIndex(num_blocks=4, block_size=1)
    for block, previous in ((1, None), (2, 1), (3, 1), (4, 1)):
        index.insert(block, bytes([block]) * 16, np.array([block]), previous)
    first = index.by_block[1]
    for block in (2, 4, 3):
        assert first.has_children
        index.remove(block)
    assert not first.has_children


def test_a_block_is_published_once() -> None:
    index = PrefixIndex(num_blocks=2, block_size=1)
    index.insert(1, b"a" * 16, np.array([1]), None)
    with pytest.raises(RuntimeError, match="block 1 is published already"):
        index.insert(1, b"b" * 16, np.array([2]), None)
