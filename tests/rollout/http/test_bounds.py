"""What a request may hold, and what its answer may, is bounded before it takes time and memory."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette import requests

from samebit.rollout.integrations.http.middleware import JsonSize
from samebit.rollout.integrations.http.service import Service

from .served import Served
from .test_streams import ask, beside

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
USER = [{"role": "user", "content": "hi"}]
TEXTS = st.text(max_size=5) | st.text('"\\,[{', max_size=8)
JSON = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def answered(service: Service, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return status and content of an answer, of a stream those of its first piece."""
    taken: list[dict[str, Any]] = []

    async def take(message: dict[str, Any]) -> None:
        taken.append(message)

    asyncio.run(ask(service, body, take, path=path))
    content = taken[1]["body"].removeprefix(b"data: ")
    return taken[0]["status"], json.loads(content)


@given(JSON, st.booleans(), st.lists(st.integers(0, 6)))
def test_values_are_counted_in_any_pieces(content: object, ascii_only: bool, cuts: list[int]) -> None:
    """No more is counted than there is, in whatever pieces it comes, and what stands in a string is not."""
    text, size = json.dumps(content, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"), JsonSize()
    for cut in cuts:
        size.push(text[:cut])
        text = text[cut:]
    size.push(text)
    assert size.count == counted(content)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_values_of_wider_characters_are_counted(encoding: str) -> None:
    """JSON may come in UTF-16, where a character of a text may have the byte of a quote."""
    size = JsonSize()
    size.push(f'["\u2200\u0122\u2222", {"0, " * 100}0]'.encode(encoding))
    assert size.count >= 102


def counted(content: object) -> int:
    """Return one for each list and object, and for each comma between what stands in them."""
    if not isinstance(content, list | dict):
        return 0
    inner = content if isinstance(content, list) else list(content.values())
    return max(1, len(inner)) + sum(map(counted, inner))


CROWDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ids": (COMPLETIONS, {"prompt": [1] * 99}),
    "lists": (COMPLETIONS, {"prompt": [[1]] * 50}),
    "objects": (CHATS, {"messages": [{}] * 50}),
    "nested": (CHATS, {"messages": USER, "chat_template_kwargs": {"a": [[[[[]]]]] * 20}}),
    "unknown": (GENERATE, {"token_ids": [1], "more": [0] * 98}),
}


@pytest.mark.parametrize(("path", "body"), CROWDS.values(), ids=CROWDS)
def test_a_body_of_too_many_values_is_not_parsed(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """A body of too many values is refused before any is made: the parser lets nothing else run, and 16 MB of them took
    it seconds."""

    monkeypatch.delattr(requests.Request, "json")
    status, content = answered(beside(served, max_body_values=99), path, body)
    assert (status, content["error"]["type"]) == (413, "invalid_request_error")
    assert content["error"]["message"] == "the body has more than 99 values: numbers, texts, lists and objects"


def test_a_body_has_as_many_values_as_it_may(served: Served) -> None:
    """A body of the most values is taken, whatever stands in its texts."""
    service = beside(served, max_body_values=100)
    assert answered(service, COMPLETIONS, {"prompt": [1] * 98, "max_tokens": 1})[0] == 200
    assert answered(service, COMPLETIONS, {"prompt": '"\\[{,' * 200, "max_tokens": 1})[0] == 200


SCORED = {"prompt": [1] * 20, "echo": True, "max_tokens": 0}
SAMPLED = {"max_tokens": 10, "n": 2}
ALTERNATIVES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"prompt": "a", **SAMPLED, "logprobs": 5}, {"n": 3}),
    "prompts": (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 10, "logprobs": 5}, {"logprobs": 6}),
    "streamed": (COMPLETIONS, {"prompt": "a", **SAMPLED, "logprobs": 5, "stream": True}, {"max_tokens": 11}),
    "scored": (COMPLETIONS, {**SCORED, "logprobs": 4}, {"logprobs": 5}),
    "chat": (CHATS, {"messages": USER, **SAMPLED, "logprobs": True, "top_logprobs": 5}, {"max_tokens": None}),
    "ids": (
        GENERATE,
        {"token_ids": [1], "sampling_params": {**SAMPLED, "logprobs": 5}},
        {"sampling_params": {**SAMPLED, "logprobs": 6}},
    ),
    "ids-scored": (
        GENERATE,
        {"token_ids": [1] * 9, "sampling_params": {"max_tokens": 1, "logprobs": 10, "prompt_logprobs": 10}},
        {"token_ids": [1] * 10},
    ),
}


@pytest.mark.parametrize(("path", "body", "more"), ALTERNATIVES.values(), ids=ALTERNATIVES)
def test_the_alternatives_of_an_answer_are_bounded(
    served: Served, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    """An answer may have as many alternatives as a request may ask for, all its tokens together, and no more."""
    service = beside(served, max_alternatives=100)
    assert answered(service, path, body)[0] == 200
    status, content = answered(service, path, {**body, **more})
    assert (status, content["error"]["param"]) == (400, "logprobs")
    assert "at most 100 are allowed here: ask for fewer" in content["error"]["message"]
    assert service.admission.inside == 0
    assert not service.running
