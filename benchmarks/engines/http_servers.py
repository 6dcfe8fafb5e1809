"""Ask a server that speaks OpenAI's completions, in a process of its own, for many completions at once.

Invariants: when the context ends, the process and all that it started have ended. Every server is asked with the same
bytes: token ids as prompts, no end token, the log-probability of each token, tokens as ids, so that none needs texts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from samebit.benchmarks.engines.process import Command, end_session

HANGS = 600.0
"""Seconds without a byte after which an answer does not count as one that ends."""
_PATH = "/v1/completions"
_TAIL = 2000
"""Characters of a server's output that an error shows."""


@dataclass
class Answer:
    """Holds what came of a request: tokens, log-probabilities, seconds to the first chunk, whether it hung."""

    tokens: int = 0
    logprobs: int = 0
    first: float | None = None
    hung: bool = False

    def take(self, choice: dict[str, Any], seconds: float) -> None:
        """Count what a choice of an answer, or of a chunk, has."""
        if self.first is None:
            self.first = seconds
        self.tokens += len(choice["token_ids"] or [])
        self.logprobs += len((choice["logprobs"] or {"token_logprobs": []})["token_logprobs"])


@dataclass(frozen=True)
class Answers:
    """Holds the answers of a batch, and the seconds from its first request to its last answer."""

    seconds: float
    each: list[Answer]

    def first_chunk(self) -> float:
        """Return the median seconds to the first chunk."""
        return statistics.median(one.first for one in self.each if one.first is not None)

    def check(self, tokens: int) -> None:
        """Raise RuntimeError unless each has this count of tokens, and as many log-probabilities."""
        counts = {(one.tokens, one.logprobs) for one in self.each}
        if counts != {(tokens, tokens)}:
            raise RuntimeError(f"a server gave {sorted(counts)} tokens and log-probabilities, asked for {tokens}")


class CompletionServer:
    """Asks a server that runs, for the model of this name."""

    def __init__(self, base: str, name: str) -> None:
        self._base = base
        self._name = name

    def ask(self, prompts: list[list[int]], tokens: int, *, stream: bool) -> Answers:
        """Send all prompts at once, and wait for this count of tokens of each."""
        return asyncio.run(self._ask([self._body(prompt, tokens, stream) for prompt in prompts]))

    def _body(self, prompt: list[int], tokens: int, stream: bool) -> dict[str, Any]:
        return {
            "model": self._name, "prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True,
            "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True, "stream": stream,
        }  # fmt: skip

    async def _ask(self, bodies: list[dict[str, Any]]) -> Answers:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._base, limits=limits, timeout=HANGS) as client:
            began = time.perf_counter()
            each = await asyncio.gather(*(_one(client, body, began) for body in bodies))
            return Answers(time.perf_counter() - began, each)


async def _one(client: httpx.AsyncClient, body: dict[str, Any], began: float) -> Answer:
    """Return what came; a connection that breaks ends the answer, a status of an error raises."""
    answer = Answer()
    try:
        async with client.stream("POST", _PATH, json=body) as events:
            events.raise_for_status()
            if not body["stream"]:
                content = json.loads(await events.aread())
                answer.take(content["choices"][0], time.perf_counter() - began)
                return answer
            async for line in events.aiter_lines():
                if line.startswith("data: {"):
                    answer.take(json.loads(line[6:])["choices"][0], time.perf_counter() - began)
    except httpx.TimeoutException:
        answer.hung = True
    except httpx.TransportError:
        pass
    return answer


@contextmanager
def serving(command: Callable[[int], Command], name: str) -> Iterator[CompletionServer]:
    """Start a server at a free port, for the model of this name, and wait until it answers.

    Raises:
        RuntimeError: the process ended before; with the end of what it wrote.
    """
    with reserved_port() as port, tempfile.TemporaryDirectory() as folder:
        one, log = command(port), Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                one.line(), stdout=output, stderr=output, text=True, cwd=folder, env=one.variables(),
                start_new_session=True,
            )  # fmt: skip
        try:
            base = f"http://127.0.0.1:{port}"
            if not ready(process, f"{base}/health"):
                raise RuntimeError(f"the server ended; the end of its output:\n{log.read_text()[-_TAIL:]}")
            yield CompletionServer(base, name)
        finally:
            end_session(process)


def ready(process: subprocess.Popen[Any], url: str) -> bool:
    """Wait until the URL answers; False if the process has ended instead."""
    while process.poll() is None:
        try:
            if httpx.get(url, timeout=HANGS).status_code == httpx.codes.OK:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    return False


@contextmanager
def reserved_port() -> Iterator[int]:
    """Hold a port of the loopback interface for the length of the block: no other process is given it, and a server
    that is told it can listen there, as all that are written for Linux do (`SO_REUSEADDR`)."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        yield port
