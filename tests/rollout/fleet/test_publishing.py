"""A worker says of its cache what its cache can hit; and the key that names blocks stays secret."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from samebit.rollout import RolloutConfig, SamplingParams
from samebit.rollout.cache import build_cache
from samebit.rollout.fleet.routing.router import Router
from samebit.rollout.keys.digest_key import DigestKey, handed_over
from samebit.rollout.publishing.journal import CacheJournal
from samebit.rollout.requests.block_digests import ChainHasher

GREEDY = SamplingParams(max_tokens=9, temperature=0)


def drain(router: Router, journal: CacheJournal) -> None:
    while (news := journal.take()) is not None:
        assert router.apply("a", news)


@pytest.mark.parametrize("policy", ["lru", "ref_zero"])
def test_a_router_knows_what_a_worker_has_cached(make_worker: Callable[..., tuple], policy: str) -> None:
    """A router knows what a worker has cached, though small pools evict, and updates and sleep clear."""
    worker, _ = make_worker(num_blocks=20, block_size=4, max_model_len=64, eviction_policy=policy)
    index = worker._engine.cache.index
    worker.generate([[1, 2, 3, 4, 5, 6, 7, 8, 9]], GREEDY)  # before anybody listens
    journal, router = worker.open_cache_journal(7), Router(4)
    router.add("a", 8)
    router.replace("a", worker.cache_snapshot(journal))
    draws = random.Random(0)
    for number in range(30):
        first = [draws.randrange(3)] * 8
        worker.generate([first + [draws.randrange(5) for _ in range(draws.randrange(1, 20))]], GREEDY)
        if number == 12:
            worker.reset_prefix_cache()
        if number == 20:
            worker.sleep("kv_cache")
            worker.wake_up()
        drain(router, journal)
        there = {cached.digest for cached in index.by_block.values()}
        assert router.stats()["router_shadow_blocks"] == len(there)
        assert all(router.holds("a", digest) for digest in there)
    assert policy == "ref_zero" or worker.stats()["prefix_evictions"] > 0


def test_a_cache_that_shares_nothing_publishes_nothing(make_worker: Callable[..., tuple]) -> None:
    worker, _ = make_worker(prefix_caching=False)
    journal = worker.open_cache_journal(1)
    worker.generate([[1, 2, 3, 4, 5, 6, 7, 8, 9]], GREEDY)
    assert journal.take() is None
    assert worker.cache_snapshot(journal).digests == []


def test_caches_with_one_key_name_blocks_alike() -> None:
    tokens = np.arange(40)
    key = DigestKey()
    named = [build_cache(10, 4, 2, 40, digest_key=one).hash_prompt(tokens, "salt") for one in (key, key, None)]
    assert named[0] == named[1] != named[2]
    assert named[0] == ChainHasher(4, key).prompt("salt", tokens)


def test_a_whole_prompt_has_a_name() -> None:
    hasher = ChainHasher(4)

    def name(tokens: list[int], salt: str | None = None) -> bytes:
        ids = np.array(tokens)
        return hasher.whole(hasher.prompt(salt, ids), ids)

    assert name([1, 2, 3, 4, 5]) == name([1, 2, 3, 4, 5])
    assert len({name([1]), name([2]), name([1], "s"), name([1, 2, 3, 4]), name([1, 2, 3, 4, 5])}) == 5


def test_the_key_shows_nowhere() -> None:
    secret = b"sixteen secrets!"
    config = RolloutConfig(digest_key=DigestKey(secret))
    for shown in (repr(config), str(config), repr(config.digest_key), str(config.digest_key)):
        assert "sixteen" not in shown
    for value in (config, config.digest_key):
        with pytest.raises(TypeError, match="a digest key is secret: it is not pickled"):
            pickle.dumps(value)
    assert copy.deepcopy(config).digest_key is config.digest_key
    assert replace(config, seed=3).digest_key is config.digest_key
    with handed_over():
        travelled = pickle.loads(pickle.dumps(config))
    assert travelled == config
    assert travelled.digest_key.reveal() == secret
    with pytest.raises(TypeError):
        pickle.dumps(travelled)


@pytest.mark.parametrize(("given", "message"), [(b"short", "16 bytes, got 5 bytes"), ("sixteen secrets!", "got str")])
def test_bad_keys_are_not_shown(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        DigestKey(given)
    assert "s" * 2 not in str(error.value).replace("bytes", "")


def test_a_worker_takes_only_keys() -> None:
    with pytest.raises(ValueError, match="digest_key must be a DigestKey or None, got bytes"):
        RolloutConfig(digest_key=b"sixteen secrets!")
    with pytest.raises(ValueError, match="digest_key needs enable_prefix_caching=True"):
        RolloutConfig(digest_key=DigestKey(), enable_prefix_caching=False)
