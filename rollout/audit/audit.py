"""Check the promise for this model on this machine: `samebit check`.

The same seeded requests are generated under one schedule after the other. Every log-probability that a
worker reports is compared with the training forward of the same bound model, bit for bit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numba
import torch
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.binding.latent.indexer import indexers_of, most_chosen
from samebit.kernels.layout.grids import ceil_div
from samebit.rollout.adapters.base import Base
from samebit.rollout.audit.adapters import TrainersAdapter
from samebit.rollout.audit.choices import compare_routes, compare_selections
from samebit.rollout.audit.compare import Difference, Row, compare, compare_samples, reported, worst
from samebit.rollout.audit.gemm_rows import check_gemm_rows
from samebit.rollout.audit.images.rows import ImagesCheck, UnboundImages
from samebit.rollout.audit.prefix_cache import CacheCheck, CacheRuns
from samebit.rollout.audit.recurrent_states import StatesCheck
from samebit.rollout.audit.trainer_layouts import LAYOUTS, Layout, Sample, of_transformers, packed
from samebit.rollout.audit.weight_updates import WeightsCheck
from samebit.rollout.audit.workers import (
    GUESSING,
    LEAST_GUESSED,
    can_guess,
    compared_config,
    device_of,
    guesses_of,
)
from samebit.rollout.config import SMALLEST_BLOCK, RolloutConfig
from samebit.rollout.models.kinds import check_computes_images
from samebit.rollout.models.loading import load_model, naming
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

PROMPT_LENGTHS = (1, 2, 3, 63, 64, 65, 17, 130)
LONGEST_PROMPT = 300
UNBOUND_LENGTHS = (2, 17, 65)
"""Lengths of sequences that transformers' own forward computes; few, since that of a recurrent model is slow."""

NEW_TOKENS = 32
BEYOND_CHOICE = 65
"""The longest prompt has at least this count of tokens more than sparse attention reads."""

UNLIMITED_LEN = 512
"""A model whose config knows no limit is checked to at least this length."""


@dataclass(frozen=True)
class Workload:
    """Holds the requests that every schedule serves."""

    prompts: list[list[int]]
    new_tokens: int
    max_model_len: int

    def params(self, temperature: float = 1.0, prompt_logprobs: int | None = None) -> list[SamplingParams]:
        """Return the parameters of each request, seeded, so that every schedule must sample the same tokens; one asks
        for two samples."""
        return [
            SamplingParams(
                n=2 if index == 1 else 1,
                temperature=temperature,
                seed=index,
                max_tokens=self.new_tokens,
                ignore_eos=True,
                prompt_logprobs=prompt_logprobs,
            )
            for index in range(len(self.prompts))
        ]


def check_model(
    folder: str | Path,
    dtype: str = "auto",
    new_tokens: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    ssm_chunk: int | None = None,
    revision: str | None = None,
    dequantize: bool = False,
    images: bool = False,
) -> Iterator[Row]:
    """Check a model on this device; a row at a time, as they are found.

    ``folder``: or a folder in peft's format, whose adapter is checked on its model; or a name of the hub, of which
        ``revision`` is a branch, tag or commit.
    ``new_tokens``: of each request, up to half of the model's length; None for 32, or that half where it is less.
    ``images``: check the whole model, and prompts with images too.
    ``dequantize``: take weights that the folder holds quantized as bfloat16.
    ``ssm_chunk``: the grid of its states, for a model with recurrent layers; None for that of `bind`.

    Raises:
        ValueError: the model can not be loaded, bound, or checked.
    """
    unlimited_len = max(UNLIMITED_LEN, 2 * (new_tokens or 0))
    base = Base.of(folder, revision)
    config = RolloutConfig(dtype=dtype, device=device, revision=base.revision, dequantize=dequantize, images=images)
    loaded = load_model(base.model, config, unlimited_len=unlimited_len)
    new_tokens = _new_tokens(new_tokens, loaded.max_model_len)
    with naming(folder):
        trained = None if base.adapter is None else TrainersAdapter.of(loaded.module, base.adapter)
        module = loaded.module if trained is None else trained.model
        unbound = _Unbound.of(module, seed)
        with_images = UnboundImages.of(module, loaded.max_model_len, seed) if images else None
        model = bind(module) if ssm_chunk is None else bind(module, ssm_chunk=ssm_chunk)
    if images:
        check_computes_images(model)
    if ssm_chunk is not None and binding_of(model).ssm_chunk is None:
        raise ValueError(f"ssm_chunk={ssm_chunk}, but this model has no recurrent layers")
    check = _Check(model, _workload(model, loaded.max_model_len, new_tokens, seed), loaded.max_model_len)
    yield unbound.row(model)
    if with_images is not None:
        yield with_images.row(model)
    yield Row("GEMM rows: any number of rows, any threads", *check_gemm_rows(model))
    yield from check.schedules()
    yield from check.temperatures()
    yield from check.prefix_cache()
    yield from check.layouts()
    yield from check.routing()
    yield from check.selections()
    if with_images is not None:
        yield from ImagesCheck(model, with_images.layout, new_tokens, loaded.max_model_len, seed).rows()
    yield from check.weights() if trained is None else check.adapters(trained)
    yield check.repeats()


