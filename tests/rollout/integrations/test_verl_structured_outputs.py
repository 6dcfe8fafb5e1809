"""An agent loop of verl constrains its responses, and has whole ones whatever the trainer aborts."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaForCausalLM

pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

from samebit.kernels import bind, token_logprobs
from samebit.rollout import NoTokenLeftError, RequestError, StructuredOutputsParams
from samebit.rollout.integrations.verl.server.server import SamebitServer
from samebit.rollout.structured_outputs import grammars

from ..held_steps import held_steps
from ..http.served import build_folder, byte_tokenizer
from ..noted_compiling import note_compiling
from .test_verl_server import OPTIONS, PARAMS, serve

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}},
    "required": ["name"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOKENIZER = byte_tokenizer()
WORKER = replace(OPTIONS.worker, max_model_len=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("model"))


def ask(**constraint: Any) -> dict[str, Any]:
    return {**PARAMS, "max_tokens": 200, "structured_outputs": constraint}


def test_a_response_keeps_to_what_an_agent_loop_says(folder: Path) -> None:
    """A response keeps to what an agent loop says, however it says it, and its log-probabilities are the trainer's."""
    trainer = bind(LlamaForCausalLM.from_pretrained(folder))
    given = [
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
        StructuredOutputsParams(json=SCHEMA),
        OmegaConf.create({"json": SCHEMA}),
    ]

    async def check(server: SamebitServer) -> None:
        whole = {**PARAMS, "max_tokens": 200}
        asking = [server.generate([1, 5], {**whole, "structured_outputs": one}, "a") for one in given]
        free = server.generate([1, 5], {**PARAMS, "max_tokens": 20, "structured_outputs": None}, "free")
        *outputs, other = await asyncio.gather(*asking, free)
        for out in outputs:
            assert len(json.loads(TOKENIZER.decode(out.token_ids, skip_special_tokens=True))["name"]) <= 5
            scores = token_logprobs(trainer, torch.tensor([[1, 5, *out.token_ids]]))[0, 1:]
            assert torch.equal(scores.detach(), torch.tensor(out.log_probs))
        assert len(other.token_ids) <= 20

    serve(folder, check, ignore_eos=False, worker=WORKER)


def test_a_grammar_is_compiled_beside_the_actors_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar is compiled beside the actor's event loop, where the other responses and the trainer's calls are."""
    in_loops = note_compiling(monkeypatch)

    async def check(server: SamebitServer) -> None:
        await asyncio.gather(*(server.generate([1, 5], ask(regex="a{3}"), f"{number}") for number in range(3)))

    serve(folder, check, ignore_eos=False, worker=WORKER)
    assert in_loops == [False]


def test_no_grammar_is_compiled_again_behind_a_gate_that_was_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled while the server lets nothing in, more than are kept, is there when it does."""
    monkeypatch.setattr(grammars, "MOST_KEPT", 1)
    in_loops = note_compiling(monkeypatch)

    async def check(server: SamebitServer) -> None:
        await server.abort_all_requests()
        asking = [asyncio.create_task(server.generate([1, 5], ask(regex=f"a{{3}}{i}"), f"{i}")) for i in range(3)]
        while len(in_loops) < 3:
            await asyncio.sleep(0.01)
        await server.resume_generation()
        await asyncio.gather(*asking)

    serve(folder, check, ignore_eos=False, worker=WORKER)
    assert in_loops == [False] * 3


