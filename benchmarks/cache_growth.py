"""Measure what the prefix cache's bookkeeping costs as pool and prompts grow. No model: Python alone.

All of these in a pool of 100,000 blocks that are all cached, as the scheduler calls it (does a leader compute this?
is there room?), and with cold caches of the processor, as after a forward pass. admission_ms_32768: a request of 32,768
tokens that are cached. admission_uncached_ms_32768: of tokens that are not, so that blocks are evicted.
eviction_growth: time to evict a block in the large pool over that in a small one, after as many evictions as it has
blocks; of prompts that begin alike. clear_ms_100000: clearing the index
with 1,000 states, 64 requests that wait behind another one, and a prompt that is held for a second sample.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.rollout import SamplingParams
from samebit.rollout.cache import PrefixCache
from samebit.rollout.cache.checkpoints.pool import CheckpointPool
from samebit.rollout.requests.request import Request, Sequence

BLOCK = 16
VOCABULARY = 32_000

T = TypeVar("T")

_WEIGHTS = 1 << 27
"""More bytes than a processor's caches hold."""


@dataclass(frozen=True)
class Sizes:
    small_pool: int = 1_000
    large_pool: int = 100_000
    prompt: int = 32_768
    evicted: int = 500
    states: int = 1_000
    followers: int = 64
    held: int = 1_024
    repetitions: int = 15


def measure(sizes: Sizes) -> dict[str, Spread]:
    growth: list[float] = []
    for _ in range(sizes.repetitions + 1):
        small, large = (_eviction_seconds(pool, sizes.evicted) for pool in (sizes.small_pool, sizes.large_pool))
        growth.append(large / small)
    cached, uncached, clears = zip(*(_large_pool(sizes) for _ in range(sizes.repetitions + 1)), strict=True)
    return {
        f"admission_ms_{sizes.prompt}": spread([1e3 * seconds for seconds in cached[1:]]),
        f"admission_uncached_ms_{sizes.prompt}": spread([1e3 * seconds for seconds in uncached[1:]]),
        "eviction_growth": spread(growth[1:]),
        f"clear_ms_{sizes.large_pool}": spread([1e3 * seconds for seconds in clears[1:]]),
    }


class _Pool:
    """Holds a cache without a model, whose blocks are said to be computed."""

    def __init__(self, num_blocks: int, num_states: int = 0) -> None:
        slots = 4
        checkpoints = CheckpointPool(num_states, BLOCK, range(slots, slots + 1)) if num_states else None
        self.cache = PrefixCache(num_blocks, BLOCK, slots, max_model_len=num_blocks * BLOCK, checkpoints=checkpoints)
        self._random = np.random.default_rng(num_blocks)
        self._made = 0

    def request(self, prompt: np.ndarray, samples: int = 1) -> Request:
        """Return a new request, hashed as at submission."""
        self._made += 1
        params = SamplingParams(n=samples)
        request = Request(f"request-{self._made}", prompt, params, ordinal=self._made, max_new_tokens=1)
        self.cache.track(request)
        return request

    def sequence(self, prompt: np.ndarray) -> Sequence:
        """Return the sequence of a new request."""
        return self.request(prompt).sequences[0]

    def prompt(self, tokens: int) -> np.ndarray:
        return self._random.integers(0, VOCABULARY, tokens)

    def compute(self, sequence: Sequence) -> None:
        """Admit it, publish its blocks and release them: they stay in the cache."""
        self.start(sequence)
        self.cache.take_back(sequence)

    def start(self, sequence: Sequence) -> None:
        """Admit it and publish its blocks."""
        self.admit(sequence)
        sequence.mark_computed(sequence.num_computed, sequence.num_tokens - sequence.num_computed, 0)
        self.cache.publish_blocks(sequence)

    def admit(self, sequence: Sequence) -> None:
        if self.cache.find_awaited(sequence) is not None or not self.cache.admit(sequence):
            raise RuntimeError("the pool is too small")

    def fill(self) -> None:
        """Fill the pool: every block cached and free."""
        self.compute(self.sequence(self.prompt(self.cache.pool.num_blocks * BLOCK)))

    def churn(self) -> None:
        """Evict every block once, by prompts that begin alike; then every block is cached and free again."""
        blocks = min(64, self.cache.pool.num_blocks // 4)
        beginning, own = self.prompt(blocks // 4 * BLOCK), (blocks - blocks // 4) * BLOCK
        while self.cache.counters.evictions < self.cache.pool.num_blocks:
            self.compute(self.sequence(np.append(beginning, self.prompt(own))))

    def crowd(self, sizes: Sizes) -> None:
        """Fill all slots with states, hold a prompt for its second sample, and run a request that others wait for."""
        checkpoints = self.cache.checkpoints
        entries = iter(self.cache.index.by_block.values())
        while len(checkpoints) < checkpoints.num_checkpoints and (slot := checkpoints.take()) is not None:
            checkpoints.attach(next(entries), slot)
        first, second = self.request(self.prompt(sizes.held), samples=2).sequences
        self.start(first)
        self.cache.hold_prompt(first, [second])
        prompt = self.prompt(sizes.held)
        self.admit(self.sequence(prompt))
        for _ in range(sizes.followers):
            follower = self.sequence(np.append(prompt, self.prompt(1)))
            if not self.cache.follow(follower):
                raise RuntimeError("no sequence computes this prompt")


def _seconds_of(act: Callable[[], T]) -> tuple[float, T]:
    """Measure this thread's processor time, without garbage collection, with cold caches as after a forward pass."""
    gc.collect()
    np.ones(_WEIGHTS, np.int8).sum()
    began = time.thread_time()
    result = act()
    return time.thread_time() - began, result


def _eviction_seconds(num_blocks: int, evicted: int) -> float:
    """Return seconds a block, when `evicted` cached blocks give way to a new prompt."""
    pool = _Pool(num_blocks)
    pool.churn()
    sequence = pool.sequence(pool.prompt(evicted * BLOCK))
    seconds, _ = _seconds_of(lambda: pool.admit(sequence))
    return seconds / evicted


def _large_pool(sizes: Sizes) -> tuple[float, float, float]:
    """Measure the seconds to admit a long cached prompt, to admit one that is not cached, and to clear the index."""
    pool = _Pool(sizes.large_pool)
    pool.fill()
    prompt = pool.prompt(sizes.prompt)
    pool.compute(pool.sequence(prompt))
    again, other = pool.sequence(prompt), pool.sequence(pool.prompt(sizes.prompt))
    cached, _ = _seconds_of(lambda: pool.admit(again))
    uncached, _ = _seconds_of(lambda: pool.admit(other))
    if (again.num_computed, other.num_computed) != (sizes.prompt - 1, 0):
        raise RuntimeError(f"{again.num_computed} and {other.num_computed} of {sizes.prompt} tokens were hit")
    crowded = _Pool(sizes.large_pool, sizes.states)
    crowded.fill()
    crowded.crowd(sizes)
    seconds, woken = _seconds_of(crowded.cache.clear_index)
    if len(woken) != sizes.followers:
        raise RuntimeError(f"{len(woken)} of {sizes.followers} requests that waited were woken")
    return cached, uncached, seconds
