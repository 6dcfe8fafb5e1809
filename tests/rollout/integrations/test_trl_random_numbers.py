"""Random numbers of TRL's trainers with samebit follow from the seed, and a resumed training goes on in them, with the
prompts and the weights of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install 'samebit[trl]'")

import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.integrations.trl import GRPOTrainer, RLOOTrainer
from samebit.rollout.integrations.trl.sampling import sampled

from .test_trl import PROMPTS, config, trainer
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


def trained(
    kind: type,
    model: Any,
    out: Path,
    checkpoint: Path | None = None,
    prompts: Sequence[str] = PROMPTS * 6,
    **options: Any,
) -> tuple[Any, list[tuple[int, ...]]]:
    """Train; return the weights, and what was sampled."""
    seen = Recorder()
    given = config(kind, out, **{"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **options})
    made = kind(model, seen, given, train_dataset=Dataset.from_dict({"prompt": list(prompts)}))
    made.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return made.model.state_dict(), seen.samples


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_a_resumed_training_samples_what_the_run_would_have_sampled(kind: type, folder: Path, tmp_path: Path) -> None:
    weights, samples = trained(kind, str(folder), tmp_path / "run")
    resumed, rest = trained(kind, str(folder), tmp_path / "resumed", tmp_path / "run" / "checkpoint-2")
    assert len(samples) == 16
    assert rest == samples[8:]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(("kind", "step"), [(GRPOTrainer, 4), (RLOOTrainer, 6)], ids=["within", "between two"])
def test_so_does_one_in_a_later_epoch(kind: type, step: int, folder: Path, tmp_path: Path) -> None:
    options = {"max_steps": 8, "prompts": [f"{first}+1=" for first in range(6)]}
    weights, samples = trained(kind, str(folder), tmp_path / "run", **options)
    checkpoint = tmp_path / "run" / f"checkpoint-{step}"
    resumed, rest = trained(kind, str(folder), tmp_path / "resumed", checkpoint, **options)
    assert len(samples) == 32
    assert rest == samples[4 * step :]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_prompts_come_in_the_order_of_trl(kind: type, folder: Path, tmp_path: Path) -> None:
    made, theirs = trainer(kind, folder, tmp_path), {GRPOTrainer: trl.GRPOTrainer, RLOOTrainer: trl.RLOOTrainer}[kind]
    loader, order = made.get_train_dataloader(), theirs._get_train_sampler(made)
    epochs = [[row["prompt"] for batch in loader for row in batch] for _ in range(3)]
    assert epochs == [[made.train_dataset[index]["prompt"] for index in order] for _ in range(3)]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_an_adapter_beside_its_reference_goes_on_from_what_it_has_learned(
    kind: type, folder: Path, tmp_path: Path
) -> None:
    """TRL makes the adapter `ref` of one that a model brings, and transformers loads it alone from a checkpoint."""
    torch.manual_seed(0)
    adapter = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), adapter).save_pretrained(tmp_path / "adapter")

    def model() -> PeftModel:
        return PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter", is_trainable=True
        )

    weights, samples = trained(kind, model(), tmp_path / "run", beta=0.1)
    resumed, rest = trained(kind, model(), tmp_path / "resumed", tmp_path / "run" / "checkpoint-2", beta=0.1)
    assert any(".ref." in name for name in weights)
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
