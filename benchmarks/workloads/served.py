"""Define what engines in processes of their own are asked: groups, requests that begin alike, conversations.

Each asks one engine and gives its seconds. Prompts are random and depend on the round alone, so that engines are asked
the same and no cache has seen them; what is sampled differs, and with it the later turns of conversations.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from samebit.benchmarks.engines.messages import Job, Tokens
from samebit.benchmarks.engines.process import EngineProcess

Work = Callable[[EngineProcess, int, bool], float]
"""Asks an engine for the work of the round of this number, with log-probabilities or without; gives its seconds."""


@dataclass(frozen=True)
class Sizes:
    """Sets the work, in tokens unless noted otherwise."""

    vocab_size: int
    prompts: int = 8
    samples: int = 8
    prompt_tokens: int = 256
    new_tokens: int = 128
    requests: int = 64
    shared: int = 1024
    own: int = 64
    conversations: int = 16
    turns: int = 6
    turn_input: int = 40
    turn_output: int = 100

    @property
    def longest(self) -> int:
        talk = self.turns * (self.turn_input + self.turn_output)
        return max(self.prompt_tokens, self.shared + self.own, talk) + self.new_tokens

    def output_tokens(self, name: str) -> int:
        """Return the tokens that the work of this name samples."""
        return {
            "groups": self.prompts * self.samples * self.new_tokens,
            "groups257": self.prompts * self.samples * self.new_tokens,
            "shared": self.requests * self.new_tokens,
            "turns": self.conversations * self.turns * self.turn_output,
        }[name]

    def tokens(self, rows: int, count: int, seed: int) -> Tokens:
        """Return random rows of this count of tokens."""
        generator = torch.Generator().manual_seed(seed)
        ids: Tokens = torch.randint(self.vocab_size, (rows, count), generator=generator).tolist()
        return ids


def groups(sizes: Sizes) -> Work:
    """Ask for several samples of each prompt."""

    def run(engine: EngineProcess, number: int, logprobs: bool) -> float:
        prompts = sizes.tokens(sizes.prompts, sizes.prompt_tokens, number)
        return engine.run(Job(prompts, sizes.samples, sizes.new_tokens, logprobs, fresh=True)).seconds

    return run


def groups257(sizes: Sizes) -> Work:
    """Ask for the same of prompts of 257 tokens: a sample can take two whole blocks of 128 tokens, vLLM's on a CPU,
    from the one before it, and of 256 tokens one only, since a token is left to be computed."""
    return groups(replace(sizes, prompt_tokens=257))


def shared(sizes: Sizes) -> Work:
    """Send at once requests that begin alike, at a cold cache."""

    def run(engine: EngineProcess, number: int, logprobs: bool) -> float:
        beginning, *_ = sizes.tokens(1, sizes.shared, 1000 + number)
        ends = sizes.tokens(sizes.requests, sizes.own, 2000 + number)
        prompts = [[*beginning, *end] for end in ends]
        return engine.run(Job(prompts, 1, sizes.new_tokens, logprobs, fresh=True)).seconds

    return run


def turns(sizes: Sizes) -> Work:
    """Hold conversations; each turn sends all that was said."""

    def run(engine: EngineProcess, number: int, logprobs: bool) -> float:
        talks: Tokens = [[] for _ in range(sizes.conversations)]
        seconds = 0.0
        for turn in range(sizes.turns):
            said = sizes.tokens(sizes.conversations, sizes.turn_input, 10_000 + 100 * number + turn)
            talks = [[*talk, *words] for talk, words in zip(talks, said, strict=True)]
            done = engine.run(Job(talks, 1, sizes.turn_output, logprobs, fresh=turn == 0))
            talks = [[*talk, *answer] for talk, answer in zip(talks, done.tokens, strict=True)]
            seconds += done.seconds
        return seconds

    return run


WORK: dict[str, Callable[[Sizes], Work]] = {"groups": groups, "groups257": groups257, "shared": shared, "turns": turns}
