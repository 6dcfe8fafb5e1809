"""Configure the workers that are compared, on the device that holds the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samebit.rollout.config import RolloutConfig

POOL_GB = 1.0
"""Holds the prompts of a check many times over, for models of any size."""


def device_of(model: nn.Module) -> torch.device:
    """Return the device that holds the model."""
    return next(model.parameters()).device


def compared_config(model: nn.Module, **fields: Any) -> RolloutConfig:
    """Return the configuration of a worker that is compared.

    On a GPU its pool is no share of the memory: two workers are compared side by side. It does not test itself there,
    unless asked to: the check compares more, and says what differs.
    """
    device = device_of(model).type
    if device == "cuda" and "num_blocks" not in fields:
        fields["kv_cache_gb"] = POOL_GB
    return RolloutConfig(**{"device": device, "self_test": False, **fields})
