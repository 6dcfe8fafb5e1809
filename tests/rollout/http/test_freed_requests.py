"""What was answered over HTTP is freed with the answer, and waits for no collection of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from samebit.rollout.requests.request import Request, Sequence

from ...patience import wait_until
from .served import NAME, Served

ASKED = {"model": NAME, "prompt": "abc", "n": 2, "max_tokens": 5, "logprobs": 1, "seed": 1}
WAYS = {
    "whole": ("/v1/completions", ASKED),
    "streamed": ("/v1/completions", {**ASKED, "stream": True}),
    "chat": ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": "abc"}], "n": 2}),
}


@pytest.fixture
def collected() -> Iterator[None]:
    """Begin without garbage, and make none go away."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("path", "body"), WAYS.values(), ids=WAYS)
def test_an_answered_request_is_freed(served: Served, collected: None, path: str, body: dict[str, Any]) -> None:
    answer = served.post(path, {"max_tokens": 5, **body})
    assert answer.status_code == 200, answer.text
    wait_until(lambda: not [one for one in gc.get_objects() if isinstance(one, (Request, Sequence))])