def test_a_response_may_end_by_the_tokenizers_end(folder: Path, tmp_path: Path) -> None:
    """A response may end by the tokenizer's end token where the model names another."""
    model = LlamaForCausalLM.from_pretrained(folder)
    other = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    model.config.eos_token_id = model.generation_config.eos_token_id = other
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)

    async def check(server: SamebitServer) -> None:
        for wanted in (other, TOKENIZER.eos_token_id):
            out = await server.generate([1, 5], {**ask(regex="ab"), "logit_bias": {wanted: 60.0}}, "a")
            assert out.token_ids[-1] == wanted

    serve(tmp_path, check, ignore_eos=False, worker=WORKER)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"poem": "a"}, r"must be a dict of one of json, regex, choice, grammar, json_object, got \{'poem': 'a'\}"),
        ({"guided_regex": "a", "regex": "a"}, "must be a dict of one of"),
        ("[ab]", "must be a dict of one of"),
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of"),
        ({"regex": "a(("}, "regex can not be compiled: .*unclosed group"),
    ],
)
def test_what_can_not_be_kept_to_is_refused_by_name(folder: Path, given: object, says: str) -> None:
    """What can not be kept to is refused by its cause, and the server goes on."""

    async def check(server: SamebitServer) -> None:
        with pytest.raises(ValueError, match=f"(?s)structured_outputs.*{says}"):
            await server.generate([1, 5], {**PARAMS, "structured_outputs": given}, "a")
        assert not server._gate.inside
        assert (await server.generate([1, 5], {**PARAMS, "max_tokens": 3}, "b")).stop_reason == "completed"

    serve(folder, check, ignore_eos=False)


def test_what_fails_by_itself_fails_alone(folder: Path) -> None:
    """A response that has no token left, one that could never end, and words of other engines, fail by their names."""

    async def check(server: SamebitServer) -> None:
        other = asyncio.create_task(server.generate([1, 7], ask(regex="[cd]{50}"), "other"))
        with pytest.raises(NoTokenLeftError, match="structured_outputs"):
            await server.generate([1, 5], {**ask(regex="ab"), "min_tokens": 9}, "a")
        with pytest.raises(RequestError, match="need a token that ends a sample"):
            await server.generate([1, 5], {**ask(regex="ab"), "ignore_eos": True}, "b")
        for words in ("guided_json", "json_schema", "response_format"):
            with pytest.raises(RequestError, match=f"unknown sampling parameters: {words};.*structured_outputs"):
                await server.generate([1, 5], {**PARAMS, words: "{}"}, "c")
        assert len((await other).token_ids) == 51

    serve(folder, check, ignore_eos=False, worker=WORKER)


class _Client(FullyAsyncLLMServerClient):
    """Is verl's client of servers that are aborted while it waits, with one server in its own process."""

    def __init__(self, server: SamebitServer) -> None:
        rollout = SimpleNamespace(name="samebit", response_length=200)
        super().__init__(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
        self._server = SimpleNamespace(generate=SimpleNamespace(remote=server.generate))

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return "0", self._server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        pass


def test_a_response_that_is_aborted_begins_again(folder: Path) -> None:
    """A response that the trainer aborts begins again: its tokens come back in a prompt, which no grammar reads."""
    trainer = bind(LlamaForCausalLM.from_pretrained(folder))

    async def check(server: SamebitServer) -> None:
        constraint = {**PARAMS, "structured_outputs": {"regex": "[ab]{90}"}}
        with held_steps(server._worker) as steps:
            asking = asyncio.create_task(_Client(server).generate("a", prompt_ids=[1, 5], sampling_params=constraint))
            steps.release(3)
            while (await server.stats())["output_tokens"] < 3:
                await asyncio.sleep(0.01)
            aborting = asyncio.create_task(server.abort_all_requests())
            await asyncio.sleep(0)
        assert (await aborting)["aborted_count"] == 1
        await server.resume_generation()
        out = await asking
        assert re.fullmatch("[ab]{90}", TOKENIZER.decode(out.token_ids, skip_special_tokens=True))
        assert out.stop_reason == "completed"
        scores = token_logprobs(trainer, torch.tensor([[1, 5, *out.token_ids]]))[0, 1:]
        assert torch.equal(scores.detach(), torch.tensor(out.log_probs))

    serve(folder, check, ignore_eos=False, worker=WORKER)
