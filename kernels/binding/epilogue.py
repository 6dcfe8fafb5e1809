"""Change the logits of a head as the causal language models of the families do.

Invariant: a logit changes by itself, whatever is beside it; so logits may be computed in parts. Each is the formula of
its Hugging Face class, operation by operation.
"""

from collections.abc import Callable
from typing import Any

import torch

Epilogue = Callable[[Any, torch.Tensor], torch.Tensor]
"""(config of the model, float32 logits of its head) -> the model's logits."""


def unchanged(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """The head's logits are the model's."""
    return logits


def soft_capped(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """Gemma, where the config has a ``final_logit_softcapping``."""
    cap = config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


def scaled_down(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """Granite's ``logits_scaling``."""
    scaling: float = config.logits_scaling
    return logits / scaling


def scaled_up(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """Falcon-H1's ``lm_head_multiplier``."""
    multiplier: float = config.lm_head_multiplier
    return logits * multiplier
