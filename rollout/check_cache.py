"""The prefix cache's part of `samebit check`: runs that hit, each beside the same requests without a cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch import nn

from samebit.kernels.binding import binding_of
from samebit.rollout.check_trainer import device_of
from samebit.rollout.config import RolloutConfig
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

REQUESTS = 5
SAMPLES = 4

Prompts = list[list[int]]
Run = tuple[str, list[RequestOutput], list[RequestOutput]]
"""(what was done, its outputs, the outputs of the same requests without a cache)."""


class CacheCheck:
    """Prompts take a quarter of the model's length, so that a second turn fits."""

    def __init__(self, model: nn.Module, max_model_len: int, new_tokens: int) -> None:
        self._model = model
        self._random = random.Random(max_model_len)
        self._vocab_size = binding_of(model).vocab_size
        self._length = max_model_len // 4
        chunk = binding_of(model).ssm_chunk
        self._block = (16 if self._length > 40 else 1) if chunk is None else chunk
        self._config: dict[str, Any] = {
            "max_model_len": max_model_len,
            "block_size": self._block,
            "device": device_of(model).type,
        }
        self._new_tokens = min(new_tokens, self._length - 4)

    def runs(self) -> Iterator[Run]:
        """
        Raises:
            ValueError: the model's length leaves no room for two turns.
        """
        if self._length < 8:
            raise ValueError(f"the prefix cache can not be checked within {4 * self._length} tokens")
        yield from self._one_worker()
        yield from self._arriving_together()
        yield self._under_pressure()

    def _one_worker(self) -> Iterator[Run]:
        first = [self._tokens(self._length - index) for index in range(REQUESTS)]
        longer = [[*prompt[: self._length - 2 * index - 1], *self._tokens(3)] for index, prompt in enumerate(first)]
        with self._worker() as worker:
            cold = worker.generate(first, self._params())
            yield "cold", cold, self._without(first)
            yield "warm", self._hits(worker, first), cold
            yield "partly warm", self._hits(worker, longer), self._without(longer)
            turns = [
                [*prompt, *out.samples[0].token_ids, *self._tokens(3)] for prompt, out in zip(first, cold, strict=True)
            ]
            yield "second turn, blocks from decode", self._hits(worker, turns), self._without(turns)

    def _arriving_together(self) -> Iterator[Run]:
        stem = self._tokens(self._length - 4)
        alike = [[*stem, *self._tokens(1 + index % 3)] for index in range(REQUESTS)]
        with self._worker() as worker:
            yield "leader and followers", self._hits(worker, alike), self._without(alike)
        with self._worker(max_num_batched_tokens=11, max_num_seqs=8) as worker:
            yield "leader and followers, chunked prefill", self._hits(worker, alike), self._without(alike)
        with self._worker() as worker:
            group = self._hits(worker, [stem, alike[0]], SAMPLES)
            yield f"groups of {SAMPLES} samples", group, self._without([stem, alike[0]], SAMPLES)

    def _under_pressure(self) -> Run:
        """A pool of little more than one request: most of what is cached is evicted, the running preempted."""
        prompts = [self._tokens(self._length) for _ in range(REQUESTS)]
        blocks = -(-(self._length + self._new_tokens) // self._block)
        with self._worker(num_blocks=blocks + blocks // 2) as worker:
            worker.generate(prompts, self._params())
            outputs = worker.generate(prompts[::-1], self._params()[::-1])[::-1]
            if worker.stats()["prefix_evictions"] == 0:
                raise ValueError("the pool was not small enough to evict anything: ask for more --tokens")
        return "after evictions", outputs, self._without(prompts)

    def _hits(self, worker: RolloutWorker, prompts: Prompts, samples: int = 1) -> list[RequestOutput]:
        """Generate, and make sure that something was hit: else the row would say nothing."""
        before = worker.stats()["prefix_hits"]
        outputs = worker.generate(prompts, self._params(samples))
        if worker.stats()["prefix_hits"] == before:
            raise ValueError("the prefix cache was never hit: the model's length is too small to check it")
        return outputs

    def _without(self, prompts: Prompts, samples: int = 1) -> list[RequestOutput]:
        with self._worker(enable_prefix_caching=False) as worker:
            return worker.generate(prompts, self._params(samples)[: len(prompts)])

    def _worker(self, **config: Any) -> RolloutWorker:
        return RolloutWorker(self._model, config=RolloutConfig(**self._config, **config))

    def _params(self, samples: int = 1) -> list[SamplingParams]:
        """Seeded: a request gives the same tokens with and without the cache."""
        return [
            SamplingParams(n=samples, seed=index, max_tokens=self._new_tokens, ignore_eos=True)
            for index in range(REQUESTS if samples == 1 else 2)
        ]

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=count)
