"""Teach the built-in model by supervised steps both ways to answer, and the habit of the worse one.

Working only, until it is learned; then three answers in four direct. The model that comes out can work a problem out
and mostly does not: there is something left for GRPO to find.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from samebit.kernels import token_logprobs
from samebit.recipes.chain_sum import working
from samebit.recipes.lessons import Lesson, Rows, rows
from samebit.recipes.problem import Problem
from samebit.recipes.settings import Settings

BATCH = 64
LEARNING_RATE = 2e-3
RAMP = 20
DIRECT_SHARE = 0.75


@dataclass(frozen=True)
class WarmupResult:
    """Holds the result of the warm-up."""

    steps: int
    loss: float


def problems_needed(settings: Settings) -> int:
    """Return the number of problems that the longest warm-up reads."""
    return (settings.warmup_cap + settings.warmup_mixed) * BATCH


class _Trainer:
    """Trains by AdamW over supervised batches, with a smoothed loss."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
        self.loss = float("inf")
        self.steps = 0

    def step(self, batch: Rows, rate: float) -> None:
        """Make one step at `rate` times the learning rate, ramped up over the first steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate * min(1.0, (self.steps + 1) / RAMP)
        loss = supervised_loss(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loss = loss.item() if self.steps == 0 else 0.9 * self.loss + 0.1 * loss.item()
        self.steps += 1


def supervised_loss(model: PreTrainedModel, batch: Rows) -> torch.Tensor:
    """Return the mean negative log-probability of the answers' tokens, from the kernels that GRPO trains with."""
    batch = batch.on(model.device)
    logprobs = token_logprobs(model, batch.input_ids, attention_mask=batch.attention_mask)
    return -logprobs[batch.taught].mean()


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    settings: Settings,
    seed: int,
    row_tokens: int = 0,
) -> WarmupResult:
    """Train `model` (bound) in place, on rows of one problem, or of as many as fit into `row_tokens`."""
    trainer = _Trainer(model)
    source = iter(problems)
    generator = random.Random(seed)

    def batch(direct_share: float) -> Rows:
        lessons = [_lesson(problem, generator.random() < direct_share) for problem in islice(source, BATCH)]
        return rows(lessons, tokenizer, row_tokens)

    with tqdm(total=settings.warmup_cap, desc=f"seed {seed} warm-up", unit="step", mininterval=1.0) as bar:
        while trainer.steps < settings.warmup_cap and trainer.loss >= settings.warmup_loss:
            trainer.step(batch(0.0), rate=1.0)
            bar.set_postfix(loss=f"{trainer.loss:.3f}", refresh=False)
            bar.update()
        bar.total = trainer.steps + settings.warmup_mixed
        for i in range(settings.warmup_mixed):
            trainer.step(batch(DIRECT_SHARE), rate=1.0 - 0.9 * i / settings.warmup_mixed)
            bar.set_postfix(loss=f"{trainer.loss:.3f}", refresh=False)
            bar.update()
    return WarmupResult(trainer.steps, trainer.loss)


def _lesson(problem: Problem, direct: bool) -> Lesson:
    return Lesson(problem.prompt, problem.answer if direct else working(problem.prompt) + problem.answer)
