"""Compute the Mamba2 chunked scan over ragged sequences, with autograd (SSD: Dao & Gu 2024).

Contract: chunks are anchored at position 0 of each sequence, and a row is the chunked-scan formula on its chunk's tail
up to itself, in prefill, mixed batches, decode and training alike (see `samebit.kernels.cpu.ssd.scan`). A decode step
costs one row: it reads the state as of the chunk boundary, which is written once a chunk. The chunk of the arithmetic
is a constant; `ssm_chunk` is the grid on which states are kept, and changes no bit.
"""

from typing import Any

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import LANES, ceil_div
from samebit.kernels.layout.options import SSMOptions
from samebit.kernels.layout.shape_checks import check_host, check_shape
from samebit.kernels.layout.states.mamba import SSMStates
from samebit.kernels.ops.dispatch import operations_for
from samebit.kernels.ops.errors import changed_dtype


def scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    context: ForwardContext,
    options: SSMOptions,
) -> torch.Tensor:
    """Run every sequence of the call through its state.

    Args:
        xbc: ``[T, H P + 2 G N]`` float32 or bfloat16, contiguous: x, B and C of the scan's G groups, after the
            convolution.
        dt: ``[T, H]`` time steps before bias and softplus, same dtype, rows may be strided.
        decay_rate: ``[H]`` float32, ``-exp(A_log)``.
        dt_bias: ``[H]`` float32.
        skip: ``[H]`` float32, D.
        context: the layout of the T rows. With states (rollout) no gradient flows and the slots move on.
        options: the layer's.

    Returns:
        ``[T, H P]`` in the dtype of ``xbc``; zero for padding rows.

    Raises:
        ValueError: rows that are not the context's, sizes that do not match each other, the options or the states,
            captures between the grid's lines.
        TypeError: inputs of other dtypes, or states of another than xbc.
    """
    _check(xbc, dt, decay_rate, dt_bias, skip, options)
    if not xbc.shape[0] == dt.shape[0] == context.num_rows:
        raise ValueError(f"xbc and dt have {xbc.shape[0]} and {dt.shape[0]} rows, the context {context.num_rows}")
    if not (xbc.dtype is dt.dtype and decay_rate.dtype is dt_bias.dtype is skip.dtype is torch.float32):
        given = [str(part.dtype) for part in (xbc, dt, decay_rate, dt_bias, skip)]
        raise TypeError(f"xbc, dt, decay_rate, dt_bias, skip are {given}; allowed: two alike, then three float32")
    if context.states is not None:
        _check_memory(xbc, len(decay_rate), context.states.layer(options.layer, SSMStates), context, options)
    elif torch.is_grad_enabled():
        out: torch.Tensor = _Scan.apply(xbc, dt, decay_rate, dt_bias, skip, context, options)
        return out
    return operations_for(xbc).scan_forward(xbc, dt, decay_rate, dt_bias, skip, context, options)[0]


def _check(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    options: SSMOptions,
) -> None:
    if xbc.dim() != 2 or dt.dim() != 2:
        raise ValueError(f"xbc is {list(xbc.shape)} and dt {list(dt.shape)}; allowed: [T, H P + 2 G N] and [T, H]")
    heads, shared = dt.shape[1], 2 * options.groups * options.state_size
    inner = xbc.shape[1] - shared
    if heads < 1 or options.groups < 1 or heads % options.groups or inner < heads or inner % heads:
        raise ValueError(
            f"xbc is {xbc.shape[1]} wide, of which {shared} are B and C of {options.groups} groups, and dt {heads}; "
            "allowed: heads that the groups divide evenly, and as many elements of x for each"
        )
    for name, part in (("decay_rate", decay_rate), ("dt_bias", dt_bias), ("skip", skip)):
        check_shape(name, part, heads)
        if not device.on_gpu(xbc):
            check_host(name, part)
    if not device.on_gpu(xbc):
        check_host("dt", dt)


def _check_memory(
    xbc: torch.Tensor, heads: int, memory: SSMStates, context: ForwardContext, options: SSMOptions
) -> None:
    if memory.dtype is not xbc.dtype:
        raise changed_dtype(f"x is {xbc.dtype}", "states", memory.dtype)
    if not device.on_gpu(xbc):
        slots, size = len(memory.state), options.state_size
        head_dim = (xbc.shape[1] - 2 * options.groups * size) // heads
        check_shape("the layer's state", memory.state, slots, heads, size, ceil_div(head_dim, LANES) * LANES)
        if context.last_slot >= slots:
            raise ValueError(f"slot {context.last_slot} is to be read; the layer has {slots} of them")
    if len(context.captures) and bool((context.captures[:, 1] % options.chunk).any()):
        raise ValueError(f"captures {context.captures.tolist()} must lie on chunk boundaries (chunk {options.chunk})")


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        decay_rate: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor,
        context: ForwardContext,
        options: SSMOptions,
    ) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(xbc)
        out, saved = kernels.scan_forward(xbc, dt, decay_rate, dt_bias, skip, context, options)
        ctx.save_for_backward(*saved)
        ctx.layout, ctx.options = context, options
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.kernels.scan_backward(ctx.saved_tensors, grad, ctx.layout, ctx.options), None, None
