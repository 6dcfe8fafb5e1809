"""Measure how far a decode step is from the least it can cost.

The floor of a step is `F.linear` with the weights of every layer and of the head, bare, at as many rows as
the step has, plus samebit's attention kernel at the step's context lengths on blocks that no two sequences
share; nothing else. Floor and step alternate, so both see the same machine.
"""

import copy
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from samebit.benchmarks.rounds.stepped_engines import add, engine_for
from samebit.benchmarks.workloads.workload import Tokens, Workload
from samebit.kernels import bind
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.options import AttentionOptions
from samebit.kernels.ops.attention import attention
from samebit.rollout.requests.request import Sequence


@dataclass
class StepTimes:
    """Holds the seconds of each step of one rollout, and of the floor beneath each decode step.

    prefill: steps with prompt tokens among their rows; decode: steps in which all sequences decode;
    ramp_down: decode steps after the first sequence has finished.
    """

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    ramp_down: list[float] = field(default_factory=list)
    gemm: list[float] = field(default_factory=list)
    attention: list[float] = field(default_factory=list)

    @property
    def step_over_floor(self) -> float:
        floors = [gemm + attend for gemm, attend in zip(self.gemm, self.attention, strict=True)]
        return statistics.median(self.decode) / statistics.median(floors)

    @property
    def prefill_share(self) -> float:
        return sum(self.prefill) / sum(self.prefill + self.decode + self.ramp_down)


def medians(rollouts: list[StepTimes], kind: str) -> list[float]:
    """Return the median seconds of this kind of step in each rollout."""
    return [statistics.median(vars(one)[kind]) for one in rollouts]


class Floor:
    """Runs the bare operations of a decode step of this model."""

    def __init__(self, model: PreTrainedModel, rows: int, max_len: int, block_size: int) -> None:
        config = model.config
        dtype = model.lm_head.weight.dtype
        width = -(-max_len // block_size)
        self._block_size = block_size
        self._tables = np.arange(1, rows * width + 1, dtype=np.int32).reshape(rows, width)
        self._pages = binding_of(model).kv_layout.allocate(rows * width, block_size, dtype)
        self._layers = [
            [module.weight for module in layer.modules() if isinstance(module, torch.nn.Linear)]
            for layer in model.model.layers
        ]
        self._head = model.lm_head.weight
        widths = {weight.shape[1] for layer in self._layers for weight in layer} | {self._head.shape[1]}
        self._inputs = {width: torch.randn(rows, width).to(dtype) for width in widths}
        self._q = torch.randn(rows, config.num_attention_heads, config.head_dim).to(dtype)
        self._kv = torch.randn(rows, config.num_key_value_heads, config.head_dim).to(dtype)
        self._scale = config.head_dim**-0.5

    @torch.no_grad()
    def measure(self, sequences: list[Sequence]) -> tuple[float, float]:
        """Measure the seconds of the GEMMs and of attention for the next token of these sequences."""
        context = self._context(sequences)
        gemm = attend = 0.0
        for number, weights in enumerate(self._layers):
            began = time.perf_counter()
            for weight in weights:
                F.linear(self._inputs[weight.shape[1]], weight)
            between = time.perf_counter()
            attention(self._q, self._kv, self._kv, context, AttentionOptions(number, self._scale))
            attend += time.perf_counter() - between
            gemm += between - began
        began = time.perf_counter()
        F.linear(self._inputs[self._head.shape[1]], self._head)
        return gemm + time.perf_counter() - began, attend

    def _context(self, sequences: list[Sequence]) -> ForwardContext:
        count = len(sequences)
        starts = np.array([sequence.num_computed for sequence in sequences], np.int32)
        return ForwardContext(
            positions=torch.from_numpy(starts.astype(np.int64)),
            row_start=np.arange(count, dtype=np.int32),
            lengths=np.ones(count, np.int32),
            starts=starts,
            table_rows=np.arange(count, dtype=np.int32),
            block_tables=self._tables,
            block_size=self._block_size,
            pages=self._pages,
        )


class SteppedRollout:
    """Runs the workload on an engine that is stepped by hand."""

    def __init__(self, model: PreTrainedModel, workload: Workload) -> None:
        self.workload = workload
        max_len = workload.prompt_tokens + workload.new_tokens
        bound = bind(copy.deepcopy(model))
        self.engine = engine_for(bound, workload.sequences, max_len)
        self.floor = Floor(bound, workload.sequences, max_len, self.engine.cache.block_size)

    def rollout(self, prompts: Tokens) -> StepTimes:
        """Run one rollout of the workload, with the floor measured before each decode step."""
        times = StepTimes()
        add(self.engine, prompts, self.workload.samples, self.workload.new_tokens)
        counters = self.engine.counters
        while self.engine.has_work:
            running = self.engine.scheduler.running
            full = len(running) == self.workload.sequences and all(map(_decodes, running))
            if full:
                gemm, attend = self.floor.measure(running)
                times.gemm.append(gemm)
                times.attention.append(attend)
            prompt_tokens = counters.prefill_tokens_computed
            began = time.perf_counter()
            self.engine.step()
            seconds = time.perf_counter() - began
            if counters.prefill_tokens_computed > prompt_tokens:
                times.prefill.append(seconds)
            else:
                (times.decode if full else times.ramp_down).append(seconds)
        return times


def _decodes(sequence: Sequence) -> bool:
    return sequence.num_tokens - sequence.num_computed == 1
