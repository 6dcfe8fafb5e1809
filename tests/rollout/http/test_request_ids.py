"""The id of a request: of its body, of the header that proxies and vLLM's clients send, or a new one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from samebit.rollout.integrations.http.service import Asked, Prompt, Service
from samebit.rollout.integrations.http.settings import ServeSettings
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

from ...patience import HANG, wait_until
from ..conftest import FakeRunner
from ..held_steps import held_steps
from ..step_gate import StepGate
from .served import NAME, Served
from .test_streams import ask

MakeWorker = Callable[..., tuple[RolloutWorker, FakeRunner]]
HEADER = "X-Request-Id"
COMPLETIONS = "/v1/completions"
ENDPOINTS = [
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2}, "id", "cmpl-"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}, "id", "chatcmpl-"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 2}}, "request_id", ""),
]


@pytest.mark.parametrize(("path", "body", "name", "prefix"), ENDPOINTS, ids=["completion", "chat", "generate"])
def test_the_header_is_the_id_of_a_request_whose_body_names_none(
    served: Served, path: str, body: dict[str, Any], name: str, prefix: str
) -> None:
    for header in ("abc", "x" * 256):
        assert served.post(path, body, headers={HEADER: header}).json()[name] == f"{prefix}{header}"
    streamed = served.post(path, {**body, "stream": True}, headers={HEADER: "abc"}).text
    assert json.loads(streamed.partition("data: ")[2].partition("\n")[0])[name] == f"{prefix}abc"
    for header in ("abc", "x" * 257):
        own = served.post(path, {**body, "request_id": "own"}, headers={HEADER: header})
        assert own.json()[name] == f"{prefix}own"
    ids = {served.post(path, body, headers=headers).json()[name] for headers in ({}, {HEADER: ""})}
    assert len(ids - {prefix}) == 2


def test_a_header_that_is_too_long_is_named(served: Served) -> None:
    refused = served.post(COMPLETIONS, {"prompt": "a"}, headers={HEADER: "x" * 257})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, HEADER)
    assert error["message"] == "X-Request-Id may have at most 256 characters, got 257"


def test_requests_may_share_a_header_and_are_aborted_together(served: Served) -> None:
    """A proxy gives one to all requests of a task; an id of a body has one request."""
    body = {"prompt": ["a", "b"], "max_tokens": 1000, "ignore_eos": True}
    with held_steps(served.service.worker), ThreadPoolExecutor(2) as others:
        asked = [others.submit(served.post, COMPLETIONS, body, headers={HEADER: "task"}) for _ in range(2)]
        wait_until(lambda: len(served.service.running.get("cmpl-task", ())) == 4)
        assert served.post(COMPLETIONS, {**body, "request_id": "task"}).status_code == 409
        assert served.command("/abort_requests", {"request_ids": ["cmpl-task"]}).json()["aborted"] == 1
        answers = [one.result(HANG).json() for one in asked]
    assert [answer["id"] for answer in answers] == ["cmpl-task"] * 2
    assert [choice["finish_reason"] for answer in answers for choice in answer["choices"]] == ["abort"] * 4
    assert not served.service.running


def test_a_proxy_that_repeats_a_request_is_answered(make_worker: MakeWorker) -> None:
    """The first attempt is aborted, and its step runs on under the id."""
    worker, runner = make_worker()
    runner.gate = StepGate()
    service, taken = Service(worker, ServeSettings(), NAME, None), []
    params = SamplingParams(max_tokens=30)

    async def read(message: dict[str, Any]) -> None:
        taken.append(message)

    def repeated() -> None:
        asyncio.run(ask(service, {"prompt": [1, 2], "max_tokens": 3}, read, (HEADER.lower().encode(), b"mine")))

    with service.submitted(Asked(id="cmpl-mine", prompts=[Prompt([1, 2])], params=params)):
        runner.gate.wait_for_a_step()
    with ThreadPoolExecutor(1) as others:
        asked = others.submit(repeated)
        wait_until(lambda: service.running or taken)
        runner.gate.release(100)
        asked.result(HANG)
    assert (taken[0]["status"], json.loads(taken[1]["body"])["id"]) == (200, "cmpl-mine")
    assert worker.stats()["requests_aborted"] == 1
