"""Calls are found whose tags are special tokens, which a text usually lacks. The model writes what a test says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from samebit.rollout.integrations.http.app import create_app
from samebit.rollout.integrations.http.openai.sample_text import KeepingSpecial, SampleText, text_by
from samebit.rollout.integrations.http.service import Service
from samebit.rollout.integrations.http.settings import ServeSettings
from samebit.rollout.outputs import SampleOutput, StreamChunk
from samebit.rollout.requests.stop_strings import StopStringMatcher
from samebit.rollout.worker import RolloutWorker

from ..conftest import FakeRunner
from .served import NAME, byte_tokenizer
from .test_tool_parsers import TAKEN, TOOL

MakeWorker = Callable[..., tuple[RolloutWorker, FakeRunner]]
Ask = Callable[..., list[dict[str, Any]]]
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "x-regex": "^(?:<think>(?P<thinking>.*?)</think>)?(?P<content>[^{]*?)(?P<tool_calls><call>.*<end>)?$",
    "properties": {
        "thinking": {"type": "string"},
        "content": {"type": "string"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": "<call>(.*?)<end>",
            "items": {"type": "object", "x-parser": "json", "additionalProperties": {}},
        },
    },
}
"""Lets the token that ends a sample end a call too, as gpt-oss's <|call|> does."""
TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<call>", "close": "<end>", "repeats": True, "content": "json"},
        "content": {"content": "text", "content_args": {"strip": False}},
    },
}


def special_tokenizer() -> PreTrainedTokenizerFast:
    backend = byte_tokenizer().backend_tokenizer
    backend.add_special_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>", "<call>", "<end>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", chat_template=byte_tokenizer().chat_template
    )
    read = {"response_template": TEMPLATE} if "prefix" in TAKEN else {"response_schema": SCHEMA}
    vars(tokenizer).update(read)
    return tokenizer


TOKENIZER = special_tokenizer()


@pytest.fixture
def ask(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Ask for a chat in which the model writes this text, whole and as a stream; return both messages."""
    fakes = sys.modules[make_worker.__module__]
    monkeypatch.setattr(fakes.FakeRunner, "vocab_size", len(TOKENIZER))
    sizes = {"num_blocks": 256, "max_num_batched_tokens": 512, "max_model_len": 512}
    worker, _ = make_worker(tokenizer=TOKENIZER, eos=(TOKENIZER.eos_token_id,), **sizes)

    def asked(parser: str, text: str, **more: Any) -> list[dict[str, Any]]:
        written = TOKENIZER(text)["input_ids"]
        body = {"messages": USER, "tools": [TOOL], "max_tokens": len(written), **more}
        client = TestClient(create_app(Service(worker, ServeSettings(tool_call_parser=parser), NAME, TOKENIZER)))
        start = client.post("/tokenize", json={"messages": USER, "tools": [TOOL]}).json()["count"]
        monkeypatch.setattr(fakes, "fake_token", lambda tokens, *_: written[len(tokens) - start])
        (whole,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        lines = client.post("/v1/chat/completions", json={**body, "stream": True}).text.splitlines()
        pieces = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        found = [(whole["message"], whole["finish_reason"]), (joined(pieces), pieces[-1]["finish_reason"])]
        return [plain(message, finish) for message, finish in found]

    return asked


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    deltas = [piece["delta"] for piece in pieces]
    texts = {name: "".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning_content")}
    return {**texts, "tool_calls": [call for delta in deltas for call in delta.get("tool_calls", ())]}


def plain(message: dict[str, Any], finish: str) -> dict[str, Any]:
    """Leave out what is empty, and the ids of calls."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    found = {"content": message["content"], "reasoning": message.get("reasoning_content"), "calls": calls}
    return {"finish": finish, **{name: value for name, value in found.items() if value}}


SUB = '{"name": "sub", "arguments": {"a": 1}}'
CALL = f"<tool_call>{SUB}</tool_call>"
CALLED = {"finish": "tool_calls", "calls": [("sub", '{"a": 1}')]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{CALL}<end>", CALLED),
        (f"<think>so: {CALL}\n{CALL}<end>", {**CALLED, "content": "so: ", "calls": CALLED["calls"] * 2}),
        ("<tool_call>no</tool_call><end>", {"finish": "stop", "content": "<tool_call>no</tool_call>"}),
        ("<think>a</think><tool_call>{", {"finish": "length", "content": "a<tool_call>{"}),
    ],
)
def test_tags_that_are_special_tokens_are_tags(ask: Ask, text: str, expected: dict[str, Any]) -> None:
    """Tags that are special tokens are tags, as vLLM has it; other special tokens are in no content."""
    assert ask("hermes", text) == [expected, expected]


