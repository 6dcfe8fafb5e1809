"""Streams end well that nobody reads, that take too long, or whose server ends; and texts come in pieces."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samebit.benchmarks.engines.http_servers import reserved_port
from samebit.kernels.openmp import process_environment
from samebit.rollout.integrations.http.app import create_app
from samebit.rollout.integrations.http.errors import ApiError, encoded
from samebit.rollout.integrations.http.event_stream import EventStream
from samebit.rollout.integrations.http.openai.prompts import completion_prompts
from samebit.rollout.integrations.http.openai.requests import CompletionRequest
from samebit.rollout.integrations.http.openai.sample_text import SampleText
from samebit.rollout.integrations.http.openai.tools import HermesParser
from samebit.rollout.integrations.http.service import Asked, Prompt, Service
from samebit.rollout.integrations.http.settings import ServeSettings
from samebit.rollout.integrations.http.step_hub import StallWatch
from samebit.rollout.outputs import StreamChunk
from samebit.rollout.requests.stop_strings import text_of
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

from ...forks import python
from ...patience import HANG, wait_until
from ..conftest import FakeRunner
from ..held_steps import held_steps
from ..step_gate import StepGate
from ..tiny_llama import byte_fallback_tokenizer
from .served import CALL, NAME, Served, byte_tokenizer

LONG = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
Sent = list[dict[str, Any]]
MakeWorker = Callable[..., tuple[RolloutWorker, FakeRunner]]


async def for_ever() -> None:
    await asyncio.Event().wait()


async def ask(
    service: Service,
    body: dict[str, Any],
    take: Callable[[dict[str, Any]], Awaitable[None]],
    *headers: tuple[bytes, bytes],
    path: str = "/v1/completions",
    stay: Callable[[], Awaitable[object]] = for_ever,
) -> None:
    """Call the application itself, with a client that takes what is sent in its own way, and goes when it will."""
    content = [json.dumps(body).encode()]

    async def receive() -> dict[str, Any]:
        if content:
            return {"type": "http.request", "body": content.pop()}
        await stay()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"", "client": ("c", 1),
        "server": ("127.0.0.1", 80), "headers": [(b"content-type", b"application/json"), *headers],
    }  # fmt: skip
    await create_app(service)(scope, receive, take)


def beside(served: Served, **changes: Any) -> Service:
    """Return another service over the same worker."""
    return Service(served.service.worker, ServeSettings(**changes), NAME, served.service.model.tokenizer)


def test_a_client_that_never_reads_holds_nothing(served: Served) -> None:
    service, taken, before = beside(served, stall_seconds=0.2), [], aborted(served)

    async def read_one_piece(message: dict[str, Any]) -> None:
        taken.append(message)
        steps.release()
        if len(taken) > 2:
            await asyncio.Event().wait()

    with held_steps(served.service.worker) as steps:
        steps.release()
        asyncio.run(ask(service, {**LONG, "return_token_ids": True}, read_one_piece))
        assert len(taken) == 3
        assert service.admission.inside == 0
        wait_until(lambda: aborted(served) == before + 1)
        wait_until(lambda: served.service.worker.stats()["running"] == 0)


@pytest.mark.parametrize(
    ("body", "unread"),
    [
        (LONG, {"type": "http.response.start"}),
        ({**LONG, "max_tokens": 3}, {"more_body": False}),
        ({**LONG, "prompt": ["a"] * 2, "n": 16}, {"status": 400}),
    ],
)
def test_a_client_that_does_not_read_the_first_or_the_last_message_holds_nothing(
    served: Served, body: dict[str, Any], unread: dict[str, Any]
) -> None:
    """A client that does not read the first or the last message holds nothing, as one whose connection is full of what
    it has not read of an earlier answer.
    """
    service, taken = beside(served, stall_seconds=0.2, max_waiting=0), []

    async def stand_still(message: dict[str, Any]) -> None:
        taken.append(message)
        if unread.items() <= message.items():
            await asyncio.Event().wait()

    asyncio.run(ask(service, body, stand_still))
    assert unread.items() <= taken[-1].items()
    assert service.admission.inside == 0
    wait_until(lambda: served.service.worker.stats()["running"] == 0)


@pytest.mark.parametrize("deadline", [0.01, 0.0])
def test_a_deadline_ends_what_runs_for_a_client_that_does_not_read(deadline: float) -> None:
    """A deadline ends what runs for a client that does not read. It hears of the deadline when it reads again: with a
    status of its own, where it has read nothing.
    """
    taken: Sent = []

    async def check() -> None:
        ended, reading = asyncio.Event(), asyncio.Event()

        async def events() -> AsyncIterator[bytes]:
            try:
                yield b"data: 1\n\n"
            finally:
                ended.set()

        async def stay() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def read_later(message: dict[str, Any]) -> None:
            taken.append(message)
            await reading.wait()

        stream = EventStream(events(), StallWatch(HANG), deadline, lambda: ApiError(504, "too late"))
        streaming = asyncio.create_task(stream({"type": "http"}, stay, read_later))
        await ended.wait()
        reading.set()
        await streaming

    asyncio.run(asyncio.wait_for(check(), HANG))
    assert [one["status"] for one in taken if "status" in one] == [200, 504]
    assert json.loads(taken[-1]["body"])["error"]["message"] == "too late"


def test_a_deadline_ends_a_stream_with_its_error(served: Served) -> None:
    taken: Sent = []

    async def read(message: dict[str, Any]) -> None:
        taken.append(message)

    service, before = beside(served, request_seconds=0.01), aborted(served)
    submit = service._submit

    def submit_and_wait(*asked: Any) -> Any:
        """Submit, and wait for the first token: the stream finds it there, before the deadline."""
        handle = submit(*asked)
        reader = handle.reader()
        steps.release()
        wait_until(lambda: reader.ready)
        return handle

    with held_steps(served.service.worker) as steps:
        service._submit = submit_and_wait
        asyncio.run(ask(service, {**LONG, "return_token_ids": True}, read))
        last = taken[-1]["body"].decode().split("\n\n")
        assert json.loads(last[0].removeprefix("data: "))["error"]["code"] == "deadline"
        assert last[1] == "data: [DONE]"
        taken.clear()
        service._submit = submit
        asyncio.run(ask(service, {**LONG, "stream": False}, read))
        assert taken[0]["status"] == 504
        wait_until(lambda: aborted(served) == before + 2)
        assert service.admission.inside == 0
        wait_until(lambda: served.service.worker.stats()["running"] == 0)


def test_an_error_of_the_worker_is_the_last_event(served: Served) -> None:
    service, taken = beside(served), []

    async def read(message: dict[str, Any]) -> None:
        taken.append(message)
        if len(taken) == 2:
            handle = next(iter(service.running.values()))[0]
            handle._delivery.error = RuntimeError("it broke")

    asyncio.run(ask(service, LONG, read))
    assert b"it broke" in taken[-1]["body"]


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True, "return_token_ids": True}


def test_the_first_event_of_a_chat_has_the_ids_of_its_prompt(served: Served) -> None:
    """The first event of a chat has the ids of its prompt, and a choice with its role, as clients expect."""
    with served.http.stream("POST", f"{served.base}/v1/chat/completions", json={**CHAT, "n": 2}) as answer:
        pieces = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line[6:7] == "{"]
    whole = served.post("/v1/chat/completions", {**CHAT, "stream": False}).json()
    assert pieces[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in piece for piece in pieces[1:])
    assert all(piece["choices"] for piece in pieces)
    assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "at most 2047 are allowed"),
        ({"n": 16, "request_id": "409"}, 409, "is running"),
        ({"n": 16}, 429, "try again later"),
        ({}, 503, "asleep"),
    ],
)
def test_an_error_before_the_first_event_has_its_own_status(
    served: Served, body: dict[str, Any], status: int, says: str
) -> None:
    service, taken = beside(served, max_waiting=0), []

    async def read(message: dict[str, Any]) -> None:
        taken.append(message)

    params = SamplingParams(max_tokens=1500, ignore_eos=True)
    prompt = Asked(id=f"chatcmpl-{status}", prompts=[Prompt([1])], params=params)  # an aborted one keeps its id a step
    with ExitStack() as around:
        if status in (409, 429):
            around.enter_context(service.submitted(prompt))
        if status == 503:
            served.command("/sleep?level=1")
            around.callback(served.command, "/wake_up")
        asyncio.run(ask(service, {**CHAT, **body}, read, path="/v1/chat/completions"))
    assert taken[0]["status"] == status
    assert says in json.loads(taken[1]["body"])["error"]["message"]


def test_a_retry_is_told_that_the_first_attempt_has_not_ended(make_worker: MakeWorker) -> None:
    """A retry is told that the first attempt has not ended. That is aborted, and its step runs on: a conflict, after
    which a client tries again.
    """
    worker, runner = make_worker()
    runner.gate = StepGate()
    service, taken = Service(worker, ServeSettings(), NAME, None), []
    params = SamplingParams(max_tokens=30)

    async def read(message: dict[str, Any]) -> None:
        taken.append(message)

    def try_again() -> int:
        taken.clear()
        asyncio.run(ask(service, {"prompt": [1, 2], "max_tokens": 3, "request_id": "mine"}, read))
        return int(taken[0]["status"])

    with service.submitted(Asked(id="cmpl-mine", prompts=[Prompt([1, 2])], params=params)):
        runner.gate.wait_for_a_step()
    assert try_again() == 409
    error = json.loads(taken[1]["body"])["error"]
    assert (error["param"], "'cmpl-mine' has not ended yet" in error["message"]) == ("request_id", True)
    runner.gate.release(100)
    wait_until(lambda: try_again() == 200)
    assert worker.stats()["requests_aborted"] == 1


@pytest.mark.parametrize(
    ("texts", "apart"), [(["a" * 9], False), (["a" * 20_000], True), (["a" * 1000] * 20, True), (["ab", "b"], False)]
)
def test_texts_that_are_long_together_are_tokenized_in_a_thread(served: Served, texts: list[str], apart: bool) -> None:
    """Texts that are long together are tokenized in a thread, so that the event loop goes on for the other requests."""
    threads: set[threading.Thread] = set()
    tokenizer = byte_tokenizer()

    def noted(text: str, **options: Any) -> Any:
        threads.add(threading.current_thread())
        return tokenizer(text, **options)

    service = Service(served.service.worker, ServeSettings(), NAME, noted)
    prompts = asyncio.run(completion_prompts(service, CompletionRequest(prompt=texts)))
    assert [one.token_ids for one in prompts] == [tokenizer(text)["input_ids"] for text in texts]
    assert (threading.current_thread() not in threads) == apart


def on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Noted:
    """Calls what it stands for, and remembers of each call with many ids whether the event loop waited for it."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.on_the_loop: list[bool] = []
        self._inner = inner

    def __call__(self, ids: list[int], **options: Any) -> Any:
        if len(ids) > 1000:
            self.on_the_loop.append(on_a_loop())
        return self._inner(ids, **options)


