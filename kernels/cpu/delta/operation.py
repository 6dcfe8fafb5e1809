"""Compute the gated delta rule on the CPU as operations call it: give the kernels of this folder addresses of tensors.

T tokens, H heads.
"""

import torch

from samebit.kernels.cpu.base.memory import kind_of, with_unit_stride
from samebit.kernels.cpu.delta import rule
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.options import DeltaOptions
from samebit.kernels.layout.states.delta import DeltaStates

WORK_AN_ELEMENT = 1 / 8
"""The elements of a row-wise kernel that take the time of one element of the state."""


def delta_rule(
    qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, context: ForwardContext, options: DeltaOptions
) -> torch.Tensor:
    """Implement `Operations.delta_rule`."""
    rows = qkv.shape[0]
    inner = options.inner
    (qkv, stride), decay, beta = with_unit_stride(qkv), decay.contiguous(), beta.contiguous()
    out = (qkv.new_empty if context.covers_all_rows else qkv.new_zeros)(rows, inner)
    grid, memory, captures, kept = 0, 0, context.captured_at, 0
    if context.states is not None:
        grid, memory = context.block_size, context.states.layer(options.layer, DeltaStates).addresses.data_ptr()
        if captures[1]:
            kept = context.states.checkpoints[options.layer].state.data_ptr()
    rule.rule(
        int(rows * inner * options.key_dim * WORK_AN_ELEMENT),
        (qkv.data_ptr(), stride, decay.data_ptr(), beta.data_ptr(), out.data_ptr()),
        options.numbers, context.layout_at, (grid, memory), (*captures, kept), kind_of(qkv.dtype),
    )  # fmt: skip
    return out
