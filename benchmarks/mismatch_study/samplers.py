"""Make who samples in an arm: on the trainer's module, on weights rounded to fewer bits, or vLLM.

Invariant: after an update, each weight of a rounded worker is the trainer's, rounded to nearest, ties to even.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from samebit.benchmarks.engines.commands import Vllm
from samebit.benchmarks.mismatch_study.arms import EXACT_BITS, Arm
from samebit.benchmarks.mismatch_study.vllm_sampler import vllm_sampler
from samebit.recipes import tiny_model
from samebit.recipes.experiment import Seed
from samebit.recipes.sync import Synced, in_place, own_copy
from samebit.rollout import RolloutConfig, RolloutWorker
from samebit.weight_sync import SyncReport, WeightStream


@contextmanager
def sampler(arm: Arm, seed: Seed, config: RolloutConfig, judge: RolloutWorker, vllm: Vllm) -> Iterator[Synced]:
    """Make who samples in an arm. judge: a worker on the trainer's module, which is told of each update."""
    if arm.exact:
        yield Synced(judge, in_place(judge))
    elif arm.vllm:
        with vllm_sampler(vllm, seed, config, judge) as rollout:
            yield rollout
    else:
        with _rounded_sampler(arm.mantissa_bits, seed, config, judge) as rollout:
            yield rollout


@contextmanager
def _rounded_sampler(bits: int, seed: Seed, config: RolloutConfig, judge: RolloutWorker) -> Iterator[Synced]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy, tokenizer = tiny_model.load(seed.folder)
        copy_rounded(seed.policy, policy, bits)
        tiny_model.save(policy, tokenizer, folder)
        with RolloutWorker(folder, config=own_copy(config), tokenizer=seed.tokenizer) as worker:

            def update(change: Callable[[], object]) -> SyncReport:
                in_place(judge)(change)
                copy_rounded(seed.policy, policy, bits)
                return worker.receive_weights(WeightStream.of(policy))

            yield Synced(worker, update)


def copy_rounded(source: nn.Module, target: nn.Module, bits: int) -> None:
    """Write each parameter of `source`, rounded, into that of `target`."""
    with torch.no_grad():
        for one, other in zip(source.parameters(), target.parameters(), strict=True):
            other.copy_(rounded(one.detach(), bits))


def rounded(values: Tensor, bits: int) -> Tensor:
    """Return float32 values with `bits` explicit bits of mantissa (0 to 23), to nearest, ties to even."""
    dropped = EXACT_BITS - bits
    if dropped == 0:
        return values
    pattern = values.view(torch.int32)
    last_kept = (pattern >> dropped) & 1
    return ((pattern + (1 << dropped - 1) - 1 + last_kept) >> dropped << dropped).view(torch.float32)
