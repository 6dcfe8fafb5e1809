"""Define the contract of a step's forward call, and the call itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from samebit.kernels.binding.causal_lm import StepOutput
from samebit.kernels.layout.forward_context import ForwardContext, use_context
from samebit.rollout.memory.shape import Memory
from samebit.rollout.runner.sampler import DrawInputs
from samebit.rollout.runner.step_inputs import Ints, StepInputs


@dataclass(frozen=True, eq=False)
class StepLogits:
    """Holds ``[K, V]`` float32 logits of the rows that reach the head, valid until the next step, and beside them what
    the draws need."""

    logits: torch.Tensor
    draws: DrawInputs


class Forward(Protocol):
    """Computes a step's logits."""

    def __call__(self, model: nn.Module, inputs: StepInputs, drawn: torch.Tensor | None) -> StepLogits:
        """Call the model, which writes to the memory that the inputs name. ``drawn``: the tokens that
        ``inputs.sources`` are rows of, int64 on the model's device; None without them."""

    def warm_up(self, model: nn.Module, memory: Memory, block_tables: Ints) -> None:
        """Prepare for decodes of any number of sequences, by steps that write to the null block of the memory alone;
        ``block_tables``: of the shape that steps have."""

    def forget_memory(self) -> None:
        """Forget where pages and states were: they are elsewhere from now on."""


@torch.no_grad()
def logits_of(
    model: nn.Module, token_ids: torch.Tensor, head_rows: torch.Tensor | None, context: ForwardContext
) -> torch.Tensor:
    """Return float32 logits ``[K, V]`` of the rows ``head_rows`` ``[K]``, None for all; ``token_ids``: ``[T]``."""
    kept = 0 if head_rows is None else head_rows  # Hugging Face's number for all
    with use_context(context):
        out = model(input_ids=token_ids[None], logits_to_keep=kept)
        logits: torch.Tensor = out.rows if isinstance(out, StepOutput) else out.logits[0]
    return logits if logits.dtype is torch.float32 else logits.float()  # float32 but for exact=False
