"""The tree alone knows who follows whom, and remembers evictions."""

from __future__ import annotations

import numpy as np
import pytest

from samebit.rollout.cache.prefix_tree import PrefixTree


def test_the_last_evictions_are_known_as_many_as_there_are_blocks() -> None:
    tree = PrefixTree(num_blocks=3, block_size=1)
    digests = [bytes([number]) * 16 for number in range(20)]
    for number, digest in enumerate(digests):
        assert tree.insert(1, digest, np.array([number]), None) == 1
        tree.remove(1)
        known = [tree.was_evicted(one) for one in digests[: number + 1]]
        assert all(known[-3:])
        assert sum(known) <= 6
    tree.clear()
    assert not any(map(tree.was_evicted, digests))


def test_a_block_has_children_until_the_last_is_evicted() -> None:
    tree = PrefixTree(num_blocks=4, block_size=1)
    for block, previous in ((1, None), (2, 1), (3, 1), (4, 1)):
        tree.insert(block, bytes([block]) * 16, np.array([block]), previous)
    first = tree.by_block[1]
    for block in (2, 4, 3):
        assert first.has_children
        tree.remove(block)
    assert not first.has_children


def test_a_block_is_published_once() -> None:
    tree = PrefixTree(num_blocks=2, block_size=1)
    tree.insert(1, b"a" * 16, np.array([1]), None)
    with pytest.raises(RuntimeError, match="block 1 is published already"):
        tree.insert(1, b"b" * 16, np.array([2]), None)
