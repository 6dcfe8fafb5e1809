"""The forward that verl's fused path calls: log-probabilities and entropy instead of logits.

Invariant: the logits are those of the bound model's own forward, and `samebit.kernels.logprobs` has the only formula
for the log-probability; so it is bit for bit what the rollout worker reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.utils.generic import ModelOutput

from samebit.kernels.logprobs import entropy_from_logits, logprobs_from_logits

Model = TypeVar("Model", bound=nn.Module)


@dataclass
class ScoredOutput(ModelOutput):
    """What verl reads of a fused forward: ``[B, T]`` float32. (A `ModelOutput`, so that FSDP2 finds its tensors.)"""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


def give_scores(module: Model) -> Model:
    """Make a bound model take ``temperature`` and ``shift_labels`` and return a `ScoredOutput`; returns the model."""
    logits_forward = module.forward

    def forward(
        self: nn.Module,
        *,
        input_ids: torch.Tensor,
        temperature: float | None = None,
        shift_labels: torch.Tensor | None = None,
        with_entropy: bool = False,
        **inputs: Any,
    ) -> ScoredOutput:
        """``input_ids``: ``[B, T]``; ``shift_labels``: the same, each position's next token, else found by rolling.

        The last position of a sequence has no next token: its value means nothing, and verl drops it.
        """
        if temperature is None:
            raise ValueError(
                "samebit gives log-probabilities, not logits: set actor_rollout_ref.model.use_fused_kernels"
            )
        labels = input_ids.roll(-1, dims=1) if shift_labels is None else shift_labels
        logits = logits_forward(input_ids=input_ids, **inputs).logits
        # Copies, since FSDP2 wants its hooks on tensors that are no views.
        return ScoredOutput(
            log_probs=logprobs_from_logits(logits, labels, temperature).clone(),
            entropy=entropy_from_logits(logits, temperature).clone() if with_entropy else None,
        )

    module.__dict__["forward"] = MethodType(forward, module)
    return module
