"""Long answers are written beside the event loop, in short pieces, and are the same bytes."""

from __future__ import annotations

import asyncio
import json
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.rollout.integrations.http import errors
from samebit.rollout.integrations.http.errors import ApiError, encoded, written
from samebit.rollout.integrations.http.openai import logprobs
from samebit.rollout.integrations.http.openai.logprobs import Top, ranked
from samebit.rollout.integrations.http.rl import generate

from .served import NAME, Served

LEAVES = st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
LISTS = st.lists(LEAVES | st.dictionaries(st.text(max_size=5), LEAVES), max_size=5).map(lambda some: some * 40)
CHOICES = st.dictionaries(st.text(max_size=5), LEAVES | LISTS | st.dictionaries(st.text(max_size=5), LISTS))
ANSWERS = st.dictionaries(st.text(max_size=5) | st.just("logprobs"), LEAVES | LISTS)
MESSAGES = [{"role": "user", "content": "hi"}]
MANY = {"n": 16, "ignore_eos": True}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "a", "max_tokens": 65, "logprobs": 20, **MANY}),
    "scored": ("/v1/completions", {"prompt": "abc" * 450, "max_tokens": 0, "logprobs": 20, "echo": True}),
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 65, "logprobs": True, "top_logprobs": 20, **MANY},
    ),
    "ids": (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"max_tokens": 65, "logprobs": 20, **MANY}},
    ),
}


@given(ANSWERS, st.lists(CHOICES, max_size=3))
def test_pieces_are_the_bytes_of_the_whole(answer: dict[str, Any], choices: list[Any]) -> None:
    assert written({**answer, "choices": choices, "usage": {}}) == encoded({**answer, "choices": choices, "usage": {}})


def test_choices_may_be_made_when_they_are_written() -> None:
    answer = {"usage": {}, "choices": iter([{"index": 0}, {"index": 1, "logprob": float("nan")}])}
    with pytest.raises(ApiError, match=r"^choices\.1\.logprob is nan, which JSON can not hold"):
        written(answer)
    assert written({"choices": iter([])}) == b'{"choices":[]}'


def test_what_json_can_not_hold_is_named_from_the_top() -> None:
    content = [{"logprob": 0.0}] * 100 + [{"logprob": float("-inf")}]
    with pytest.raises(
        ApiError, match=r"^choices\.1\.logprobs\.content\.100\.logprob is -inf, which JSON can not hold"
    ):
        written({"choices": [{}, {"logprobs": {"content": content}}]})


@pytest.mark.parametrize(("path", "body"), ASKED.values(), ids=ASKED)
def test_a_long_answer_is_written_beside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """A long answer is written beside the event loop, in pieces: no stream waits for one that has many alternatives."""
    calls: list[tuple[bool, int]] = []
    dumps = json.dumps

    def noted(content: object, **how: Any) -> str:
        text = dumps(content, **how)
        calls.append((asyncio._get_running_loop() is not None, len(text)))
        return text

    monkeypatch.setattr(errors.json, "dumps", noted)
    answer = served.post(path, {"model": NAME, **body})
    monkeypatch.undo()
    assert answer.status_code == 200, answer.text
    ours = [size for in_loop, size in calls if not in_loop]
    assert sum(ours) > 300_000
    assert max(size for _, size in calls) < len(answer.content) / 4
    assert sum(size for in_loop, size in calls if in_loop) < 10_000


@pytest.mark.parametrize("way", ["completion", "chat", "ids"])
def test_a_choice_is_made_when_the_one_before_is_written(
    served: Served, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A choice is made when the one before is written: all of them in Python would take several times the memory of
    their JSON, in which they end."""
    path, body = ASKED[way]
    done: list[str] = []
    dumps = json.dumps

    def noted(content: object, **how: Any) -> str:
        text = dumps(content, **how)
        done.append("written" if len(text) > 1000 else "")
        return text

    def ranking(top: Top) -> list[tuple[int, float]]:
        done.append("made")
        return ranked(top)

    monkeypatch.setattr(errors.json, "dumps", noted)
    monkeypatch.setattr(logprobs, "ranked", ranking)
    monkeypatch.setattr(generate, "ranked", ranking)
    assert served.post(path, {"model": NAME, **body}).status_code == 200
    monkeypatch.undo()
    changes = [one for one, _ in groupby(filter(None, done))]
    assert changes == ["made", "written"] * 16
