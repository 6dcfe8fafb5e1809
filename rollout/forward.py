"""A step's forward call of the bound model: on the host at once, on a device after one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from samebit.kernels import device
from samebit.kernels.context import ForwardContext, use_context
from samebit.rollout.config import RolloutConfig
from samebit.rollout.sampler import DrawInputs
from samebit.rollout.step_inputs import StepInputs


@dataclass(frozen=True, eq=False)
class StepLogits:
    """logits: ``[K, V]`` float32 of the rows that reach the head, valid until the next step. draws: beside them."""

    logits: torch.Tensor
    draws: DrawInputs


class Forward(Protocol):
    """Computes a step's logits."""

    def __call__(self, model: nn.Module, inputs: StepInputs, drawn: torch.Tensor | None) -> StepLogits:
        """Of this model, which writes to the memory that the inputs name. ``drawn``: the tokens that ``inputs.sources``
        are rows of, int64 on the model's device; None without them."""

    def forget_memory(self) -> None:
        """Pages and states are others from now on."""


def forward_for(weight: torch.Tensor, config: RolloutConfig) -> Forward:
    """For a model that has this weight."""
    if not device.on_gpu(weight):
        return HostForward()
    from samebit.rollout.device_forward import DeviceForward
    from samebit.rollout.step_graphs import StepGraphs

    graphs = StepGraphs(weight.device, config.max_num_batched_tokens, config.max_num_seqs)
    return DeviceForward(weight.device, None if config.enforce_eager else graphs)


class HostForward:
    """On the CPU."""

    def __call__(self, model: nn.Module, inputs: StepInputs, drawn: torch.Tensor | None) -> StepLogits:
        token_ids = torch.from_numpy(inputs.token_ids)
        if drawn is not None and inputs.sources is not None:
            token_ids = drawn[torch.from_numpy(inputs.sources)]
        logits = logits_of(model, token_ids, torch.from_numpy(inputs.head_rows), inputs.context)
        return StepLogits(logits, inputs.draws)

    def forget_memory(self) -> None:
        """Nothing is kept from step to step."""


@torch.no_grad()
def logits_of(
    model: nn.Module, token_ids: torch.Tensor, head_rows: torch.Tensor, context: ForwardContext
) -> torch.Tensor:
    """Float32 logits ``[K, V]`` of the rows ``head_rows`` ``[K]``; ``token_ids``: ``[T]``."""
    with use_context(context):
        logits: torch.Tensor = model(input_ids=token_ids[None], logits_to_keep=head_rows).logits[0]
    return logits.float()  # already float32 but for exact=False
