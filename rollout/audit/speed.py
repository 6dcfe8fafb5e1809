"""Measure how fast this model is on this machine, and how much memory a sequence takes: `samebit bench`.

The prompts are random tokens, other ones each round; nothing is shared and no end token ends a sample.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from samebit.kernels import bind
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.layout.grids import ceil_div
from samebit.rollout.adapters.base import Base
from samebit.rollout.adapters.pinned import Pinned
from samebit.rollout.config import SMALLEST_BLOCK, RolloutConfig
from samebit.rollout.memory.shape import MemoryShape
from samebit.rollout.models.loading import load_model, naming, position_limit
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

ROUNDS = 3


@dataclass(frozen=True)
class Figure:
    """Holds a number with its unit; over several rounds the median and the extremes."""

    name: str
    unit: str
    value: float
    min: float
    max: float


@dataclass(frozen=True)
class Load:
    """Counts the requests at once, and the prompt tokens and new tokens of each."""

    requests: int = 16
    prompt_tokens: int = 128
    new_tokens: int = 64
    seed: int = 0


def memory_figures(
    folder: str | Path,
    dtype: str = "auto",
    revision: str | None = None,
    *,
    dequantize: bool = False,
    device: str = "cpu",
) -> list[Figure]:
    """Measure bytes over all layers: of a KV block, a running sequence's state and a cached state (0 without
    recurrent layers), and what the default configuration makes of the states: the count of each, and all together.

    Raises:
        ValueError: the model can not be loaded or bound.
    """
    base = Base.of(folder, revision)
    config = RolloutConfig(dtype=dtype, revision=base.revision, dequantize=dequantize, device=device)
    loaded = load_model(base.model, config, unlimited_len=1)
    with naming(folder):
        model = bind(loaded.module)
    shape = MemoryShape.of(model, config.with_block_size(binding_of(model).ssm_chunk))
    sizes = {
        f"kv_block_of_{shape.block_size}_tokens": shape.bytes_per_block(),
        "state_of_a_sequence": shape.bytes_per_slot(),
        "state_of_a_checkpoint": shape.bytes_per_checkpoint(),
    }
    bytes_each = [_exactly(name, "bytes", size) for name, size in sizes.items()]
    if shape.states is None:
        return bytes_each
    return [
        *bytes_each,
        _exactly("sequences_running_or_held", "slots", shape.num_slots),
        _exactly("checkpoints", "slots", shape.num_checkpoints),
        _exactly("all_states", "bytes", shape.bytes_of_states()),
    ]


def speed_figures(
    folder: str | Path,
    load: Load,
    dtype: str = "auto",
    revision: str | None = None,
    *,
    dequantize: bool = False,
    device: str = "cpu",
) -> list[Figure]:
    """Measure output tokens per second, log-probabilities included, and the mean time to the first token.

    Raises:
        ValueError: the model can not be loaded or bound, or is too short for this load.
    """
    model, revision = Pinned.of(folder, revision).here()
    base = Base.of(model, revision)
    length = _checked_length(load, position_limit(cast(str | Path, base.model), base.revision))
    config = RolloutConfig(
        dtype=dtype, revision=revision, dequantize=dequantize, device=device, max_num_seqs=load.requests,
        max_num_batched_tokens=max(2048, load.requests), max_model_len=length, num_blocks=_blocks(load, length, device),
    )  # fmt: skip
    params = SamplingParams(max_tokens=load.new_tokens, ignore_eos=True)
    rng = random.Random(load.seed)
    speeds, first_tokens = [], []
    with RolloutWorker(model, config=config) as worker:
        vocab_size = binding_of(worker.module).vocab_size
        for number in range(ROUNDS + 1):
            prompts = [rng.choices(range(vocab_size), k=load.prompt_tokens) for _ in range(load.requests)]
            began = time.perf_counter()
            outputs = worker.generate(prompts, params)
            seconds = time.perf_counter() - began
            if number > 0:  # the first one compiles
                speeds.append(load.requests * load.new_tokens / seconds)
                first_tokens.append(1e3 * statistics.mean(out.time_to_first_token or 0.0 for out in outputs))
    return [_spread("output_tokens_per_second", "tokens/s", speeds), _spread("time_to_first_token", "ms", first_tokens)]


def _blocks(load: Load, length: int, device: str) -> int | None:
    """Return how many blocks hold the load on a GPU, where the default is a share of its memory; None on a CPU."""
    return None if device == "cpu" else load.requests * ceil_div(length, SMALLEST_BLOCK[device])


def _checked_length(load: Load, limit: int | None) -> int:
    length = load.prompt_tokens + load.new_tokens
    if limit is not None and length > limit:
        raise ValueError(
            f"{load.prompt_tokens} tokens a prompt (--prompt) and {load.new_tokens} new ones (--tokens) are {length} "
            f"in all; allowed: up to this model's {limit} positions"
        )
    return length


def _exactly(name: str, unit: str, value: float) -> Figure:
    return Figure(name, unit, value, value, value)


def _spread(name: str, unit: str, values: list[float]) -> Figure:
    return Figure(name, unit, statistics.median(values), min(values), max(values))
