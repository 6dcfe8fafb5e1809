"""The Mamba2 chunked scan over ragged sequences, with autograd (SSD: Dao & Gu 2024).

Contract: chunks are anchored at position 0 of each sequence, and a row is the chunked-scan formula on its chunk's tail
up to itself, in prefill, mixed batches, decode and training alike (see `samebit.kernels.cpu.ssd`). A decode step
costs one row: it reads the state as of the chunk boundary, which is written once a chunk. The chunk of the arithmetic
is a constant; `ssm_chunk` is the grid on which states are kept, and changes no bit.
"""

from typing import Any

import torch
from numba import get_num_threads
from torch.autograd.function import once_differentiable

from . import device
from .context import ForwardContext
from .cpu import ssd as cpu
from .cpu.memory import kind_of, with_unit_stride
from .ssd_backward import scan_gradients
from .states import SSMOptions


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
        xbc: ``[T, H P + 2 G N]`` float32 or bfloat16, contiguous: x, B and C after the convolution.
        dt: ``[T, H]`` time steps before bias and softplus, same dtype, rows may be strided.
        decay_rate: ``[H]`` float32, ``-exp(A_log)``.
        dt_bias: ``[H]`` float32.
        skip: ``[H]`` float32, D.
        context: the layout of the T rows. With states (rollout) no gradient flows and the slots move on.
        options: the layer's.

    Returns:
        ``[T, H P]`` in the dtype of ``xbc``; zero for padding rows.

    Raises:
        ValueError: rows that are not the context's.
        TypeError: inputs of other dtypes, or states of another than xbc.
    """
    if not xbc.shape[0] == dt.shape[0] == context.num_rows:
        raise ValueError(f"xbc and dt have {xbc.shape[0]} and {dt.shape[0]} rows, the context {context.num_rows}")
    if not (xbc.dtype is dt.dtype and decay_rate.dtype is dt_bias.dtype is skip.dtype is torch.float32):
        given = [str(part.dtype) for part in (xbc, dt, decay_rate, dt_bias, skip)]
        raise TypeError(f"xbc, dt, decay_rate, dt_bias, skip are {given}; allowed: two alike, then three float32")
    if device.on_gpu(xbc):
        from .triton import ssd as gpu

        return gpu.scan(xbc, dt, decay_rate, dt_bias, skip, context, options)
    if context.states is None and torch.is_grad_enabled():
        out: torch.Tensor = _Scan.apply(xbc, dt, decay_rate, dt_bias, skip, context, options)
        return out
    return _scan(xbc, dt, decay_rate, dt_bias, skip, context, options)


WORK_AN_ELEMENT = 1 / 8
"""Elements of a row-wise kernel that take the time of one element of the state."""


def _scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    context: ForwardContext,
    options: SSMOptions,
) -> torch.Tensor:
    rows, width = xbc.shape
    heads, size = decay_rate.shape[0], options.state_size
    inner = width - 2 * options.groups * size
    decay_rate, dt_bias, skip = decay_rate.contiguous(), dt_bias.contiguous(), skip.contiguous()
    xbc, dt = with_unit_stride(xbc), with_unit_stride(dt)
    out = (torch.empty if context.covers_all_rows else torch.zeros)(rows, inner, dtype=xbc.dtype)
    grid, memory, captured, captures, kept = 0, 0, 0, 0, 0
    if context.states is not None:
        layer = context.states.layers[options.layer]
        if layer.dtype is not xbc.dtype:
            raise TypeError(
                f"x is {xbc.dtype}, but the states are {layer.dtype}: "
                "the model changed its dtype after the rollout worker was built"
            )
        grid, memory = context.block_size, layer.addresses.data_ptr()
        captures = len(context.captures)
        if captures:
            _check_captures(context, options)
            captured = context.captured.data_ptr()
            kept = context.states.checkpoints[options.layer].state.data_ptr()
    cpu.scan(
        int(rows * inner * size * WORK_AN_ELEMENT), xbc.data_ptr(), xbc.stride(0), dt.data_ptr(), dt.stride(0),
        decay_rate.data_ptr(), dt_bias.data_ptr(), skip.data_ptr(), *options.dt_limits, context.layout.data_ptr(),
        len(context.lengths), heads, inner // heads, options.groups, size, grid, memory, captured, captures, kept,
        out.data_ptr(), get_num_threads(), kind_of(xbc.dtype),
    )  # fmt: skip
    return out


def _check_captures(context: ForwardContext, options: SSMOptions) -> None:
    if bool((context.captures[:, 1] % options.chunk).any()):
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
        ctx.save_for_backward(xbc, dt, decay_rate, dt_bias, skip)
        ctx.layout, ctx.options = context, options
        return _scan(xbc, dt, decay_rate, dt_bias, skip, context, options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        xbc, dt, decay_rate, dt_bias, skip = ctx.saved_tensors
        found = scan_gradients(xbc, dt, decay_rate, dt_bias, skip, grad, ctx.layout, ctx.options)
        return (*found, None, None)
