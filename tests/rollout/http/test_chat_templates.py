"""What a chat template is given of a conversation, and what becomes of a file that is none."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from samebit.rollout.cli import main
from samebit.rollout.integrations.http import serving
from samebit.rollout.integrations.http.app import create_app
from samebit.rollout.integrations.http.openai.tools import HermesParser
from samebit.rollout.integrations.http.service import Service
from samebit.rollout.integrations.http.settings import ServeSettings

from .served import NAME, TEMPLATE, Served

Shown = Callable[[str, list[dict[str, Any]]], str]
SILENT = (
    "{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('not first') }}"
    "{% endif %}S:{{ m.content }};{% elif m.role in ('user', 'assistant') %}{{ m.role[0] }}:{{ m.content }};{% endif %}"
    "{% endfor %}"
)
"""Leaves out what a developer says, as Qwen's, and takes a system message only at the beginning, as Qwen 3.5's."""
KNOWING = SILENT.replace("{% elif m.role in", "{% elif m.role == 'developer' %}D:{{ m.content }};{% elif m.role in")
CALLING = (
    "{% for m in messages %}{% if 'tool_calls' in m %}[{{ m.tool_calls[0].id }}]{% endif %}{{ m.content }};{% endfor %}"
)


def said(role: str, content: object, **more: object) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.fixture
def shown(served: Served) -> Shown:
    """Return the text that this template makes of these messages, through HTTP, or the error."""

    def text(template: str, messages: list[dict[str, Any]]) -> str:
        tokenizer = copy.copy(served.service.need_tokenizer())
        tokenizer.chat_template = template
        client = TestClient(create_app(Service(served.service.worker, ServeSettings(), NAME, tokenizer)))
        for _ in range(2):  # the log has one line for both
            answer = client.post("/tokenize", json={"messages": messages}).json()
        if "error" in answer:
            return str(answer["error"]["message"])
        return str(client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"])

    return text


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([said("developer", "a"), said("user", "u")], "S:a;u:u;"),
        ([said("developer", [{"type": "text", "text": part} for part in "ab"]), said("user", "u")], "S:a\nb;u:u;"),
        ([said("system", "a"), said("developer", "b"), said("user", "u")], "S:a\n\nb;u:u;"),
        (
            [said("user", "u"), said("developer", "a"), said("assistant", "v"), said("system", "b"), said("user", "w")],
            "S:a\n\nb;u:u;a:v;u:w;",
        ),
    ],
)
def test_what_a_developer_says_is_shown_as_the_systems_where_the_template_would_leave_it_out(
    shown: Shown, caplog: pytest.LogCaptureFixture, messages: list[dict[str, Any]], text: str
) -> None:
    """A developer's message is shown as the system's where the template would leave it out, as vLLM shows it."""
    with caplog.at_level(logging.INFO, logger="samebit"):
        assert shown(SILENT, messages) == text
    assert caplog.text.count("no role 'developer'") == 1


def test_a_template_that_knows_developers_gets_the_messages_as_they_are(
    shown: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [said("system", "a"), said("developer", "b"), said("user", "u"), said("developer", "c")]
    with caplog.at_level(logging.INFO, logger="samebit"):
        assert shown(KNOWING, messages) == "S:a;D:b;u:u;D:c;"
    assert "developer" not in caplog.text
    assert "not first" in shown(SILENT, [said("user", "u"), said("system", "a")])


Turn = tuple[list[int], list[int], str]


def turn(served: Served, messages: list[dict[str, Any]], session: str | None) -> Turn:
    """Ids of prompt and answer, and the answer: the model writes "a" and "b", which a tokenizer would merge."""
    first, second = served.service.need_tokenizer().convert_tokens_to_ids(["a", "b"])
    body = {
        "messages": messages, "max_tokens": 2, "temperature": 0, "logit_bias": {str(first): 100, str(second): 99},
        "frequency_penalty": 2, "return_token_ids": True,
    }  # fmt: skip
    headers = {} if session is None else {"X-Session-ID": session}
    answer = served.post("/v1/chat/completions", body, headers=headers).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [first, second]
    return answer["prompt_token_ids"], choice["token_ids"], choice["message"]["content"]


def test_a_session_shows_what_a_developer_says_later(served: Served) -> None:
    """The system's message is another one then, so the conversation is rendered anew; one at its beginning stays."""
    start = [said("system", "rule"), said("developer", "more"), said("user", "hi")]
    prompt, ids, words = turn(served, start, "developers")
    answered = [*start, said("assistant", words)]
    assert turn(served, [*answered, said("user", "on")], "developers")[0][: len(prompt) + 2] == [*prompt, *ids]
    later = [*answered, said("developer", "other"), said("user", "on")]
    renewed = turn(served, later, "developers")[0]
    assert renewed == turn(served, later, None)[0]
    text = served.post("/detokenize", {"tokens": renewed}).json()["prompt"]
    assert text.startswith("<|im_start|>system\nrule\n\nmore\n\nother<|im_end|>")


def test_an_empty_list_of_calls_is_none(served: Served, shown: Shown) -> None:
    """Templates ask whether there is a list, and agents write one into every answer that they send back."""
    assert shown(CALLING, [said("user", "hi"), said("assistant", "a", tool_calls=[])]) == "hi;a;"
    start = [said("user", "hi")]
    prompt, ids, words = turn(served, start, "calls")
    more = [*start, said("assistant", words, tool_calls=[]), said("user", "on")]
    assert turn(served, more, "calls")[0][: len(prompt) + 2] == [*prompt, *ids]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("1 + 1", '{"name": "add", "arguments": "1 + 1"}'),
        ('{"a"', '{"name": "add", "arguments": "{\\"a\\""}'),
        ('{"a": 1}', '{"name": "add", "arguments": {"a": 1}}'),
        ("", '{"name": "add", "arguments": {}}'),
    ],
)
def test_a_call_of_the_history_is_shown_whatever_a_model_wrote_in_it(shown: Shown, arguments: str, text: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    found = shown(TEMPLATE, [said("user", "hi"), said("assistant", None, tool_calls=[call])])
    assert json.loads(found.partition("<tool_call>")[2].partition("</tool_call>")[0]) == json.loads(text)


@pytest.mark.parametrize("arguments", ["", "{}", '{"a": 1}', {"a": 1}])
def test_what_is_given_out_as_a_call_can_be_sent_back(shown: Shown, arguments: object) -> None:
    """To a template that takes an object of arguments, as most do."""
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.items() | list }}{% endfor %}"
    call = json.dumps({"name": "add", "arguments": arguments})
    (found,) = HermesParser().push(f"<tool_call>{call}</tool_call>").calls
    assert json.loads(found["function"]["arguments"]) in ({}, {"a": 1})
    assert shown(template, [said("assistant", None, tool_calls=[found])]) in ("[]", "[('a', 1)]")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "can not be read: [Errno 2] No such file"),
        (b"\xff", "can not be read: 'utf-8' codec"),
        (b"{% for %}", "is no Jinja template: Expected an expression, got 'end of statement block' (line 1)"),
        (b"\n{{ messages | nothing }}", "is no Jinja template: No filter named 'nothing'. (line 2)"),
    ],
)
def test_a_chat_template_that_is_none_is_known_before_the_model_is_loaded(
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    says: str,
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(serving, "RolloutWorker", load)
    file = tmp_path / "x.jinja"
    if content is not None:
        file.write_bytes(content)
    assert main(["serve", str(served.folder), "--port", "0", "--chat-template", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"samebit serve: chat_template={str(file)!r} {says}")
