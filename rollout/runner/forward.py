"""Choose a step's forward call for the device of the model; on the host, make it."""

from __future__ import annotations

import torch
from torch import nn

from samebit.kernels.layout import device
from samebit.rollout.config import RolloutConfig
from samebit.rollout.memory.shape import Memory
from samebit.rollout.runner.logits import Forward, StepLogits, logits_of
from samebit.rollout.runner.step_inputs import Ints, StepInputs


def forward_for(weight: torch.Tensor, config: RolloutConfig) -> Forward:
    """Return the forward call of a model that has this weight."""
    if not device.on_gpu(weight):
        return HostForward()
    from samebit.rollout.runner.cuda_forward import DeviceForward
    from samebit.rollout.runner.cuda_graphs import StepGraphs

    sizes = config.max_num_batched_tokens, config.max_num_seqs, config.most_drawn_rows
    graphs = StepGraphs(weight.device, *sizes)
    return DeviceForward(weight.device, None if config.enforce_eager else graphs)


class HostForward:
    """Calls the model on the CPU."""

    def __call__(self, model: nn.Module, inputs: StepInputs, drawn: torch.Tensor | None) -> StepLogits:
        token_ids = torch.from_numpy(inputs.token_ids)
        if drawn is not None and inputs.sources is not None:
            token_ids = drawn[torch.from_numpy(inputs.sources)]
        head_rows = None if inputs.all_rows_sample else torch.from_numpy(inputs.head_rows)
        logits = logits_of(model, token_ids, head_rows, inputs.context)
        return StepLogits(logits, inputs.draws)

    def warm_up(self, model: nn.Module, memory: Memory, block_tables: Ints) -> None:
        """Do nothing: there is nothing to record."""

    def forget_memory(self) -> None:
        """Do nothing: no step leaves anything to the next."""
