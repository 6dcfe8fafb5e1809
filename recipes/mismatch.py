"""Check the recipe's claim at every step: the trainer's log-probabilities have the rollout's bits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.recipes.trajectory import Batch

Check = Callable[[int, Mapping[str, float]], None]
"""Raises where the metrics of a step are not what they have to be."""


class MismatchError(RuntimeError):
    """The rollout's log-probabilities are not the trainer's."""


@dataclass
class Mismatch:
    """Compares the sampled tokens of a step as they come; a token differs when any bit does, or when it is NaN."""

    tokens: int = 0
    differing: int = 0
    logprobs_diff_max: float = 0.0
    probs_diff_max: float = 0.0
    logprobs_diff_sum: float = 0.0
    logprobs_sum: float = 0.0

    def add(self, batch: Batch, trainer_logprobs: Tensor, version: int) -> None:
        """Compare the tokens of one batch that were sampled under this version of the weights.

        `trainer_logprobs`, [B, T-1], were computed under the same version.
        """
        compared = batch.sampled & (batch.versions == version)
        rollout = batch.rollout_logprobs[compared]
        trainer = trainer_logprobs.detach()[compared]
        self.tokens += rollout.numel()
        self.differing += int(
            (rollout.view(torch.int32) != trainer.view(torch.int32)).logical_or(rollout.isnan()).sum()
        )
        self.logprobs_diff_max = max(self.logprobs_diff_max, float((rollout - trainer).abs().max()))
        self.logprobs_diff_sum += float((rollout - trainer).abs().sum())
        self.logprobs_sum += float(trainer.sum())
        self.probs_diff_max = max(self.probs_diff_max, float((rollout.exp() - trainer.exp()).abs().max()))

    def metrics(self) -> dict[str, float]:
        """Return the metrics under the names that RL trainers use; the entropy is that of the samples, in nats."""
        return {
            "training/rollout_probs_diff_max": self.probs_diff_max,
            "training/rollout_logprobs_diff_max": self.logprobs_diff_max,
            "training/rollout_logprobs_diff_mean": self.logprobs_diff_sum / max(1, self.tokens),
            "actor/entropy_of_samples": -self.logprobs_sum / max(1, self.tokens),
            "training/tokens_compared": self.tokens,
            "training/tokens_differing": self.differing,
        }


def require_none(step: int, metrics: Mapping[str, float]) -> None:
    """Raise if a single token of the step differed."""
    if metrics["training/tokens_differing"]:
        raise MismatchError(
            f"step {step}: {metrics['training/tokens_differing']} of {metrics['training/tokens_compared']} sampled "
            f"tokens have another log-probability in the trainer than in the rollout (largest difference "
            f"{metrics['training/rollout_logprobs_diff_max']:.3g}). No weight was updated in this step. "
            f"`samebit check` on the model's folder shows which case differs."
        )
