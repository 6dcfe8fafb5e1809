"""TRL's own HTTP clients, rollout worker and AsyncGRPO run against `samebit serve`: no class of TRL is replaced."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, spawn
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install 'samebit[trl]'")

from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo import async_rollout_worker as rollouts
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

from samebit.kernels import bind, token_logprobs
from samebit.rollout.integrations.trl.fused_forward import give_scores
from samebit.rollout.integrations.trl.on_cpu import without_peak_flops
from samebit.rollout.integrations.trl.served_weights import ServedWeights

from ...campaign import long
from ...forks import python
from ...patience import HANG
from ..http.served import Served, serving
from .trl_model import byte_tokenizer, qwen3_folder

TALK = [{"role": "user", "content": "2+3="}]


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TRL build what asks for vLLM to be installed: over HTTP nothing of vLLM is used, and NCCL is not tried."""
    monkeypatch.setenv("CI", "1")
    PartialState(cpu=True)  # TRL's loggers ask for it
    for module in (vllm_client, rollouts):
        monkeypatch.setattr(module, "is_vllm_available", lambda *_, **__: True)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    folder = qwen3_folder(tmp_path / "model")
    flags = ("--control", "loopback", "--weight-root", str(tmp_path), "--served-model-name", str(folder))
    with serving(folder, *flags) as one:  # a trainer asks for the model under the name that it has loaded it by
        yield one


def policy(folder: Path) -> torch.nn.Module:
    return bind(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def scores(model: torch.nn.Module, ids: list[int], count: int, temperature: float = 1.0) -> list[float]:
    return token_logprobs(model, torch.tensor([ids]), temperature=temperature)[0, -count:].tolist()


def test_the_client_of_trls_trainers(served: Served) -> None:
    """`generate` and `chat` give the trainer's bits under the token ids; `/server_info` has what is looked up."""
    client = VLLMClient(base_url=served.control)
    assert client.model == str(served.folder)
    assert client.get_world_size() == 1
    assert client.get_server_info()["model_config"]["dtype"] == "torch.float32"
    trainer = policy(served.folder)
    prompts = [[1, 2, 3], [40, 41]]
    for logprobs in (0, 3):
        given = client.generate(prompts, n=2, temperature=0.7, max_tokens=9, top_p=0.9, logprobs=logprobs)
        assert given["prompt_ids"] == prompts
        for row, ids in enumerate(given["completion_ids"]):
            expected = scores(trainer, [*prompts[row // 2], *ids], len(ids), 0.7)
            found = [
                values[tokens.index(token)]
                for token, values, tokens in zip(
                    ids, given["logprobs"][row], given["logprob_token_ids"][row], strict=True
                )
            ]
            assert found == expected
            assert {len(values) for values in given["logprobs"][row]} <= {logprobs, logprobs + 1}
    texts = client.generate(["2+3=", "a"], max_tokens=4, logprobs=None)
    assert (len(texts["completion_ids"]), texts["logprobs"]) == (2, None)
    given = client.chat([TALK], n=2, max_tokens=5, tools=[add], generation_kwargs={"seed": 3})
    for ids, values in zip(given["completion_ids"], given["logprobs"], strict=True):
        assert [value for (value,) in values] == scores(trainer, [*given["prompt_ids"][0], *ids], len(ids))
    assert client.reset_prefix_cache() is None


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: one of them
        b: the other
    """
    return a + b


def test_what_needs_nccl_is_refused_by_name(served: Served) -> None:
    client = AsyncClient(served.control)
    nccl = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "packed": True}
    with pytest.raises(Exception, match=r"400.*init_info"):
        client.init_weight_transfer_engine(nccl)


@pytest.fixture
def reward(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Return a reward function that another process can import."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "in_trl")
    found: Callable[..., list[float]] = importlib.import_module("trl_reward").variety
    return found


@pytest.fixture
def forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let multiprocessing start a fork, as `forks` says, where it would start Python."""
    resource_tracker.ensure_running()
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(python())} "$@"\n')
    script.chmod(0o700)
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(script))


@pytest.mark.usefixtures("forked")
def test_the_rollout_worker_and_weights_over_gloo(
    served: Served, reward: Callable[..., list[float]], tmp_path: Path
) -> None:
    """TRL's process of conversations asks over HTTP: its log-probabilities are the trainer's bits, before and after
    other weights were sent.
    """
    other = policy(qwen3_folder(tmp_path / "other", seed=1))
    weights = ServedWeights(served.control, part_bytes=10_000)
    weights.init_weight_transfer()
    worker = AsyncRolloutWorker(
        model_name=str(served.folder),
        dataset=Dataset.from_dict({"prompt": [TALK]}),
        reward_funcs=[reward],
        processing_class=byte_tokenizer(),
        eos_token_ids=[byte_tokenizer().eos_token_id],
        num_generations=2,
        max_inflight_tasks=2,
        queue_maxsize=4,
        vllm_server_url=served.control,
        max_tokens=12,
        temperature=0.8,
    )
    worker.start()
    try:
        compare(worker, policy(served.folder), version=0)
        weights.pause()
        weights.send_weights(other.named_parameters())
        weights.resume()
        worker.update_model_version(1)
        compare(worker, other, version=1)
        worker.check_health(HANG)
    finally:
        worker.stop()
    assert served.service.worker.weight_version == 1
    weights.destroy()
    with pytest.raises(RuntimeError, match="init_weight_transfer"):
        weights.send_weights(other.named_parameters())


def compare(worker: AsyncRolloutWorker, model: torch.nn.Module, version: int) -> None:
    """Take samples that were begun under these weights, and score them."""
    found = 0
    while found < 4:
        sample = worker.rollout_buffer.get(timeout=HANG)
        if sample.model_version == version:
            found += 1
            count = int(sample.completion_mask.sum())
            expected = np.array(scores(model, sample.input_ids.tolist(), count, 0.8), dtype=np.float32)
            assert np.array_equal(sample.old_log_probs[-count:], expected)


@long
@pytest.mark.parametrize(
    "more", [{}, {"peft_config": LoraConfig(r=4, target_modules="all-linear")}], ids=["all", "LoRA"]
)
def test_trls_own_trainer_trains(
    more: dict[str, Any], served: Served, reward: Callable[..., list[float]], tmp_path: Path
) -> None:
    """TRL's own trainer trains: its weights reach the server after each step, all of them over gloo, or its adapter as
    a folder.
    """
    args = AsyncGRPOConfig(
        output_dir=str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=4, num_generations=2,
        max_completion_length=8, token_budget=0, bf16=False, use_cpu=True, report_to=[], logging_steps=1,
        save_strategy="no", disable_tqdm=True, vllm_server_base_url=served.control, max_inflight_tasks=4,
    )  # fmt: skip
    own = {} if more else {"weight_transfer": ServedWeights(served.control)}
    with without_peak_flops():
        data = Dataset.from_dict({"prompt": [TALK]})
        trainer = AsyncGRPOTrainer(str(served.folder), reward, args, data, **own, **more)
    give_scores(trainer.model, None, trainer.temperature)  # TRL's own attention over trees is for GPUs
    trainer.train()
    assert trainer.state.global_step == 3
    assert not served.service.worker.paused
    if more:
        assert served.service.adapters
        return
    assert served.service.worker.weight_version == 4
    asked = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 9, "logprobs": 0}}
    (choice,) = served.post("/inference/v1/generate", asked).json()["choices"]
    found = [one["logprob"] for one in choice["logprobs"]["content"]]
    assert found == scores(bind(trainer.model), [1, 2, 3, *choice["token_ids"]], len(found))
