"""Check runs that hit the prefix cache, each beside the same requests without a cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from samebit.kernels.binding.binding import binding_of
from samebit.kernels.layout.grids import ceil_div
from samebit.rollout.audit.workers import compared_config, device_of
from samebit.rollout.config import SMALLEST_BLOCK
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

REQUESTS = 5
SAMPLES = 4

Prompts = list[list[int]]
Run = tuple[str, list[RequestOutput], list[RequestOutput]]
"""Holds what was done, its outputs, and the outputs of the same requests without a cache."""


class CacheRuns:
    """Runs workers with and without a cache, and knows what to ask them.

    Prompts take a quarter of the workload's length, so that a second turn fits; with recurrent layers three chunks, and
    on a GPU three of its smallest blocks, if the model's `limit` allows. What is generated after one reaches the end of
    a block.
    """

    def __init__(self, model: nn.Module, max_model_len: int, limit: int, new_tokens: int) -> None:
        binding = binding_of(model)
        self.chunk = binding.ssm_chunk
        length, least = max_model_len // 4, SMALLEST_BLOCK[device_of(model).type]
        grid = max(least, self.chunk or 1)
        if grid > 1:
            length = max(length, min(3 * grid, limit - 2 * new_tokens - 4))
        self.block = grid if grid > 1 or length <= 40 else 16
        self.new_tokens = min(new_tokens, length - 4)
        self.length = _before_the_end_of_a_block(length, self.block, self.new_tokens)
        longest = self.length + 2 * self.new_tokens + 4
        if grid > 1:
            longest = max(longest, min(limit, 3 * grid + new_tokens + 8))
        self.max_model_len = max(max_model_len, longest)
        self._model = model
        self._random = random.Random(max_model_len)
        self._vocab_size = binding.vocab_size

    def hits(
        self, worker: RolloutWorker, prompts: Prompts, samples: int = 1, *, waits: bool = False
    ) -> list[RequestOutput]:
        """Generate, and make sure that something was hit, and with `waits` behind a leader: else the row would say
        nothing."""
        counters = ("prefix_hits", "leader_waits") if waits else ("prefix_hits",)
        before = worker.stats()
        outputs = worker.generate(prompts, self.params(len(prompts), samples))
        after = worker.stats()
        self.need(all(after[name] > before[name] for name in counters), f"no {' and '.join(counters)}")
        return outputs

    def need(self, found: bool, missing: str) -> None:
        """Raise `ValueError` if what a row is about did not happen."""
        if not found:
            smaller = (
                f" with blocks of {self.block} tokens" if self.chunk is None else f" with chunks of {self.chunk} tokens"
            )
            raise ValueError(f"{missing}: the model's length is too small to check the prefix cache{smaller}")

    def without(self, prompts: Prompts, samples: int = 1, **changes: Any) -> list[RequestOutput]:
        with self.worker(enable_prefix_caching=False, **changes) as worker:
            return worker.generate(prompts, self.params(len(prompts), samples))

    def worker(self, **changes: Any) -> RolloutWorker:
        config: dict[str, Any] = {"max_model_len": self.max_model_len, "block_size": self.block, **changes}
        return RolloutWorker(self._model, config=compared_config(self._model, **config))

    def params(self, count: int, samples: int = 1) -> list[SamplingParams]:
        """Return seeded parameters: a request gives the same tokens with and without the cache."""
        return [
            SamplingParams(n=samples, seed=index, max_tokens=self.new_tokens, ignore_eos=True) for index in range(count)
        ]

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=count)


class CacheCheck:
    def __init__(self, runs: CacheRuns) -> None:
        self._runs = runs

    def runs(self) -> Iterator[Run]:
        """Yield a run for each way to hit the cache.

        Raises:
            ValueError: the model's length leaves no room for two turns.
        """
        if self._runs.length < 10:
            raise ValueError(f"the prefix cache can not be checked within {self._runs.max_model_len} tokens")
        yield from self._one_worker()
        yield from self._arriving_together()
        yield self._under_pressure()

    def _one_worker(self) -> Iterator[Run]:
        runs, length = self._runs, self._runs.length
        first = [runs.tokens(length - index) for index in range(REQUESTS)]
        longer = [[*prompt[: length - 2 * index - 1], *runs.tokens(3)] for index, prompt in enumerate(first)]
        with runs.worker() as worker:
            cold = worker.generate(first, runs.params(REQUESTS))
            yield "cold", cold, runs.without(first)
            yield "warm", runs.hits(worker, first), cold
            yield "partly warm", runs.hits(worker, longer), runs.without(longer)
            turns = [
                [*prompt, *out.samples[0].token_ids, *runs.tokens(3)] for prompt, out in zip(first, cold, strict=True)
            ]
            second = runs.hits(worker, turns)
            decoded = [out.num_cached_tokens > len(prompt) for prompt, out in zip(first, second, strict=True)]
            runs.need(any(decoded), "no hit of a block that was filled by decoding")
            yield "second turn, blocks from decode", second, runs.without(turns)

    def _arriving_together(self) -> Iterator[Run]:
        runs = self._runs
        stem = runs.tokens(runs.length - 4)
        alike = [[*stem, *runs.tokens(1 + index % 3)] for index in range(REQUESTS)]
        with runs.worker() as worker:
            yield "leader and followers", runs.hits(worker, alike, waits=True), runs.without(alike)
        half = runs.length // 2  # what is shared ends in the leader's second chunk: tokens are left for its followers
        with runs.worker(max_num_batched_tokens=half, max_num_seqs=4) as worker:
            yield "leader and followers, chunked prefill", runs.hits(worker, alike, waits=True), runs.without(alike)
        prompts = [stem, alike[0]]
        with runs.worker() as worker:
            groups = runs.hits(worker, prompts, SAMPLES)
        yield f"groups of {SAMPLES} samples, and one at a time", groups, runs.without(prompts, SAMPLES, max_num_seqs=1)
        firsts = [replace(group, samples=group.samples[:1]) for group in groups]
        yield "the first of a group, and one alone", firsts, runs.without(prompts)

    def _under_pressure(self) -> Run:
        """Run in a pool of little more than one request: most of what is cached is evicted, and something is hit."""
        runs = self._runs
        prompts = [runs.tokens(runs.length) for _ in range(REQUESTS)]
        blocks = ceil_div(runs.length + runs.new_tokens, runs.block)
        with runs.worker(num_blocks=blocks + blocks // 2) as worker:
            worker.generate(prompts, runs.params(REQUESTS))
            outputs = runs.hits(worker, prompts[::-1])
            if worker.stats()["prefix_evictions"] == 0:
                raise ValueError("the pool was not small enough to evict anything: ask for more --tokens")
        return "after evictions", outputs, runs.without(prompts[::-1])


def _before_the_end_of_a_block(length: int, block: int, new_tokens: int) -> int:
    """Cut a prompt at the last place where its new tokens will fill a block (the last of them has no KV)."""
    while length > 0 and (length + new_tokens - 1) // block == length // block:
        length -= 1
    return length