def _new_tokens(asked: int | None, max_model_len: int) -> int:
    most = max_model_len // 2
    if asked is not None and not 1 <= asked <= most:
        raise ValueError(
            f"{asked} new tokens a request were asked for (--tokens); allowed: 1 to {most}, half of this model's "
            f"{max_model_len} positions"
        )
    return min(NEW_TOKENS, most) if asked is None else asked


def _workload(model: nn.Module, max_model_len: int, new_tokens: int, seed: int) -> Workload:
    longest = max_model_len - new_tokens
    rng = random.Random(seed)
    vocab_size = binding_of(model).vocab_size
    wanted = max(LONGEST_PROMPT, most_chosen(model) + BEYOND_CHOICE)
    lengths = [*(length for length in PROMPT_LENGTHS if length < longest), min(longest, wanted)]
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return Workload(prompts, new_tokens, max(lengths) + new_tokens)


@dataclass(frozen=True)
class _Unbound:
    """Holds what transformers' own forward makes of some sequences, before samebit's kernels take its place; no scores
    but `trouble` where it does not run.
    """

    samples: list[Sample]
    scores: list[torch.Tensor]
    trouble: str = ""

    @classmethod
    def of(cls, module: Any, seed: int) -> _Unbound:
        rng = random.Random(seed)
        vocab_size = module.get_input_embeddings().weight.shape[0]
        prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in UNBOUND_LENGTHS]
        samples = [Sample(prompt[:1], prompt[1:]) for prompt in prompts]
        try:
            return cls(samples, of_transformers(module, samples))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # boundary: code of the model, whose kernels may refuse sizes or need packages
            return cls(samples, [], f", which does not run here ({type(error).__name__})")

    def row(self, model: nn.Module) -> Row:
        """Say how far the bound module is from it: roundings, if the binding is right."""
        found = compare(packed(model, self.samples, 1.0), self.scores) if self.scores else (0, 0, 0.0)
        return Row(f"beside transformers' own forward{self.trouble}", *found, promised=False)


