"""Say what goes over the pipes to an engine that samples for a trainer: what to draw, and where new weights are.

As `messages`, this module imports the standard library alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import IO, Any, Protocol

from samebit.benchmarks.engines.messages import Tokens, answer_each


@dataclass(frozen=True)
class Draw:
    """Asks for `samples` completions of each prompt, of at most `max_tokens` tokens.

    ends: tokens that end a completion, as its last. seed: of the draw's random numbers.
    """

    prompts: Tokens
    samples: int
    max_tokens: int
    temperature: float
    ends: list[int]
    seed: int


@dataclass(frozen=True)
class Drawn:
    """Answers a draw, the completions of a prompt one after another.

    logprobs: of the tokens, at the temperature, as the engine reports them. ended: by one of `ends`.
    """

    tokens: Tokens
    logprobs: list[list[float]]
    ended: list[bool]


class PolicyEngine(Protocol):
    """Draws from a policy whose weights change. `versions` names its packages and their versions."""

    @property
    def versions(self) -> dict[str, str]: ...

    def load(self, folder: str) -> None:
        """Draw with the weights in this folder from now on."""

    def build(self, folder: str) -> None:
        """Do the same from the beginning, without anything of what was there before."""

    def draw(self, draw: Draw) -> Drawn:
        """Draw completions."""


def loading(folder: str) -> dict[str, Any]:
    """Return the message that lets an engine load a folder; its answer is empty."""
    return {"load": folder}


def building(folder: str) -> dict[str, Any]:
    """Return the message that lets an engine be built anew of a folder; its answer is empty."""
    return {"build": folder}


def drawing(draw: Draw) -> dict[str, Any]:
    """Return the message of a draw."""
    return {"draw": asdict(draw)}


def answered(engine: PolicyEngine, message: dict[str, Any]) -> dict[str, Any]:
    """Do what a message asks for; return the answer."""
    if "load" in message:
        engine.load(message["load"])
        return {}
    if "build" in message:
        engine.build(message["build"])
        return {}
    return asdict(engine.draw(Draw(**message["draw"])))


def serve_policy(engine: PolicyEngine, answers: IO[str]) -> None:
    """Load and draw until stdin ends."""
    answer_each(answers, engine.versions, lambda message: answered(engine, message))
