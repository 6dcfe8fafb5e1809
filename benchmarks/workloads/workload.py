"""Define the workload of every contestant: some prompts, some samples of each, all of one length."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from samebit.benchmarks.rounds.turns import Turn

Tokens = list[list[int]]

Timed = tuple[float, Tokens]
Run = Callable[[Tokens, int], Timed]
"""A contestant takes prompts and the number of new tokens; it gives its seconds and all continuations, in any order."""


@dataclass(frozen=True)
class Workload:
    """Asks for `prompts` x `samples` sequences of `prompt_tokens` + `new_tokens`, sampled at temperature 1."""

    prompts: int = 8
    samples: int = 8
    prompt_tokens: int = 256
    new_tokens: int = 128

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def output_tokens(self) -> int:
        return self.sequences * self.new_tokens

    def make_prompts(self, vocab_size: int, seed: int) -> Tokens:
        """Return random token ids; another seed gives prompts that no cache has seen."""
        generator = torch.Generator().manual_seed(seed)
        ids: Tokens = torch.randint(0, vocab_size, (self.prompts, self.prompt_tokens), generator=generator).tolist()
        return ids

    def turn(self, name: str, run: Run, vocab_size: int) -> Turn:
        """Return a contestant's turn, which has the prompts of its round, and whose continuations are checked."""

        def once(number: int) -> float:
            seconds, outputs = run(self.make_prompts(vocab_size, seed=number), self.new_tokens)
            self.check(name, outputs, vocab_size)
            return seconds

        return once

    def check(self, name: str, outputs: Tokens, vocab_size: int) -> None:
        """Raise unless these are the sampled continuations that were asked for."""
        lengths = sorted({len(tokens) for tokens in outputs})
        if len(outputs) != self.sequences or lengths != [self.new_tokens]:
            raise RuntimeError(
                f"{name}: {len(outputs)} sequences of {lengths} tokens, asked for {self.sequences} of {self.new_tokens}"
            )
        if any(not 0 <= token < vocab_size for tokens in outputs for token in tokens):
            raise RuntimeError(f"{name}: token ids outside of the vocabulary")
        if len({tuple(tokens) for tokens in outputs}) != self.sequences:
            raise RuntimeError(f"{name}: equal continuations; these are not samples")