class _Check:
    """Generates, compares, and remembers what the first schedule gave."""

    def __init__(self, model: Any, workload: Workload, limit: int) -> None:
        self.model = model
        self.workload = workload
        self.limit = limit
        chunk = binding_of(model).ssm_chunk
        least = SMALLEST_BLOCK[device_of(model).type]
        self.smallest_block = max(least, 4 if chunk is None else chunk)
        self.fewest_tokens = max(least, 1 if chunk is None else chunk)
        self.first: list[RequestOutput] = []
        self.repeated = (0, 0, 0.0)

    def schedules(self) -> Iterator[Row]:
        self.first = self._run()
        yield self._row("many requests at once, whole prefill", self.first)
        yield self._row("one request at a time", self._one_by_one(), first=self.first)
        chunked: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 8}
        yield self._row("chunked prefill, 24 tokens a step", self._run(**chunked), first=self.first)
        for block_size in (self.smallest_block, 64 if self.smallest_block < 64 else 2 * self.smallest_block):
            yield self._row(f"KV blocks of {block_size} tokens", self._run(block_size=block_size), first=self.first)
        chosen, outputs, preemptions = self._preempted()
        yield self._row(f"preempted {preemptions} times", outputs, first=[self.first[index] for index in chosen])
        if device_of(self.model).type == "cuda":
            yield self._row("without CUDA graphs", self._run(enforce_eager=True), first=self.first)
        ahead = self._config().runs_ahead
        name = f"decodes launched {'one by one' if ahead else 'ahead of the tokens before'}"
        yield self._row(name, self._run(async_scheduling=not ahead), first=self.first)
        most: int = numba.config.NUMBA_NUM_THREADS
        for count in range(1, min(2, most) + 1):
            note = "" if most > 1 else " (this machine allows no more)"
            yield self._row(f"threads of the worker: {count}{note}", self._run(num_threads=count), first=self.first)
        if can_guess(self.model) and self.workload.new_tokens >= LEAST_GUESSED:
            guesses, outputs = self._guessed()
            yield self._row(f"tokens guessed ahead, {guesses}", outputs, first=2 * self.first)

    def temperatures(self) -> Iterator[Row]:
        for temperature in (0.7, 0.0):
            name = f"temperature {temperature}" if temperature else "greedy"
            outputs = self._run(self.workload.params(temperature))
            yield self._row(name, outputs, temperature=temperature or 1.0)

    def prefix_cache(self) -> Iterator[Row]:
        runs = CacheRuns(self.model, self.workload.max_model_len, self.limit, self.workload.new_tokens)
        for name, outputs, expected in CacheCheck(runs).runs():
            yield self._row(f"prefix cache: {name}", outputs, first=expected)
        if runs.chunk is not None:
            for name, outputs, expected in StatesCheck(self.model, runs).runs():
                yield self._row(f"states: {name}", outputs, first=expected)

    def layouts(self) -> Iterator[Row]:
        for name, layout in LAYOUTS.items():
            yield self._row(f"trainer: {name}", self.first, layout)
        scored = self.workload.params(prompt_logprobs=0)
        with RolloutWorker(self.model, config=self._config(max_num_batched_tokens=24, max_num_seqs=8)) as worker:
            outputs = [out for _ in ("first", "again") for out in worker.generate(self.workload.prompts, scored)]
        found = [torch.tensor((out.prompt_logprobs or [])[1:], dtype=torch.float32) for out in outputs]
        expected = packed(
            self.model, [Sample(out.prompt_token_ids[:1], out.prompt_token_ids[1:]) for out in outputs], 1.0
        )
        yield Row("log-probabilities of the prompts, twice", *compare(found, expected))

    def routing(self) -> Iterator[Row]:
        """Compare the experts of each token, as noted where it was computed first, with the trainer's choice."""
        layout = binding_of(self.model).route_layout
        if layout is None:
            return
        asked = [replace(wanted, return_routed_experts=True) for wanted in self.workload.params()]
        with RolloutWorker(self.model, config=self._config(max_num_batched_tokens=24, max_num_seqs=8)) as worker:
            outputs = [out for _ in ("cold", "warm") for out in worker.generate(self.workload.prompts, asked)]
        yield Row("routing: pairs that differ, cold and warm", *compare_routes(self.model, layout, outputs))

    def selections(self) -> Iterator[Row]:
        """Compare the tokens that sparse attention reads with those that it reads in the trainer."""
        if not indexers_of(self.model):
            return
        changes: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 8}
        if device_of(self.model).type == "cuda":
            changes["enforce_eager"] = True  # a replayed graph calls no hooks
        requests = self.workload.prompts, self.workload.params()
        found = compare_selections(self.model, self._config(**changes), *requests)
        yield Row("selections that differ, module by module, cold and warm", *found)

    def weights(self) -> Iterator[Row]:
        requests = self.workload.prompts, self.workload.params()
        for run in WeightsCheck(self.model, requests, self.first, self.workload.max_model_len).runs():
            yield self._row(run.name, run.outputs, first=run.first, beside=run.beside)

    def adapters(self, trained: TrainersAdapter) -> Iterator[Row]:
        """Compare what a worker loads by name with what the trainer has."""
        yield from trained.rows((self.workload.prompts, self.workload.params()), self.first, self._config())

    def repeats(self) -> Row:
        return Row("same seed, same samples under all of these", *self.repeated)

    def _config(self, **changes: Any) -> RolloutConfig:
        return compared_config(self.model, max_model_len=self.workload.max_model_len, **changes)

    def _run(self, params: list[SamplingParams] | None = None, **config: Any) -> list[RequestOutput]:
        with RolloutWorker(self.model, config=self._config(**config)) as worker:
            return worker.generate(self.workload.prompts, params or self.workload.params())

    def _one_by_one(self) -> list[RequestOutput]:
        with RolloutWorker(self.model, config=self._config()) as worker:
            requests = zip(self.workload.prompts, self.workload.params(), strict=True)
            return [worker.generate([prompt], params)[0] for prompt, params in requests]

    def _guessed(self) -> tuple[str, list[RequestOutput]]:
        """Generate twice with guesses: from answers that begin alike and go on otherwise, then from the same."""
        alike = self.workload.params(temperature=0.9)
        with RolloutWorker(self.model, config=self._config(prompt_lookup_min=1, **GUESSING)) as worker:
            worker.generate(self.workload.prompts, alike)
            outputs = [
                out
                for _ in ("otherwise", "the same")
                for out in worker.generate(self.workload.prompts, self.workload.params())
            ]
            return guesses_of(worker), outputs

    def _preempted(self) -> tuple[list[int], list[RequestOutput], int]:
        """Return the requests, outputs and preemptions of the first pool that is too small, but leaves those who resume
        something to hit; without long prompts at need."""
        prompts, params = self.workload.prompts, self.workload.params()
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        for kept, block_size, part in itertools.product(
            range(len(prompts), 1, -1), dict.fromkeys((self.smallest_block, self.fewest_tokens)), (2, 3)
        ):
            chosen = sorted(by_length[:kept])
            needs = [ceil_div(len(prompts[index]) + self.workload.new_tokens, block_size) for index in chosen]
            config = self._config(block_size=block_size, num_blocks=max(*needs, sum(needs) // part))
            with RolloutWorker(self.model, config=config) as worker:
                outputs = worker.generate([prompts[i] for i in chosen], [params[i] for i in chosen])
                preemptions, hits = (int(worker.stats()[name]) for name in ("preemptions", "prefix_hits"))
            if preemptions and hits:
                return chosen, outputs, preemptions
        raise ValueError("no pool made a preempted request hit what it had computed: ask for more --tokens")

    def _row(
        self,
        name: str,
        outputs: list[RequestOutput],
        layout: Layout = packed,
        *,
        temperature: float = 1.0,
        first: list[RequestOutput] | None = None,
        beside: Difference = (0, 0, 0.0),
    ) -> Row:
        """Compare what was reported, at the sampling temperature and at 1, with the training forward.

        `first`: the same requests under the first schedule, which must have given the same samples. `beside`: what
        else was compared under this condition.
        """
        if first is not None:
            self.repeated = worst(self.repeated, compare_samples(outputs, first))
        samples = [Sample(out.prompt_token_ids, sample.token_ids) for out in outputs for sample in out.samples]
        result = beside
        if samples:
            result = worst(result, compare(reported(outputs), layout(self.model, samples, temperature)))
        if temperature != 1.0:
            raw = [torch.tensor(sample.raw_logprobs) for out in outputs for sample in out.samples]
            result = worst(result, compare(raw, layout(self.model, samples, 1.0)))
        return Row(name, *result)
