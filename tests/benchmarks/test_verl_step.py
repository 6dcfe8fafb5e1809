"""Hugging Face's `generate` runs inside verl's servers for the comparison, which gives the table of two runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")

from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry

from samebit.benchmarks import verl_step
from samebit.benchmarks.contestants import verl_huggingface
from samebit.recipes import tiny_model
from samebit.recipes.verl_grpo import run as recipe
from samebit.recipes.verl_grpo.task import TEMPLATE
from samebit.rollout import RequestError, RolloutConfig
from samebit.rollout.integrations.ray import SharedMemoryAt
from samebit.rollout.integrations.verl.options import ServerOptions
from samebit.weight_sync import SharedMemorySender

from ..patience import HANG

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tiny_model.save(tiny_model.build_model(tokenizer, 0, **SIZES), tokenizer, made)
    return made


def serve(server: Any, folder: Path, check: Callable[[Any], Awaitable[None]], *, max_num_seqs: int = 8) -> None:
    """Run `check` on the event loop of a server."""
    options = ServerOptions(
        name="server",
        model=str(folder),
        tokenizer=str(folder),
        worker=RolloutConfig(dtype="float32", max_num_seqs=max_num_seqs),
        prompt_length=20,
        response_length=12,
        repetition_penalty=1.0,
        ignore_eos=True,
        frees_memory=True,
        num_cpus=1,
        sync_timeout=HANG,
        routed_experts=False,
        traces=None,
    )

    async def main() -> None:
        await server.load(options, RolloutMode.HYBRID)
        try:
            await asyncio.wait_for(check(server), HANG)
        finally:
            await server.close()

    asyncio.run(main())


def test_hugging_face_can_generate_for_a_comparison(folder: Path) -> None:
    model, _ = tiny_model.load(folder)

    async def check(server: Any) -> None:
        ask = [server.generate([1, 5, 6][:length], {**PARAMS, "temperature": 0}, "a") for length in (1, 2, 3)]
        outputs = await asyncio.gather(*ask)
        assert [len(out.token_ids) for out in outputs] == [12] * 3
        with SharedMemorySender(timeout=HANG) as sender:
            sent = asyncio.create_task(asyncio.to_thread(sender.send, model))
            report = await server.receive_weights(SharedMemoryAt(sender.address))
            await sent
        await server.set_global_steps(report.version, 4)
        again = await server.generate([1, 5], {**PARAMS, "temperature": 0}, "b")
        assert again.token_ids == outputs[1].token_ids
        assert torch.allclose(torch.tensor(again.log_probs), torch.tensor(outputs[1].log_probs), atol=1e-4)
        assert again.extra_fields["global_steps"] == 4
        with pytest.raises(RequestError, match="alone"):
            await server.generate([1, 5], {**PARAMS, "repetition_penalty": 2.0}, "c")

    serve(verl_huggingface.HuggingFaceServer(), folder, check)


def test_the_comparison_does_not_wait_for_batches_that_are_empty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch that is full, or empty, is waited for: of forty requests, each of which asks for one, most find that an
    earlier batch took them along.
    """
    model, _ = tiny_model.load(folder)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(verl_huggingface, "time", SimpleNamespace(sleep=wait))

    async def check(server: Any) -> None:
        await asyncio.gather(*(server.generate([1, 5], {**PARAMS, "max_tokens": 1}, "a") for _ in range(40)))
        with SharedMemorySender(timeout=HANG) as sender:
            sent = asyncio.create_task(asyncio.to_thread(sender.send, model))
            await server.receive_weights(SharedMemoryAt(sender.address))
            await sent
        assert 0 < len(waits) < 40

    serve(verl_huggingface.HuggingFaceServer(), folder, check, max_num_seqs=64)


def test_the_other_rollout_is_chosen_by_its_name(tmp_path: Path) -> None:
    """The second run takes Hugging Face's rollout, in every process of it, and differs in nothing else."""
    ours = recipe.prepared("full", tmp_path, 3)
    theirs = verl_step.with_hugging_face(ours)
    assert RolloutReplicaRegistry.get("huggingface") is verl_huggingface.HuggingFaceReplica
    assert theirs.overrides() == [*ours.overrides(), "++actor_rollout_ref.rollout.name=huggingface"]
    environment = theirs.environment()
    assert environment["VERL_USE_EXTERNAL_MODULES"] == "samebit.benchmarks.contestants.verl_contestant"
    assert (theirs.data, theirs.num_threads) == (ours.data, ours.num_threads)


def test_the_table_of_two_runs() -> None:
    rows = [dict.fromkeys(("step", *recipe.COLUMNS), value) for value in (9.0, 1.0, 2.0, 3.0)]
    compared = verl_step.comparison(rows, [{name: 10 * value for name, value in row.items()} for row in rows])
    assert list(compared.columns[3].cells) == ["10.00"] * 5