@pytest.mark.parametrize(("count", "apart"), [(1001, False), (20_000, True)])
def test_many_tokens_are_named_in_a_thread(
    served: Served, monkeypatch: pytest.MonkeyPatch, count: int, apart: bool
) -> None:
    tokenizer = served.service.need_tokenizer()
    noted = Noted(tokenizer.convert_ids_to_tokens)
    monkeypatch.setattr(tokenizer, "convert_ids_to_tokens", noted)
    answer = served.post("/tokenize", {"prompt": "c" * count, "return_token_strs": True}).json()
    assert answer["token_strs"] == ["c"] * count
    assert noted.on_the_loop == [not apart]


@pytest.mark.parametrize(("prompts", "apart"), [(2, False), (16, True)])
def test_an_echoed_prompt_is_decoded_once_and_in_a_thread_where_it_is_long(
    served: Served, monkeypatch: pytest.MonkeyPatch, prompts: int, apart: bool
) -> None:
    """An echoed prompt is decoded once, whatever number of samples it has, streamed or not; in a thread where it is
    long, so that the event loop goes on for the other requests.
    """
    tokenizer = served.service.need_tokenizer()
    ids = tokenizer("c" * 1100)["input_ids"]
    asked = {"prompt": [ids] * prompts, "n": 3, "max_tokens": 1, "echo": True}
    noted = Noted(tokenizer.decode)
    monkeypatch.setattr(tokenizer, "decode", noted)
    choices = served.post("/v1/completions", asked).json()["choices"]
    assert noted.on_the_loop == [not apart] * prompts
    with served.http.stream("POST", f"{served.base}/v1/completions", json={**asked, "stream": True}) as answer:
        pieces = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line[6:7] == "{"]
    assert noted.on_the_loop == [not apart] * 2 * prompts
    firsts = {choice["index"]: choice for piece in reversed(pieces) for choice in piece["choices"]}
    for choice in (*choices, *firsts.values()):
        assert choice["text"].startswith("c" * 1100)
    assert len(choices) == len(firsts) == 3 * prompts


