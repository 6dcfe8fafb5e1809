"""TRL's AsyncGRPO runs with samebit in its process: what is fresh is equal bit for bit, and trees are unfolded."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install 'samebit[trl]'")

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.packing import TreeRow
from trl.trainer.utils import add_fused_lm_head

from samebit.kernels import token_logprobs
from samebit.kernels.binding.trainer.training import token_scores
from samebit.rollout import RolloutWorker, SamplingParams
from samebit.rollout.integrations.trl.agreement import COMPARED
from samebit.rollout.integrations.trl.async_grpo import AsyncGRPOTrainer
from samebit.rollout.integrations.trl.async_rollouts import VERSION
from samebit.rollout.integrations.trl.fused_forward import give_scores

from ...patience import HANG, wait_until
from .trl_model import byte_tokenizer, with_end_tokens

pytestmark = pytest.mark.usefixtures("offline")

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulated": ({"gradient_accumulation_steps": 2, "token_budget": 200}, {}),
    "as many samples as asked for": ({}, {"in_flight": "recompute"}),
    "LoRA": ({}, {"peft_config": LoraConfig(r=4, target_modules="all-linear")}),
}


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [len(set(messages[0]["content"])) / 10 for messages in completions]


def trainer(folder: Path, out: Path, options: dict[str, Any] | None = None, **more: Any) -> AsyncGRPOTrainer:
    given = {
        "output_dir": str(out),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 11,
        "max_staleness": 0,
        "token_budget": 0,
        "learning_rate": 1e-3,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    prompts = [[{"role": "user", "content": text}] for text in ("1", "2+3=", "another one")]
    args = AsyncGRPOConfig(**{**given, **(options or {})})
    return AsyncGRPOTrainer(str(folder), reward, args, Dataset.from_dict({"prompt": prompts}), **more)


@pytest.mark.parametrize("case", CASES)
def test_no_token_of_a_fresh_sample_differs(case: str, folder: Path, tmp_path: Path) -> None:
    options, more = CASES[case]
    trained = trainer(folder, tmp_path, options, **more)
    trained.train()
    rows = [row for row in trained.state.log_history if "loss" in row]
    assert len(rows) == 4
    assert sum(COMPARED in row for row in rows) >= 3
    assert trained.agreement.differing == 0
    assert trained.agreement.probs_diff_max == 0.0
    assert trained.worker.weight_version == trained.model_version == 5
    assert not trained.worker.paused
    assert trained.worker.trouble() is None


def test_old_samples_are_off_policy(folder: Path, tmp_path: Path) -> None:
    """What was sampled under older weights is not compared, and its ratio is not one."""
    trained = trainer(folder, tmp_path, {"max_staleness": 3, "max_inflight_tasks": 32, "learning_rate": 0.05})
    trained.train()
    rows = [row for row in trained.state.log_history if "loss" in row]
    stale = [row for row in rows if row["sample/staleness_mean"] >= 1]
    assert stale
    assert any(row["ratio"] != 1.0 for row in stale)
    assert trained.agreement.differing == 0


def test_a_turn_that_a_step_aborts_goes_on(folder: Path, tmp_path: Path) -> None:
    """A turn that a step aborts goes on; it is of several versions then, and says so. These have the same weights here,
    so that its bits can be looked at.
    """
    trained = trainer(folder, tmp_path, {"max_completion_length": 200, "max_inflight_tasks": 8}, in_flight="abort")
    trained.rollout_worker.start()
    for _ in range(3):
        enough = trained.worker.stats()["output_tokens"] + 100
        wait_until(lambda enough=enough: trained.worker.stats()["output_tokens"] > enough)
        trained.weight_transfer.hold()
        trained.weight_transfer.release()
    samples = iter(lambda: trained.rollout_worker.rollout_buffer.get(timeout=HANG), None)
    for sample in samples:
        assert sample.completion_mask.sum() == 200 or sample.input_ids[-1] in trained.eos_token_ids
        if math.isnan(sample.metrics[VERSION]):
            break
    trained.rollout_worker.stop()
    assert trained.worker.stats()["requests_aborted"] > 0
    found = token_logprobs(trained.model, torch.from_numpy(sample.input_ids[None]))[0]
    sampled = torch.from_numpy(sample.completion_mask[1:]).bool()
    assert torch.equal(found[sampled], torch.from_numpy(sample.old_log_probs[1:])[sampled])


def test_a_failing_reward_ends_the_training(folder: Path, tmp_path: Path) -> None:
    def broken(**_: Any) -> list[float]:
        raise ArithmeticError("no reward today")

    trained = trainer(folder, tmp_path)
    trained.rollout_worker.attach(trained.worker, trained.rollout_worker._params, reward_funcs=[broken])
    with pytest.raises(RuntimeError, match=r"ArithmeticError: no reward today"):
        trained.train()
    with pytest.raises(RuntimeError, match=r"ArithmeticError: no reward today"):
        trained.rollout_worker.check_health(HANG)


def test_what_the_end_of_a_training_cuts_off_is_not_scored(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the end of a training cuts off is not scored. The worker stands still, so that nothing is sampled before the
    end.
    """
    scored = []

    def rewarded(completion_ids: list[list[int]], **_: Any) -> list[float]:
        scored.extend(completion_ids)
        return [0.0] * len(completion_ids)

    trained = trainer(folder, tmp_path, {"max_inflight_tasks": 4})
    trained.rollout_worker.attach(trained.worker, trained.rollout_worker._params, reward_funcs=[rewarded])
    trained.worker.pause()
    trained.rollout_worker.start()
    wait_until(lambda: trained.worker.stats()["waiting"] == 4)
    trained.rollout_worker.stop()
    trained.rollout_worker.check_health(HANG)
    assert not scored
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert trained.rollout_worker.rollout_buffer.empty()


