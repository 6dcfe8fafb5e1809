"""Compute the chunked scan on the CPU as operations call it: give the kernels of this folder addresses of tensors.

T tokens, H heads of size P in groups, N state size.
"""

import torch

from samebit.kernels.cpu.base.memory import kind_of, with_unit_stride
from samebit.kernels.cpu.ssd import scan
from samebit.kernels.cpu.ssd.backward import scan_gradients
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.options import Saved, SSMOptions
from samebit.kernels.layout.states.mamba import SSMStates

WORK_AN_ELEMENT = 1 / 8
"""The elements of a row-wise kernel that take the time of one element of the state."""


def scan_forward(
    xbc: torch.Tensor, dt: torch.Tensor, decay_rate: torch.Tensor, dt_bias: torch.Tensor, skip: torch.Tensor,
    context: ForwardContext, options: SSMOptions,
) -> tuple[torch.Tensor, Saved]:  # fmt: skip
    """Implement `Operations.scan_forward`."""
    saved = xbc, dt, decay_rate, dt_bias, skip
    rows, width = xbc.shape
    heads, size = decay_rate.shape[0], options.state_size
    inner = width - 2 * options.groups * size
    decay_rate, dt_bias, skip = decay_rate.contiguous(), dt_bias.contiguous(), skip.contiguous()
    (xbc, stride), (dt, dt_stride) = with_unit_stride(xbc), with_unit_stride(dt)
    out = (xbc.new_empty if context.covers_all_rows else xbc.new_zeros)(rows, inner)
    grid, memory, captures, kept = 0, 0, context.captured_at, 0
    if context.states is not None:
        grid, memory = context.block_size, context.states.layer(options.layer, SSMStates).addresses.data_ptr()
        if captures[1]:
            kept = context.states.checkpoints[options.layer].state.data_ptr()
    addresses = xbc.data_ptr(), stride, dt.data_ptr(), dt_stride, decay_rate.data_ptr(), dt_bias.data_ptr()
    scan.scan(
        int(rows * inner * size * WORK_AN_ELEMENT), (*addresses, skip.data_ptr(), out.data_ptr()), *options.dt_limits,
        (heads, inner // heads, options.groups, size), context.layout_at,
        (grid, memory), (*captures, kept), kind_of(xbc.dtype),
    )  # fmt: skip
    return out, saved


def scan_backward(
    saved: Saved, grad: torch.Tensor, context: ForwardContext, options: SSMOptions
) -> tuple[torch.Tensor, ...]:
    """Implement `Operations.scan_backward`."""
    xbc, dt, decay_rate, dt_bias, skip = saved
    return scan_gradients(xbc, dt, decay_rate, dt_bias, skip, grad, context, options)
