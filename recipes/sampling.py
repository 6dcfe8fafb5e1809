"""Ask the rollout worker for samples: groups to learn from, greedy answers to measure with."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from samebit.recipes.grpo_loss import group_advantages
from samebit.recipes.metrics import Row
from samebit.recipes.problem import Problem, reward, shows_working
from samebit.recipes.prompts import Style
from samebit.recipes.sampler import Completion, Group, Sampler
from samebit.recipes.trajectory import Trajectory
from samebit.rollout import SamplingParams

PLAIN = Style()


@dataclass(frozen=True)
class Shown:
    """Holds a sample as a reader of the log sees it."""

    prompt: str
    text: str
    reward: float


@dataclass(frozen=True)
class Scored:
    """Holds the outputs of one `generate` and what they earned."""

    outputs: Sequence[Group]
    rewards_PG: Tensor
    seconds: float

    def trajectories(self) -> list[Trajectory]:
        """Return every sample with its group advantage."""
        advantages = group_advantages(self.rewards_PG).tolist()
        return [
            Trajectory(output.prompt_token_ids, sample.token_ids, sample.logprobs, advantage, _versions(sample))
            for output, group in zip(self.outputs, advantages, strict=True)
            for sample, advantage in zip(output.samples, group, strict=True)
        ]

    def shown(self, problems: Sequence[Problem], count: int) -> list[Shown]:
        """Return the first sample of each of the first `count` problems."""
        firsts = zip(problems, self.outputs, self.rewards_PG.tolist(), strict=True)
        found = [Shown(problem.prompt, _text(out.samples[0]), rewards[0]) for problem, out, rewards in firsts]
        return found[:count]

    def share_with_working(self) -> float:
        """Return the share of samples that show working."""
        samples = self._samples()
        return sum(shows_working(_text(sample)) for sample in samples) / len(samples)

    def metrics(self) -> Row:
        """Return the metrics of a batch that was sampled to learn from."""
        lengths = [len(sample.token_ids) for sample in self._samples()]
        ended = [sample.finish_reason == "stop" for sample in self._samples()]
        return {
            "reward/mean": self.rewards_PG.mean().item(),
            "reward/groups_that_agree": (self.rewards_PG.std(dim=1) == 0).float().mean().item(),
            "reward/share_with_working": self.share_with_working(),
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": max(lengths),
            "response_length/clip_ratio": 1 - sum(ended) / len(ended),
            "perf/time_generate": self.seconds,
            "perf/output_tokens_per_second": sum(lengths) / self.seconds,
        }

    def _samples(self) -> list[Completion]:
        return [sample for output in self.outputs for sample in output.samples]


def sample(
    worker: Sampler,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    params: SamplingParams,
    style: Style = PLAIN,
) -> Scored:
    """Generate for every problem, and score the text."""
    prompts = [style.prompt_ids(tokenizer, problem) for problem in problems]
    started = perf_counter()
    outputs = worker.generate(prompts, params)
    seconds = perf_counter() - started
    rewards = [
        [
            reward(_text(answer), answer.finish_reason == "stop", problem, style.answer_after)
            for answer in output.samples
        ]
        for problem, output in zip(problems, outputs, strict=True)
    ]
    return Scored(outputs, torch.tensor(rewards), seconds)


def evaluate(
    worker: Sampler,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    max_tokens: int,
    style: Style = PLAIN,
) -> Row:
    """Return the greedy accuracy on held-out problems, and the share of answers that show working."""
    scored = sample(worker, tokenizer, problems, SamplingParams(temperature=0.0, max_tokens=max_tokens), style)
    return {
        "val/accuracy": scored.rewards_PG.mean().item(),
        "val/share_with_working": scored.share_with_working(),
        "val/problems": len(problems),
        "perf/time_evaluate": scored.seconds,
    }


def _versions(sample: Completion) -> list[int]:
    """Return the version of the weights behind each token."""
    return [version for start, end, version in sample.weight_versions for _ in range(start, end)]


def _text(answer: Completion) -> str:
    if answer.text is None:
        raise ValueError("the worker has no tokenizer, so there is no text to score")
    return answer.text
