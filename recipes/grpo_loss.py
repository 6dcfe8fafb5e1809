"""Define GRPO in three functions. P prompts, G samples a prompt, B rows, T tokens of the longest row."""

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


def truncated_loss(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages_B: Tensor, sampled: Tensor, total_tokens: int, most: float
) -> Tensor:
    """Return the policy-gradient loss of samples of another policy; arguments and mean are those of `grpo_loss`.

    A token weighs as much as it is more likely now than where it was sampled, at most `most`, and the weight has no
    gradient: truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", 2025; verl's `rollout_is`, TRL's `vllm_importance_sampling_correction`). With an exact rollout every
    weight is 1, and the loss and its gradient have the bits of `grpo_loss`.
    """
    log_ratio = torch.where(sampled, logprobs - rollout_logprobs, 0.0)
    weights = log_ratio.detach().exp().clamp(max=most)
    objective = weights * advantages_B[:, None] * torch.where(sampled, logprobs - logprobs.detach(), 0.0).exp()
    return -torch.where(sampled, objective, 0.0).sum() / total_tokens
