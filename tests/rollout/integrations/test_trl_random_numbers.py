"""Random numbers of TRL's trainers with samebit follow from the seed, and a resumed training goes on in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install 'samebit[trl]'")

from datasets import Dataset

from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.integrations.trl import GRPOTrainer, RLOOTrainer
from samebit.rollout.integrations.trl.sampling import sampled

from .test_trl import PROMPTS, config
from .test_trl_async import trainer as async_trainer

pytestmark = pytest.mark.usefixtures("offline")

LENGTH = 11
"""Is so long that a sample of random tokens is hardly drawn twice."""


class Recorder:
    """Rewards, and keeps what it was asked about."""

    __name__ = "variety"

    def __init__(self) -> None:
        self.samples: list[tuple[int, ...]] = []

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.samples += map(tuple, completion_ids)
        return [float(len(set(ids))) for ids in completion_ids]


def trained(kind: type, folder: Path, out: Path, checkpoint: Path | None = None) -> tuple[Any, list[tuple[int, ...]]]:
    """Train; return the weights, and what was sampled."""
    seen = Recorder()
    options = config(kind, out, max_steps=4, save_strategy="steps", save_steps=2)
    made = kind(str(folder), seen, options, train_dataset=Dataset.from_dict({"prompt": PROMPTS * 6}))
    made.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return made.model.state_dict(), seen.samples


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_a_resumed_training_samples_what_the_run_would_have_sampled(kind: type, folder: Path, tmp_path: Path) -> None:
    weights, samples = trained(kind, folder, tmp_path / "run")
    resumed, rest = trained(kind, folder, tmp_path / "resumed", tmp_path / "run" / "checkpoint-2")
    assert len(samples) == 16
    assert rest == samples[8:]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights.items())


def test_samples_follow_from_torchs_generator_and_the_seed_of_the_worker(folder: Path) -> None:
    def drawn(worker: RolloutWorker, params: SamplingParams) -> list[list[int]]:
        torch.manual_seed(0)
        return sampled(worker, [[1], [1], [2], [1], [1]], params)[0]

    free = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    worker = RolloutWorker(folder)
    first = drawn(worker, free)
    assert len({tuple(ids) for ids in first}) == 5, "one prompt's samples differ, together and apart"
    assert drawn(worker, free) == first, "however much the worker has served"
    assert sampled(worker, [[1], [1], [2], [1], [1]], free)[0] != first, "torch's generator has gone on"
    with RolloutWorker(folder, config=RolloutConfig(seed=7)) as other:
        assert drawn(other, free) != first
        seeded = replace(free, seed=3)
        fixed = drawn(other, seeded)
    before = torch.get_rng_state()
    assert sampled(worker, [[1], [1], [2], [1], [1]], seeded)[0] == fixed, "a seed of the user's counts alone"
    assert torch.equal(torch.get_rng_state(), before)
    worker.close()


def test_a_resumed_async_training_draws_others_than_the_steps_before(folder: Path, tmp_path: Path) -> None:
    """A resumed async training draws others than the steps before did, of one prompt, under weights that stay as they
    are.
    """

    def seen(steps: int, checkpoint: str | None = None) -> set[tuple[int, ...]]:
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": steps, "learning_rate": 0.0}
        made, recorder = async_trainer(folder, tmp_path / str(steps), options), Recorder()
        data = Dataset.from_dict({"prompt": [[{"role": "user", "content": "1"}]]})
        rollouts = made.rollout_worker
        rollouts.attach(made.worker, rollouts._params, reward_funcs=[recorder], dataset=data)
        made.train(resume_from_checkpoint=checkpoint)
        return {ids for ids in recorder.samples if len(ids) == LENGTH}

    first = seen(2)
    assert first & seen(2), "the same where it begins anew"
    assert not first & seen(4, str(tmp_path / "2" / "checkpoint-2"))