def test_a_failed_step_leaves_no_half_written_weights_to_generate_with(folder: Path, tmp_path: Path) -> None:
    trained = trainer(folder, tmp_path)
    trained.create_optimizer()

    def broken(*_: Any, **__: Any) -> None:
        raise ArithmeticError("no step today")

    trained.optimizer.step = broken
    with pytest.raises(ArithmeticError):
        trained.train()
    assert "did not end" in str(trained.worker.trouble())


def test_a_checkpoint_goes_on_with_the_next_prompt(folder: Path, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer(folder, tmp_path, options).train()
    assert (tmp_path / "checkpoint-2" / "rollout_state.json").is_file()
    again = trainer(folder, tmp_path, {**options, "max_steps": 4})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.rollout_worker._loop_kwargs["dataset_start_index"] > 0
    assert again.agreement.compared > 0
    assert again.agreement.differing == 0


def test_end_tokens_outside_the_vocabulary(folder: Path, tmp_path: Path) -> None:
    """Samples end at the model's other end tokens, here all tokens, where some are outside the vocabulary, as in
    generation configs of cut-down models.
    """
    model = with_end_tokens(folder, tmp_path / "model", [*range(len(byte_tokenizer())), 151645, -1])
    trained = trainer(model, tmp_path, {"max_steps": 1})
    trained.train()
    assert trained.state.log_history[0]["completions/mean_length"] == 1.0
    assert trained.agreement.compared > 0


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weight_sync_steps=2": ({"weight_sync_steps": 2}, {}),
    "vllm_server_base_url": ({"vllm_server_base_url": "http://elsewhere:1"}, {}),
    "rollout_worker": ({}, {"rollout_worker": object()}),
    "weight_transfer": ({}, {"weight_transfer": object()}),
    "in_flight": ({}, {"in_flight": "drop"}),
    "bf16=True": ({"bf16": True}, {}),
    "temperature=0.0": ({"temperature": 0.0}, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused_by_name(name: str, folder: Path, tmp_path: Path) -> None:
    options, more = REFUSED[name]
    with pytest.raises(ValueError, match=name):
        trainer(folder, tmp_path, options, **more)


# -- trees -------------------------------------------------------------------------------------------------------------

SAMPLES = [
    [5, 6, 7, 8, 9, 10],
    [5, 6, 7, 8, 9, 11],  # another end
    [5, 6, 7, 8],  # a prefix of both
    [5, 6, 20, 21],
    [5, 6, 7, 8, 9, 10],  # twice
    [30, 31, 32],  # nothing shared
    [40, 41],
]


def row_of(samples: list[list[int]]) -> TreeRow:
    row = TreeRow()
    for group, ids in enumerate(samples):
        mask = np.ones(len(ids), np.int64)
        mask[0] = 0
        row.add(
            {
                "input_ids": np.array(ids),
                "completion_mask": mask,
                "old_log_probs": np.zeros(len(ids), np.float32),
                "advantage": 1.0,
                "group_id": group,
            }
        )
    return row


@pytest.mark.parametrize("samples", [SAMPLES, SAMPLES[:1], SAMPLES[-1:], SAMPLES[2:5]], ids=len)
def test_a_tree_has_the_scores_of_its_samples(samples: list[list[int]], folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    give_scores(model, None, 0.7)
    packed = row_of(samples).pack()
    widths = dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), packed["tree_max_seqlens"].tolist(), strict=True))
    trees = {name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    names = ("input_ids", "position_ids", "shift_labels")
    scores = model(**{name: packed[name][None] for name in names}, fused_lm_head=True, **trees, **widths)
    found = scores.log_probs.flatten()[packed["token_index"]]
    alone = torch.cat([token_logprobs(model, torch.tensor([ids]), temperature=0.7)[0] for ids in samples])
    assert torch.equal(found, alone)
    entropies = [
        token_scores(model, torch.tensor([ids]), temperature=0.7, with_entropy=True).entropy[0] for ids in samples
    ]
    assert torch.equal(scores.entropy.flatten()[packed["token_index"]], torch.cat(entropies))
    of_tree = torch.autograd.grad(found.sum(), list(model.parameters()))
    of_samples = torch.autograd.grad(alone.sum(), list(model.parameters()))
    for one, other in zip(of_tree, of_samples, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_copy_of_the_trainers_model_computes_with_its_own_weights(adapted: bool, folder: Path) -> None:
    """A copy of the trainer's model computes with its own weights, as a reference that somebody keeps: it does not
    follow the policy.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")) if adapted else model
    give_scores(model, None, 1.0)
    ids = torch.tensor([SAMPLES[0]])
    expected, logits = token_logprobs(model, ids).detach(), model(ids).logits.detach()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert torch.equal(token_logprobs(twin, ids), expected)
    assert torch.equal(twin(ids).logits, logits)
    assert torch.equal(twin(input_ids=ids, labels=ids, fused_lm_head=True).log_probs, expected)
    with RolloutWorker(twin) as worker:
        (output,) = worker.generate([SAMPLES[0]], SamplingParams(max_tokens=3))
    sampled = torch.tensor([SAMPLES[0] + output.samples[0].token_ids])
    assert token_logprobs(twin, sampled)[0, -3:].tolist() == output.samples[0].logprobs


def test_inputs_without_a_place_are_refused_by_name(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    give_scores(model, None, 1.0)
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match="pixel_values"):
        model(input_ids=ids, labels=ids, pixel_values=torch.zeros(1), fused_lm_head=True)
    with pytest.raises(ValueError, match="labels other than the tokens"):
        model(input_ids=ids, labels=ids + 1, fused_lm_head=True)
    with pytest.raises(ValueError, match="needs labels"):
        model(input_ids=ids, fused_lm_head=True)
