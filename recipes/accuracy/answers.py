"""Let a worker answer the prompts greedily, and compare two such runs bit by bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from samebit.recipes.problem import Problem, reward
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams

LONGEST = 28
"""Tokens of the longest answer with its working, and some to spare."""


@dataclass(frozen=True)
class Answers:
    """Holds the outputs for all prompts and the seconds that they took."""

    outputs: list[RequestOutput]
    seconds: float

    def accuracy(self, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> float:
        """Return the share of right answers."""
        samples = [output.samples[0] for output in self.outputs]
        earned = [
            reward(str(tokenizer.decode(one.token_ids, skip_special_tokens=True)), one.finish_reason == "stop", problem)
            for one, problem in zip(samples, problems, strict=True)
        ]
        return sum(earned) / len(earned)

    def hit_rate(self) -> float:
        """Return the share of the prompts' tokens that were not computed."""
        return self.skipped() / sum(len(output.prompt_token_ids) for output in self.outputs)

    def skipped(self) -> int:
        """Return the prompts' tokens that were not computed."""
        return sum(output.num_cached_tokens for output in self.outputs)

    def tokens(self) -> int:
        """Return the tokens of all answers."""
        return sum(len(output.samples[0].token_ids) for output in self.outputs)


@dataclass(frozen=True)
class Difference:
    """Counts the answers, tokens and log-probabilities in which two runs differ."""

    answers: int
    tokens: int
    logprobs: int


def answer(model: PreTrainedModel, prompts: list[list[int]], config: RolloutConfig) -> Answers:
    """Answer every prompt greedily with a worker over `model` (bound) that is built for it."""
    with RolloutWorker(model, config=config) as worker:
        started = perf_counter()
        outputs = worker.generate(prompts, SamplingParams(temperature=0.0, max_tokens=LONGEST))
        return Answers(outputs, perf_counter() - started)


def compare(one: Answers, other: Answers) -> Difference:
    """Compare token by token, and the bits of their log-probabilities; what one run has more counts as different."""
    answers = tokens = logprobs = 0
    for mine, theirs in zip(one.outputs, other.outputs, strict=True):
        a, b = mine.samples[0], theirs.samples[0]
        different = _differing(torch.tensor(a.token_ids), torch.tensor(b.token_ids))
        answers += different > 0
        tokens += different
        logprobs += _differing(_bits(a.logprobs), _bits(b.logprobs))
    return Difference(answers, tokens, logprobs)


def _bits(logprobs: object) -> torch.Tensor:
    return torch.as_tensor(logprobs, dtype=torch.float32).view(torch.int32)


def _differing(one: torch.Tensor, other: torch.Tensor) -> int:
    if torch.equal(one, other):
        return 0
    shared = min(len(one), len(other))
    return int((one[:shared] != other[:shared]).sum()) + max(len(one), len(other)) - shared
