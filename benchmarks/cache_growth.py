"""What the prefix cache's bookkeeping costs as pool and prompts grow. No model: Python alone.

admission_ms_32768: admitting a request of 32,768 tokens that another one has put into a pool of 100,000
blocks, all of it cached. eviction_growth: time to evict a block in the large pool over that in the small
one. clear_ms_100000: clearing an index that is full.
"""

import gc
import time
from dataclasses import dataclass

import numpy as np
from alternate import Spread, spread

from samebit.rollout import SamplingParams
from samebit.rollout.cache import CacheManager
from samebit.rollout.request import Request, Sequence

BLOCK = 16
VOCABULARY = 32_000


@dataclass(frozen=True)
class Sizes:
    small_pool: int = 1_000
    large_pool: int = 100_000
    prompt: int = 32_768
    evicted: int = 500
    repetitions: int = 5


def measure(sizes: Sizes) -> dict[str, Spread]:
    growth: list[float] = []
    for _ in range(sizes.repetitions + 1):
        small, large = (_eviction_seconds(pool, sizes.evicted) for pool in (sizes.small_pool, sizes.large_pool))
        growth.append(large / small)
    admissions, clears = zip(*(_large_prompt(sizes) for _ in range(sizes.repetitions + 1)), strict=True)
    return {
        f"admission_ms_{sizes.prompt}": spread([1e3 * seconds for seconds in admissions[1:]]),
        "eviction_growth": spread(growth[1:]),
        f"clear_ms_{sizes.large_pool}": spread([1e3 * seconds for seconds in clears[1:]]),
    }


class _Pool:
    """A cache without a model, whose blocks are said to be computed."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = CacheManager(num_blocks, BLOCK, max_num_seqs=2, max_model_len=num_blocks * BLOCK)
        self._random = np.random.default_rng(num_blocks)
        self._made = 0

    def sequence(self, prompt: np.ndarray) -> Sequence:
        """Of a new request, hashed as at submission."""
        self._made += 1
        request = Request(f"request-{self._made}", prompt, SamplingParams(), ordinal=self._made, max_new_tokens=1)
        self.cache.track(request)
        return request.sequences[0]

    def prompt(self, tokens: int) -> np.ndarray:
        return self._random.integers(0, VOCABULARY, tokens)

    def compute(self, sequence: Sequence) -> None:
        """Admit it, publish its blocks and release them: they stay in the cache."""
        if not self.cache.admit(sequence):
            raise RuntimeError("the pool is too small")
        sequence.mark_computed(0, sequence.num_tokens, 0)
        self.cache.publish(sequence)
        self.cache.release(sequence)

    def fill(self) -> None:
        """Every block cached and free."""
        self.compute(self.sequence(self.prompt(self.cache.pool.num_blocks * BLOCK)))


def _eviction_seconds(num_blocks: int, evicted: int) -> float:
    """Seconds a block, when `evicted` cached blocks give way to a new prompt."""
    pool = _Pool(num_blocks)
    pool.fill()
    sequence = pool.sequence(pool.prompt(evicted * BLOCK))
    gc.collect()
    began = time.perf_counter()
    pool.cache.admit(sequence)
    return (time.perf_counter() - began) / evicted


def _large_prompt(sizes: Sizes) -> tuple[float, float]:
    """Seconds to admit a long cached prompt, and to clear the index of a full pool."""
    pool = _Pool(sizes.large_pool)
    pool.fill()
    prompt = pool.prompt(sizes.prompt)
    pool.compute(pool.sequence(prompt))
    again = pool.sequence(prompt)
    gc.collect()
    began = time.perf_counter()
    pool.cache.admit(again)
    admitted = time.perf_counter() - began
    if again.num_computed != sizes.prompt - 1:
        raise RuntimeError(f"{again.num_computed} of {sizes.prompt} tokens were hit")
    pool.cache.release(again)
    began = time.perf_counter()
    pool.cache.clear_index()
    return admitted, time.perf_counter() - began
