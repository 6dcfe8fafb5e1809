"""Measure how far the trainer's policy has moved from the one that sampled: not at all when it is on policy."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.recipes.metrics import Row
from samebit.recipes.trajectory import Batch


@dataclass
class Importance:
    """Keeps running figures over the sampled tokens that are learned from."""

    tokens: int = 0
    ratio_sum: float = 0.0
    ratio_max: float = 0.0
    clipped: int = 0
    kl_sum: float = 0.0

    def add(self, batch: Batch, logprobs: Tensor, clip: float = math.inf, most: float = math.inf) -> None:
        """Add a batch; `logprobs` are the trainer's now, [B, T-1].

        clip: of `grpo_loss`; most: of `truncated_loss`. What the loss does not cut by is infinite.
        """
        log_ratio = (logprobs.detach() - batch.rollout_logprobs)[batch.sampled]
        ratio = log_ratio.exp()
        advantages = batch.advantages[:, None].expand_as(batch.sampled)[batch.sampled]
        self.tokens += ratio.numel()
        self.ratio_sum += ratio.sum().item()
        self.ratio_max = max(self.ratio_max, ratio.max().item())
        clipped = torch.where(advantages > 0, ratio > 1 + clip, ratio < 1 - clip) | (ratio > most)
        self.clipped += int(clipped.sum())
        self.kl_sum += (ratio - 1 - log_ratio).sum().item()

    def metrics(self) -> Row:
        """Return the metrics under the names that RL trainers use; none if no sample had an advantage."""
        if not self.tokens:
            return {}
        return {
            "actor/ratio_mean": self.ratio_sum / self.tokens,
            "actor/ratio_max": self.ratio_max,
            "actor/pg_clipfrac": self.clipped / self.tokens,
            "actor/ppo_kl": self.kl_sum / self.tokens,
        }
