"""Define GRPO in two functions. P prompts, G samples a prompt, B rows, T tokens of the longest row."""

import torch
from torch import Tensor


def group_advantages(rewards_PG: Tensor) -> Tensor:
    """Return how much better each sample is than its group, in standard deviations; exactly 0 in a group of equals."""
    centred = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return centred / (rewards_PG.std(dim=1, keepdim=True) + 1e-4)


def grpo_loss(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages_B: Tensor, sampled: Tensor, total_tokens: int, clip: float
) -> Tensor:
    """Return the clipped policy-gradient loss, a mean over `total_tokens` sampled tokens (of all micro-batches).

    `logprobs`, `rollout_logprobs` and the mask `sampled` are [B, T-1]. With an exact rollout and one optimizer step
    a batch the ratio is exactly 1: no importance correction is left to make, and nothing is clipped.
    """
    ratio = torch.where(sampled, logprobs - rollout_logprobs, 0.0).exp()
    advantages = advantages_B[:, None]
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -torch.where(sampled, objective, 0.0).sum() / total_tokens
