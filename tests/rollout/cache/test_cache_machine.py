"""Both caches do what a dictionary model does, driven by random operations.

After every operation the two agree in what can be hit, in the order in which it would be evicted, in how much is free
and in where each running sequence goes on; and every token is where its block says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from samebit.rollout.cache import Cache, NoPrefixCache, PrefixCache
from samebit.rollout.cache.prefix_tree import CachedBlock
from samebit.rollout.requests.request import Request, Sequence

from .cache_integrity import check_cache, owned_blocks
from .cache_model import CacheModel, ModelSequence, Name

MAX_LEN = 24
STEPS = 60
CASES = 2 * int(os.environ.get("SAMEBIT_SOAK_CASES", "20"))
"""Counts cases, each a run of up to `STEPS` operations, of which about 30 find something to do: `make soak COUNT=2000`
does more than 100,000.
"""

FREQUENCY = {
    "add": 4,
    "admit": 8,
    "follow": 4,
    "compute": 8,
    "append": 5,
    "fork": 4,
    "release": 3,
    "preempt": 1,
    "forget": 1,
    "drop_held": 1,
    "make_room": 3,
    "clear": 1,
    "sweep": 1,
}
KINDS = [kind for kind, times in FREQUENCY.items() for _ in range(times)]
EMPTY = -1


class Pair:
    """Holds a real sequence and its model."""

    def __init__(self, real: Sequence, model: ModelSequence) -> None:
        self.real = real
        self.model = model
        self.siblings: list[Pair] = []
        self.epoch = 0

    def add(self, tokens: list[int]) -> None:
        for token in tokens:
            self.real.append(token, 0.0, 0.0)
        self.model.tokens += tokens


class CacheMachine(RuleBasedStateMachine):
    """Drives both. `make_request` and `prefix_caching` are set by the test. `pages` holds (token, epoch of the oldest
    KV) of each position.
    """

    make_request: Callable[..., Request]
    prefix_caching: bool

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(1, 20),
        slots=st.integers(1, 4),
        policy=st.sampled_from(["lru", "lru", "ref_zero"]),
    )
    def build(self, block_size: int, num_blocks: int, slots: int, policy: str) -> None:
        self.cache: Cache
        if self.prefix_caching:
            self.cache = PrefixCache(num_blocks, block_size, slots, 2 * MAX_LEN, eviction_policy=policy)
        else:
            self.cache = NoPrefixCache(num_blocks, block_size, slots, 2 * MAX_LEN)
        self.model = CacheModel(num_blocks, block_size, slots, policy, shares=self.prefix_caching)
        self.pages = np.full((num_blocks + 1, block_size, 2), EMPTY)
        self.waiting: list[Pair] = []
        self.running: list[Pair] = []
        self.following: list[Pair] = []
        self.digests: dict[Name, bytes] = {}
        self.epoch = 0
        self.seen: list[ModelSequence] = []

    @rule(
        kind=st.sampled_from(KINDS),
        pick=st.integers(0, 50),
        count=st.integers(0, MAX_LEN),
        tokens=st.lists(st.integers(0, 1), min_size=3, max_size=6),
    )
    def operate(self, kind: str, pick: int, count: int, tokens: list[int]) -> None:
        """Do one operation on the sequence picked, if it applies."""
        if kind == "add":
            self.add(pick, count, tokens)
        elif kind == "admit" and self.waiting:
            self.admit(self.waiting[pick % len(self.waiting)], headroom=count // 10)
        elif kind == "follow" and self.waiting:
            self.follow(self.waiting[pick % len(self.waiting)])
        elif kind == "forget" and (idle := self.waiting + self.following):
            self.forget(idle[pick % len(idle)])
        elif kind == "drop_held":
            self.cache.held.drop_all()
            self.model.drop_all()
        elif kind == "make_room":
            assert self.cache.held.free_one() == self.model.make_room()
        elif kind == "clear":
            self.clear()
        elif kind == "sweep":
            self.cache.sweep()
        elif self.running:
            self.advance(self.running[pick % len(self.running)], kind, count, tokens)

    def advance(self, pair: Pair, kind: str, count: int, tokens: list[int]) -> None:
        if kind == "compute":
            self.compute(pair, count)
        elif kind == "append" and not pair.siblings:
            self.append(pair, tokens[: 1 + count % len(tokens)])
        elif kind == "fork":
            self.fork(pair, tokens)
        elif kind in ("release", "preempt"):
            self.release(pair, kind == "preempt")

    def add(self, pick: int, count: int, own: list[int]) -> None:
        """Add a prompt that goes on behind part of an earlier sequence."""
        stem = self.seen[pick % len(self.seen)].tokens[:count] if self.seen else []
        prompt = (stem + own)[:MAX_LEN]
        salt = "a" if pick % 8 == 0 else None
        request = self.make_request(
            str(len(self.seen)), prompt, max_tokens=4 * MAX_LEN, n=1 + pick % 3, cache_salt=salt
        )
        self.cache.track(request)
        first, *rest = (Pair(real, ModelSequence(salt, list(prompt))) for real in request.sequences)
        if self.cache.shares_prompts:
            first.siblings = rest
        else:
            self.waiting += rest
        self.waiting.append(first)
        self.seen.append(first.model)

    def admit(self, pair: Pair, headroom: int) -> None:
        before = self._state()
        admitted = self.cache.admit(pair.real, headroom=headroom)
        assert admitted == self.model.admit(pair.model, headroom)
        if not admitted:
            assert self._state() == before, "a refusal changes nothing"
            return
        for source, target in self.cache.take_copies():
            self.pages[target] = self.pages[source]
        assert pair.real.num_computed == pair.model.computed < pair.real.num_tokens
        pair.epoch = self.epoch
        self.waiting.remove(pair)
        self.running.append(pair)

    def follow(self, pair: Pair) -> None:
        """Let a sequence follow a running one that computes more of what it needs than there is."""
        num_blocks = self.model.awaited(pair.model)
        if isinstance(self.cache, PrefixCache):
            assert self.cache.find_awaited(pair.real) == num_blocks
        assert self.cache.follow(pair.real) == (num_blocks is not None)
        if num_blocks is not None:
            self.model.follow(pair.model, num_blocks)
            self.waiting.remove(pair)
            self.following.append(pair)

    def wake(self, real: list[Sequence], model: list[ModelSequence]) -> None:
        """Check that both say that the same followers wait no more."""
        woken = [pair for pair in self.following if pair.model in model]
        assert set(real) == {pair.real for pair in woken}
        assert len(real) == len(model) == len(woken)
        self.following = [pair for pair in self.following if pair not in woken]
        self.waiting += woken

    def compute(self, pair: Pair, count: int) -> None:
        """Compute some of the known tokens, or (0) all."""
        real, start = pair.real, pair.real.num_computed
        end = min(start + (count or MAX_LEN), real.num_tokens)
        self._write(pair, max(start, real.kv.write_from), end)
        self._read(pair, end)
        real.mark_computed(start, end - start, 0)
        pair.model.computed = end
        self.wake(self.cache.publish_blocks(real), self.model.publish(pair.model))

    def append(self, pair: Pair, tokens: list[int]) -> None:
        """Append one token or several, all or nothing."""
        known = pair.real.num_tokens + len(tokens)
        if known > 2 * MAX_LEN:
            return
        before = self._state()
        appended = self.cache.reserve(pair.real, known - pair.real.num_computed)
        assert appended == self.model.append(pair.model, known)
        if appended:
            pair.add(tokens)
        else:
            assert self._state() == before, "a refusal changes nothing"

    def fork(self, pair: Pair, tokens: list[int]) -> None:
        """Give the other samples their first token when the prompt is there; they wait for a place."""
        length = pair.real.num_prompt_tokens
        if not pair.siblings or not self.cache.may_publish(pair.real):
            return  # what was computed in an old epoch is not handed on
        self.compute(pair, 0)
        samples, pair.siblings = pair.siblings, []
        for sample, token in zip(samples, tokens, strict=False):
            sample.add([token])
        self.cache.hold_prompt(pair.real, [sample.real for sample in samples])
        self.model.hold(pair.model, length, [sample.model for sample in samples])
        self.waiting += samples

    def release(self, pair: Pair, preempt: bool) -> None:
        self.running.remove(pair)
        self.wake(self.cache.take_back(pair.real), self.model.release(pair.model))
        if preempt:
            pair.real.forget_computed()
            self.waiting.append(pair)

    def forget(self, pair: Pair) -> None:
        (self.waiting if pair in self.waiting else self.following).remove(pair)
        self.cache.forget(pair.real)
        self.model.leave(pair.model)

    def clear(self) -> None:
        """Do what an update, a sleep and a reset do."""
        self.wake(self.cache.clear_index(), self.model.clear())
        self.epoch += 1

    # -- agreement ---------------------------------------------------------------------------------

    @invariant()
    def cache_and_model_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache, model = self.cache, self.model
        check_cache(cache)
        assert cache.pool.num_free == model.free
        assert cache.num_hittable == len(model.named)
        by_digest = {entry.digest: entry for entry in self._hittable().values()}
        assert by_digest.keys() == {self._digest(name) for name in model.named}
        assert self._eviction_order() == [self._digest(block.name) for block in model.kept]
        for (salt, tokens), block in model.named.items():
            entry = by_digest[self._digest((salt, tokens))]
            assert cache.index.tokens[entry.block].tolist() == list(tokens[-cache.block_size :])
            assert cache.pool.refcount(entry.block) == block.owners
            assert (salt, tokens[: -cache.block_size]) in model.named or len(tokens) == cache.block_size, "no parent"
        for pair in self.running:
            assert len(owned_blocks(cache, pair.real)) == len(pair.model.blocks)
            self._read(pair, pair.real.num_computed)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        while self.running:
            self.release(self.running[0], preempt=False)
        for pair in self.waiting + self.following:
            self.forget(pair)
        assert self.cache.pool.num_free == self.cache.pool.num_blocks, "nothing leaks"
        self.cache_and_model_agree()

    def _state(self) -> tuple[Any, ...]:
        cache = self.cache
        owned = [owned_blocks(cache, pair.real) for pair in self.running]
        return cache.pool.num_free, self._eviction_order(), owned, vars(cache.counters).copy()

    def _eviction_order(self) -> list[bytes]:
        hittable = self._hittable()
        return [hittable[block].digest for block in self.cache.pool._kept]

    def _hittable(self) -> dict[int, CachedBlock]:
        return self.cache.index.by_block if isinstance(self.cache, PrefixCache) else {}

    def _digest(self, name: Name) -> bytes:
        if name not in self.digests:
            salt, tokens = name
            self.digests[name] = self.cache.hash_prompt(np.array(tokens, np.int64), salt).blocks[-1]
        return self.digests[name]

    def _write(self, pair: Pair, start: int, end: int) -> None:
        blocks, size = owned_blocks(self.cache, pair.real), self.cache.block_size
        for position in range(start, end):
            block = blocks[position // size]
            assert block not in self._hittable(), "a write to a block that can be hit"
            self.pages[block, position % size] = pair.real.token_ids[position], pair.epoch

    def _read(self, pair: Pair, end: int) -> None:
        """Check that every position holds its own token, computed when this sequence's oldest one was."""
        blocks, positions = np.array(owned_blocks(self.cache, pair.real), np.int64), np.arange(end)
        found = self.pages[blocks[positions // self.cache.block_size], positions % self.cache.block_size]
        assert found[:, 0].tolist() == pair.real.token_ids[:end].tolist()
        assert set(found[:, 1].tolist()) <= {pair.epoch}


@pytest.mark.soak
@pytest.mark.parametrize(("prefix_caching", "cases"), [(True, CASES), (False, max(1, CASES // 10))])
def test_the_cache_is_the_model(make_request: Callable[..., Request], prefix_caching: bool, cases: int) -> None:
    class Machine(CacheMachine):
        pass

    Machine.make_request = staticmethod(make_request)
    Machine.prefix_caching = prefix_caching
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=cases, stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
