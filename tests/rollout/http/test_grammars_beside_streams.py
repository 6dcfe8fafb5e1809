"""What a request is constrained to is compiled beside the server's event loop, and counts as waiting meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from samebit.rollout.structured_outputs import grammars

from ...patience import HANG
from ..noted_compiling import note_compiling
from .served import NAME, Served

MESSAGES = [{"role": "user", "content": "hi"}]
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


def test_others_are_answered_while_a_grammar_is_compiled(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and probes are answered meanwhile, and the one that waits is counted among those inside."""
    compiled, begun, go_on = grammars._compiled, threading.Event(), threading.Event()

    def held(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(HANG)
        return compiled(*given)

    monkeypatch.setattr(grammars, "_compiled", held)
    slow = {"model": NAME, "prompt": "a", "n": 3, "structured_outputs": {"regex": "ab{7}"}}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.post, "/v1/completions", slow)
        try:
            assert begun.wait(HANG)
            assert served.service.admission.inside == 3
            assert served.http.get(f"{served.base}/health").status_code == 200
            assert served.post("/v1/completions", {"model": NAME, "prompt": "a", "max_tokens": 2}).status_code == 200
            assert not waiting.done()
        finally:
            go_on.set()
        assert waiting.result().status_code == 200
    assert served.service.admission.inside == 0
