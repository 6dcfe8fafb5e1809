"""What a request is constrained to is compiled beside the server's event loop, and counts as waiting meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from samebit.rollout.integrations.http.service import Asked, Prompt
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.structured_outputs import grammars

from ...patience import HANG
from ..noted_compiling import note_compiling
from .served import NAME, Served
from .test_streams import ask, beside

MESSAGES = [{"role": "user", "content": "hi"}]
_fresh = count()
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": ["a", "b"], "structured_outputs": {"regex": "ab{3}"}}),
    "streamed": ("/v1/completions", {"prompt": "a", "stream": True, "structured_outputs": {"regex": "ab{4}"}}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "structured_outputs": {"regex": "ab{5}"}}),
    "ids": (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "ab{6}"}}},
    ),
}


@pytest.mark.parametrize(("path", "body"), WAYS.values(), ids=WAYS)
def test_a_grammar_is_compiled_beside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    in_loops = note_compiling(monkeypatch)
    answer = served.post(path, {"model": NAME, **body})
    assert (answer.status_code, in_loops) == (200, [False]), answer.text


@contextmanager
def held_compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let no grammar be compiled within the block; the event says that one has begun."""
    compiled, begun, go_on = grammars._compiled, threading.Event(), threading.Event()

    def held(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(HANG)
        return compiled(*given)

    monkeypatch.setattr(grammars, "_compiled", held)
    try:
        yield begun
    finally:
        go_on.set()


@pytest.mark.parametrize(("path", "body"), WAYS.values(), ids=WAYS)
def test_a_deadline_ends_a_request_whose_grammar_is_compiled(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """A deadline ends a request that waits for its grammar, which is nothing inside then."""
    service, taken = beside(served, request_seconds=0.01), []

    async def take(message: dict[str, Any]) -> None:
        taken.append(message)

    with held_compiling(monkeypatch):
        asyncio.run(ask(service, fresh(body), take, path=path))
        assert taken[0]["status"] == 504
        assert json.loads(taken[1]["body"])["error"]["code"] == "deadline"
        assert service.admission.inside == 0


@pytest.mark.parametrize(("path", "body"), WAYS.values(), ids=WAYS)
def test_a_client_that_goes_away_waits_for_no_grammar(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    service, taken = beside(served), []

    async def take(message: dict[str, Any]) -> None:
        taken.append(message)

    with held_compiling(monkeypatch) as begun:

        async def stay() -> None:
            await asyncio.to_thread(begun.wait, HANG)
            assert service.admission.inside == (2 if path == "/v1/completions" and "stream" not in body else 1)

        asyncio.run(ask(service, fresh(body), take, path=path, stay=stay))
        assert taken[0]["status"] == 499
        assert service.admission.inside == 0


def fresh(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request whose grammar no test has asked for."""
    regex = f"ab{{9}}{next(_fresh)}"
    return json.loads(re.sub(r'"ab\{\d\}"', json.dumps(regex), json.dumps(body)))


def test_what_compiling_takes_counts_among_the_seconds_of_a_request(served: Served) -> None:
    service = beside(served, request_seconds=100)
    asked = Asked(id="a", prompts=[Prompt([1])], params=SamplingParams())
    left = service.seconds_left(asked)
    assert left is not None
    assert 0 < left <= 100
    assert service.seconds_left(replace(asked, began=asked.began - 1000)) == 0
    assert beside(served).seconds_left(asked) is None


def test_others_are_answered_while_a_grammar_is_compiled(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and probes are answered meanwhile, and the one that waits is counted among those inside."""
    slow = {"model": NAME, "prompt": "a", "n": 3, "structured_outputs": {"regex": "ab{7}"}}
    with ThreadPoolExecutor(1) as pool:
        with held_compiling(monkeypatch) as begun:
            waiting = pool.submit(served.post, "/v1/completions", slow)
            assert begun.wait(HANG)
            assert served.service.admission.inside == 3
            assert served.http.get(f"{served.base}/health").status_code == 200
            assert served.post("/v1/completions", {"model": NAME, "prompt": "a", "max_tokens": 2}).status_code == 200
            assert not waiting.done()
        assert waiting.result().status_code == 200
    assert served.service.admission.inside == 0