def listener(port: int) -> int:
    """Return the process that listens there."""
    sockets = psutil.net_connections("tcp4")
    (found,) = {one.pid for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr == ("127.0.0.1", port)}
    assert found is not None
    return found


@contextmanager
def running(
    served: Served, *flags: str, code: str | None = None, environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Serve in a process of its own, by the command or by this code, until the end of the block; give its port."""
    command = ["-m", "samebit.rollout.cli", "serve"] if code is None else ["-c", code]
    with reserved_port() as port:
        process = subprocess.Popen(
            [*python(), *command, str(served.folder), "--num-threads", "1", "--port", str(port), *flags],
            env={**os.environ, **process_environment(1), **(environment or {})},
            stdout=subprocess.PIPE,
        )
        try:
            with httpx.Client() as client:
                wait_until(lambda: process.poll() is not None or ready(client, f"http://127.0.0.1:{port}"))
            assert process.poll() is None
            yield process, port
        finally:
            process.kill()
            process.communicate()


def test_sigterm_lets_what_runs_end(served: Served) -> None:
    with running(served) as (process, port):
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json={**LONG, "max_tokens": 300}, timeout=None) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(listener(port), signal.SIGTERM)
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert process.wait(HANG) == 0


def test_sigterm_ends_a_command_that_waits_for_its_trainer(served: Served) -> None:
    """A signal to end (SIGTERM) ends a command that waits for its trainer: it would wait for an hour, in a thread."""
    secret = {"SAMEBIT_SERVE_CONTROL_TOKEN": "secret"}
    with (
        ThreadPoolExecutor(1) as other,
        running(served, "--control", "token", "--shutdown-seconds", "1", environment=secret) as (process, port),
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        silent.settimeout(HANG)
        host, at = silent.getsockname()
        info = {"backend": "gloo", "master_address": host, "master_port": at, "timeout": 3600}
        other.submit(
            httpx.post,
            f"http://127.0.0.1:{port}/init_weight_transfer_engine",
            json={"init_info": info},
            headers={"Authorization": "Bearer secret"},
            timeout=None,
        )
        with silent.accept()[0]:  # the command has begun, and hears nothing
            os.kill(listener(port), signal.SIGTERM)
            assert process.wait(HANG) == 0


SLOW_TO_CLOSE = """
import sys, threading
from samebit.rollout.integrations.http.serving import main
from samebit.rollout.worker import RolloutWorker
def close(self):
    print("closing", flush=True)
    threading.Event().wait()
RolloutWorker.close = close
sys.exit(main(sys.argv[1:]))
"""


def test_a_second_sigterm_ends_a_server_that_is_slow_to_close(served: Served) -> None:
    with running(served, code=SLOW_TO_CLOSE) as (process, port):
        server = listener(port)
        os.kill(server, signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == b"closing\n"
        os.kill(server, signal.SIGTERM)
        assert process.wait(HANG) == -signal.SIGTERM


def test_an_idle_connection_is_closed_by_its_client(served: Served) -> None:
    """An idle connection is closed by its client first, else a request that is sent just then is lost."""
    assert served.server._server.config.timeout_keep_alive > 2 * (httpx.Limits().keepalive_expiry or 0) > 0


def test_numbers_that_json_can_not_hold_are_named() -> None:
    with pytest.raises(ApiError, match=r"choices\.0\.logprob is -inf, which JSON can not hold"):
        encoded({"choices": [{"logprob": float("-inf")}]})


TOKENIZER = byte_tokenizer()


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(1, 9), max_size=9), st.sampled_from(["", "ab", "e\u0301", "aab"]))
def test_the_pieces_of_a_text_are_the_text(text: str, cuts: list[int], stop: str) -> None:
    """The pieces of a text are the text, whatever tokens come together, and wherever characters are cut."""
    ids = TOKENIZER(text)["input_ids"]
    pieces, start = SampleText(TOKENIZER, (stop,) if stop else (), frozenset()), 0
    found = ""
    for cut in cuts:
        found += pieces.push(chunk(ids[start : start + cut]))
        start += cut
    rest = ids[start:]
    found += pieces.push(chunk(rest, finish="length"))
    assert found == text


FALLING_BACK = byte_fallback_tokenizer()
MOST_ARE_BYTES = st.integers(3, len(FALLING_BACK) - 1) | st.integers(0, 2)


@settings(max_examples=40, deadline=None)
@example([233, *[2] * 12, 154, 168], 1, [])
@example([*[len(FALLING_BACK) + 5] * 12, 259, 260], 1, [233, 154])
@given(st.lists(MOST_ARE_BYTES, max_size=30), st.integers(1, 5), st.lists(MOST_ARE_BYTES, max_size=12))
def test_the_pieces_of_incomplete_characters_are_the_text(ids: list[int], size: int, prompt: list[int]) -> None:
    """The pieces of incomplete characters are the text, of a tokenizer that has a token for each byte: prompt and
    sample may end, or go wrong, within a character, and special tokens may stand there.
    """
    pieces = SampleText(FALLING_BACK, (), frozenset(), prompt)
    found = "".join(pieces.push(chunk(ids[start : start + size])) for start in range(0, len(ids), size))
    assert found + pieces.push(chunk([], finish="length")) == text_of(FALLING_BACK, ids, prompt)


def test_what_may_end_a_sample_is_held_back() -> None:
    """What may end a sample is held back: a token may be read a moment before it is seen to have ended it."""
    x, q, z, end = TOKENIZER.convert_tokens_to_ids(["x", "q", "z", "!"])
    by_string = SampleText(TOKENIZER, ("q",), frozenset())
    assert by_string.push(chunk([x, q])) == "x"
    assert by_string.push(chunk([], "stop", "q")) == ""
    by_two = SampleText(TOKENIZER, ("qz",), frozenset())
    assert by_two.push(chunk([x, q, x, q])) == "xqx"
    assert by_two.push(chunk([x])) == ""
    assert by_two.push(chunk([q, z], "stop", "qz")) == "qx"
    partial = SampleText(TOKENIZER, ("qzz",), frozenset())
    assert partial.push(chunk([x, q, z, end])) == "x"
    assert partial.push(chunk([], "length")) == "qz!"
    passed = SampleText(TOKENIZER, ("q", "qzz"), frozenset())
    assert passed.push(chunk([x, q, z])) == "x"
    assert passed.push(chunk([q], "stop", "q")) == "qz", "the first one came before min_tokens"
    by_token = SampleText(TOKENIZER, (), frozenset([end]))
    assert by_token.push(chunk([x, end])) == "x"
    assert by_token.push(chunk([x])) == "!x"
    assert by_token.push(chunk([end], "stop")) == ""


def chunk(ids: list[int], finish: str | None = None, stop: str | None = None) -> StreamChunk:
    return StreamChunk(0, ids, [0.0] * len(ids), finish is not None, finish, stop)


HALF = '{"name": "add", "arguments": {"a": "\\ud800"}}'
"""Has half of a character, which no message can hold that is sent back."""


def called(arguments: str) -> str:
    """A call whose arguments are a text, as small models write them."""
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (f"so: {CALL} and {CALL}", "so:  and ", ["add", "add"]),
        ("<tool_call>no json</tool_call>x", "<tool_call>no json</tool_call>x", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ("<tool_call>3</tool_call>", "<tool_call>3</tool_call>", []),
        (f"<tool_call>{HALF}</tool_call>", f"<tool_call>{HALF}</tool_call>", []),
        *((called(arguments), called(arguments), []) for arguments in ("1 + 1", "42", "[1]", "null", "{", HALF)),
        (called('{"a": 1}'), "", ["add"]),
        ("a <tool_call>{", "a <tool_call>{", []),
        ("a <tool_c", "a <tool_c", []),
        (f"{CALL}\n{CALL}", "", ["add", "add"]),
        (f"\n\n{CALL}\n", "", ["add"]),
        (f"so:\n{CALL}\n{CALL}\nso", "so:\n\nso", ["add", "add"]),
        (f"{CALL}\n<tool_call>3</tool_call>\n{CALL}", "\n<tool_call>3</tool_call>\n", ["add", "add"]),
        (f"{CALL}\n<tool_", "\n<tool_", ["add"]),
        ("\n \n", "\n \n", []),
    ],
)
def test_tool_calls_are_read_and_nothing_is_lost(size: int, text: str, content: str, names: list[str]) -> None:
    parser = HermesParser()
    parts = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    parts.append(parser.finish())
    assert "".join(part.content for part in parts) == content
    assert [call["function"]["name"] for part in parts for call in part.calls] == names


def aborted(served: Served) -> float:
    return served.service.worker.stats()["requests_aborted"]


def ready(client: httpx.Client, base: str) -> bool:
    try:
        return client.get(f"{base}/readiness").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
