"""Say what goes over the pipes: one line of JSON a message, read from stdin and written to what stdout was.

Invariant: an engine answers each job with one line, in order. Whatever else it prints goes to stderr. This module
imports the standard library alone, because vLLM's environment has no package of samebit's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO, Any, Protocol, TypeVar

T = TypeVar("T")
Tokens = list[list[int]]


@dataclass(frozen=True)
class Job:
    """Asks for `samples` continuations of `new_tokens` tokens of each prompt, at temperature 1.

    logprobs: give the log-probability of each sampled token too. fresh: forget the prefixes first, untimed.
    one_by_one: the next prompt is only sent when the one before has ended.
    """

    prompts: Tokens
    samples: int = 1
    new_tokens: int = 1
    logprobs: bool = True
    fresh: bool = False
    one_by_one: bool = False

    def parts(self) -> list[Tokens]:
        """Return the prompts that are sent together."""
        return [[prompt] for prompt in self.prompts] if self.one_by_one else [self.prompts]


@dataclass(frozen=True)
class Done:
    """Answers a job: its seconds without the pipes, and its continuations, those of a prompt one after another.

    logprobs: of the tokens, as the engine reports them; None if they were not asked for. cached: prompt tokens that
        the prefix cache spared, None if the engine does not say.
    """

    seconds: float
    tokens: Tokens
    logprobs: list[list[float]] | None = None
    cached: int | None = None


class Engine(Protocol):
    """Generates. `versions` names its packages and their versions."""

    @property
    def versions(self) -> dict[str, str]: ...

    def forget(self) -> None:
        """Drop all cached prefixes."""

    def run(self, job: Job) -> Done:
        """Do the job, `fresh` aside."""


def timed(action: Callable[[], T]) -> tuple[float, T]:
    """Call it; return the seconds and the result."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def own_stdout() -> IO[str]:
    """Return the pipe to who asks, and let everything else that is printed go to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def serve(engine: Engine, answers: IO[str]) -> None:
    """Do jobs until stdin ends."""

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        job = Job(**message)
        if job.fresh:
            engine.forget()
        return asdict(engine.run(job))

    answer_each(answers, engine.versions, answer)


def answer_each(answers: IO[str], versions: dict[str, str], answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer each message until stdin ends; the first line that is written says the versions."""
    _write(answers, {"versions": versions})
    for line in sys.stdin:
        _write(answers, answer(json.loads(line)))


def _write(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
