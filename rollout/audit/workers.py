"""Configure the workers that are compared, on the device that holds the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.binding import binding_of
from samebit.rollout.config import RolloutConfig
from samebit.rollout.worker import RolloutWorker

POOL_GB = 1.0
"""Holds the prompts of a check many times over, for models of any size."""

GUESSING: dict[str, Any] = {"num_speculative_tokens": 3, "speculative_step_tokens": 256}
"""Lets all requests of a check be guessed of at once."""

LEAST_GUESSED = 3
"""New tokens of a request that there are at least where any is guessed: the first and the last one are not."""


def device_of(model: nn.Module) -> torch.device:
    """Return the device that holds the model."""
    return next(model.parameters()).device


def can_guess(model: nn.Module) -> bool:
    """Return whether tokens can be guessed ahead: not where a token changes what is kept of those before it."""
    states = binding_of(model).state_layout
    return states is None or not states.shape.changes_tail


def guesses_of(worker: RolloutWorker) -> str:
    """Return how many of a worker's guesses were right.

    Raises:
        ValueError: none was, so what was generated says nothing of them.
    """
    stats = worker.stats()
    right, made = int(stats["draft_tokens_accepted"]), int(stats["draft_tokens"])
    if not right:
        raise ValueError(f"none of {made} guesses was right: ask for more --tokens")
    return f"{right} of {made} right"


def compared_config(model: nn.Module, **fields: Any) -> RolloutConfig:
    """Return the configuration of a worker that is compared, for a bound model.

    On a GPU its pool is no share of the memory: two workers are compared side by side. It does not test itself there,
    unless asked to: the check compares more, and says what differs.
    """
    device = device_of(model).type
    images = device == "cpu" and binding_of(model).images is not None  # so that a folder of it loads as it is
    if device == "cuda" and "num_blocks" not in fields:
        fields["kv_cache_gb"] = POOL_GB
    return RolloutConfig(**{"device": device, "self_test": False, "images": images, **fields})