def test_a_stop_string_ends_a_text_with_tags(ask: Ask) -> None:
    expected = {**CALLED, "content": "a"}
    assert ask("hermes", f"a{CALL}STOP", stop=["TO"]) == [{**expected, "content": "aS"}] * 2
    cut = {"finish": "stop", "content": "xS<tool_call>"}
    assert ask("hermes", "xS<tool_call>abc", stop=["Sa"]) == [cut, cut], "what came before its last token"


ADD = '<call>{"function": {"name": "add", "arguments": {}}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<think>hm</think>so{ADD}<end>", {"reasoning": "hm", "content": "so", "calls": [("add", "{}")]}),
        ("<think>hm</think>so<|im_end|><end>", {"finish": "stop", "reasoning": "hm", "content": "so"}),
        ("a<call>{no}<end>", {"finish": "stop", "content": "a{no}"}),
    ],
)
def test_a_template_reads_special_tokens(ask: Ask, text: str, expected: dict[str, Any]) -> None:
    """A template reads special tokens, also that which ended the sample; none is left in what is answered."""
    expected = {"finish": "tool_calls", **expected}
    assert ask("template", text) == [expected, expected]


def test_without_tools_a_text_has_no_special_tokens(ask: Ask) -> None:
    expected = {"finish": "stop", "content": SUB}
    assert ask("hermes", f"{CALL}<end>", tool_choice="none") == [expected, expected]


IDS = {token: TOKENIZER.convert_tokens_to_ids(token) for token in ("a", "b", "c", "<call>", "<tool_call>", "<end>")}


@settings(max_examples=200, deadline=None)
@example(["a", "<call>", "b"], "ab", [1, 1])
@given(
    st.lists(st.sampled_from([*IDS]), min_size=1, max_size=12),
    st.sampled_from(["", "ab", "bb", "aba", "c"]),
    st.lists(st.integers(0, 3), max_size=8),
)
def test_a_stream_with_special_tokens_is_the_whole(tokens: list[str], stop: str, cuts: list[int]) -> None:
    """A stream with special tokens is the whole text, whatever comes together, and also where a stop string stands
    around a tag.
    """
    tokenizer, stops = KeepingSpecial(TOKENIZER, None), (stop,) if stop else ()
    worker = StopStringMatcher(TOKENIZER, stops)
    ids: list[int] = []
    found = None
    for token in tokens:
        ids.append(IDS[token])
        found = worker.push(IDS[token], search=True)
        if found or token == "<end>":
            break
    finish = "stop" if found or ids[-1] == IDS["<end>"] else "length"
    pieces, start, text = SampleText(tokenizer, stops, frozenset([IDS["<end>"]])), 0, ""
    for cut in cuts:
        text += pieces.push(StreamChunk(0, ids[start : start + cut], [], False, None))
        start += cut
    text += pieces.push(StreamChunk(0, ids[start:], [], True, finish, found))
    sample = SampleOutput(0, ids, [], [], None, [], [], [], finish, found, None, 0)
    assert text == text_by(tokenizer, sample, ())
    assert found or text == "".join(token for token in tokens[: len(ids)] if token != "<end>")
