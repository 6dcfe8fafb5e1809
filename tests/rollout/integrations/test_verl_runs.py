"""Short runs of verl's trainer are exact from command line to metrics, and a dead server ends them with the cause.

All processes listen on the loopback interface alone, which is looked at. They are for `make soak`; test_verl_turns.py
is the one that is always run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed: pip install 'samebit[verl]'")

from samebit.benchmarks.verl_matrix import cases
from samebit.recipes.verl_grpo import task
from samebit.recipes.verl_grpo.launch import Run
from samebit.recipes.verl_grpo.mismatch import MISMATCH, PAIRS

from ...campaign import MARKS
from .verl_run import IN_VERL, build_data, listening_elsewhere, running, spied, wait_for_a_step, wait_for_end
from .verl_vision_model import build_pictures

pytestmark = [*MARKS]


def test_a_run_in_which_trainer_and_rollout_share_their_resources_until_the_server_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is exact until the server dies that shares its resources: packed, float32, temperature 0.7, an untied head;
    with validation. The plugin is named, not found.

    In colocate_async, where verl would try again for ever to reach a dead server.
    """
    named = {
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_USE_EXTERNAL_MODULES": "samebit.rollout.integrations.verl,verl_spy",
    }
    more = {
        "actor_rollout_ref.rollout.temperature": 0.7,
        "actor_rollout_ref.rollout.custom.block_size": 16,
        "trainer.test_freq": 2,
    }
    run = _run_until_the_server_dies("colocate_async-packed-fp32", tmp_path, monkeypatch, named, more)
    steps = run.steps()
    assert len(steps) >= 3
    _check_steps(steps)


@pytest.mark.parametrize(
    "name", ["sync-packed-fp32", "separate_async-packed-fp32", "one_step_off-packed-fp32", "fully_async-packed-fp32"]
)
def test_a_server_that_dies_in_generation_ends_the_run_of_each_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _run_until_the_server_dies(name, tmp_path, monkeypatch, {}, {})


@pytest.mark.parametrize("name", ["sync-packed-fp32-moe", "colocate_async-padded-bf16-moe"])
def test_routed_experts_are_the_trainers(tmp_path: Path, name: str) -> None:
    """Routed experts are the trainer's, in float32, and with FSDP2 in bfloat16 and padded: log-probabilities, and
    experts, of prompts too.
    """
    case = cases.cases()[name]
    data = tmp_path / "data"
    task.build(data, training=64, held_out=4, warm=False, architecture=case.architecture)
    run = Run(data, tmp_path, {**cases.settings(3), **case.settings(3)}, entry=case.entry)
    with running(run) as process:
        assert wait_for_end(run, process) == 0, run.log.read_text()[-4000:]
    steps = run.steps()
    assert len(steps) == 3
    for row in steps:
        assert [row[name] for name in MISMATCH] == [0.0, 0.0, 0.0]
        assert row["samebit/on_policy/tokens_differing"] == row[PAIRS] == 0
        tokens = row["samebit/on_policy/tokens"]
        assert row["samebit/on_policy/routing_compared"] > 8 * tokens, "two layers, four experts a token; and prompts"


@pytest.mark.parametrize("name", [name for name in cases.cases() if "-lora" in name])
def test_an_adapter_is_trained_unmerged(tmp_path: Path, name: str) -> None:
    case = cases.cases()[name]
    data = tmp_path / "data"
    task.build(data, training=64, held_out=4, warm=True, architecture=case.architecture)
    run = Run(data, tmp_path, {**cases.settings(4), **case.settings(4)}, entry=case.entry)
    with running(run) as process:
        assert wait_for_end(run, process) == 0, run.log.read_text()[-4000:]
    steps = run.steps()
    assert len(steps) >= case.logged(4)
    assert sum(row["actor/grad_norm"] > 0 for row in steps) > 1, "the adapter has changed"
    for row in steps:
        assert [row[name] for name in MISMATCH] == [0.0, 0.0, 0.0]
        assert row["samebit/on_policy/tokens_differing"] == 0
        assert row["samebit/on_policy/tokens"] > 0
    assert steps[-1]["samebit/sync_bytes"] < steps[0]["samebit/sync_bytes"] or "async" in name, "the base went once"


@pytest.mark.parametrize(
    "name",
    [
        *("sync-packed-fp32", "colocate_async-padded-bf16", "separate_async-dynamic-bf16-nothing-ahead"),
        "sync-packed-fp32-two-ranks-kl",
    ],
)
def test_prompts_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Prompts with images, and of text beside them, are exact while the vision tower learns."""
    run = _run_with_images(name, tmp_path, monkeypatch, {})
    with running(run) as process:
        assert wait_for_end(run, process) == 0, run.log.read_text()[-4000:]
    steps = run.steps()
    assert len(steps) == 3
    for row in steps:
        assert [row[name] for name in MISMATCH] == [0.0, 0.0, 0.0]
        assert row["samebit/on_policy/tokens_differing"] == 0
        assert row["samebit/on_policy/tokens"] > 100
        assert row["actor/grad_norm"] > 0


def test_ranks_of_which_some_have_images_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of which some have images in a micro-batch end the run by name: they would wait for each other for ever."""
    one_by_one = {
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1,
    }
    run = _run_with_images("sync-packed-fp32-two-ranks-kl", tmp_path, monkeypatch, one_by_one)
    with running(run) as process:
        assert wait_for_end(run, process) != 0
    assert "1 of 2 ranks of the trainer have images in a micro-batch" in run.log.read_text()


def _run_with_images(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, more: cases.Options) -> Run:
    """Return a run of the case `name` on prompts with images, and without qwen_vl_utils; see verl_pictures.py."""
    found = [str(IN_VERL), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_pictures")
    case, pictures = cases.cases()[name], IN_VERL / "verl_pictures.py"
    options = {
        **cases.settings(3),
        **case.settings(3),
        "data.max_prompt_length": 64,
        "data.max_response_length": 16,
        "data.custom_cls.path": pictures,
        "data.custom_cls.name": "Pictures",
        "reward.custom_reward_function.path": pictures,
        "actor_rollout_ref.rollout.custom.images": True,
        **more,
    }
    return Run(build_pictures(folder / "data"), folder, options, entry=case.entry)


def _run_until_the_server_dies(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], more: cases.Options
) -> Run:
    """Run the case `name` until its server is killed while it generates, after some steps."""
    answers = 5 * cases.PROMPTS * cases.SAMPLES
    died = spied(folder, monkeypatch, SPY_LAST_ANSWER=str(answers), **environment) / "died"
    case = cases.cases()[name]
    options = {**cases.settings(200), **case.settings(200), **more}
    run = Run(build_data(folder / "data"), folder, options, entry=case.entry)
    with running(run) as process:
        wait_for_a_step(run, process)
        assert listening_elsewhere(run) == []
        code = wait_for_end(run, process)
    said = run.log.read_text()
    assert died.exists(), said[-4000:]
    assert code != 0
    assert "samebit_server_0 is lost" in said or "ActorDiedError" in said
    assert "actor died" in said
    return run


def _check_steps(steps: list[dict[str, Any]]) -> None:
    for row in steps:
        assert [row[name] for name in MISMATCH] == [0.0, 0.0, 0.0]
        assert row["samebit/on_policy/trajectories"] == 16
        assert row["samebit/on_policy/tokens"] > 16
        assert row["samebit/on_policy/tokens_differing"] == 0
        assert row["samebit/requests_finished"] >= 16
        assert row["samebit/syncs"] >= 1
        assert row["samebit/released_bytes"] > 0
    assert any(name.startswith("val-core/chain_sum") for row in steps for name in row)
