"""The Mamba2 chunked scan over ragged sequences, with autograd (SSD: Dao & Gu 2024).

Contract: chunks are anchored at position 0 of each sequence, and a row is the chunked-scan formula on its chunk's tail
up to itself, in prefill, mixed batches, decode and training alike (see `samebit.kernels.cpu.ssd`). A decode step
costs one row: it reads the state as of the chunk boundary, which is written once a chunk. The chunk of the arithmetic
is a constant; `ssm_chunk` is the grid on which states are kept, and changes no bit.
"""

from typing import Any

import numpy as np
import torch
from numba import get_num_threads
from torch.autograd.function import once_differentiable

from .context import ForwardContext
from .cpu import ssd as cpu
from .cpu.jit import array, parameter_array, strided_rows
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
        TypeError: states of another dtype.
    """
    if not xbc.shape[0] == dt.shape[0] == len(context.positions):
        raise ValueError(f"xbc and dt have {xbc.shape[0]} and {dt.shape[0]} rows, the context {len(context.positions)}")
    if context.states is None and torch.is_grad_enabled():
        out: torch.Tensor = _Scan.apply(xbc, dt, decay_rate, dt_bias, skip, context, options)
        return out
    return _scan(xbc, dt, decay_rate, dt_bias, skip, context, options)


_NO_FLOATS = np.empty(0, np.float32)
_NO_DOUBLES = np.empty(0, np.float64)


def _scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    context: ForwardContext,
    options: SSMOptions,
) -> torch.Tensor:
    rates = parameter_array(decay_rate)
    rows, width = xbc.shape
    inner = width - 2 * options.groups * options.state_size
    empty = torch.empty if context.covers_all_rows else torch.zeros
    out = empty(rows, inner, dtype=xbc.dtype)
    if len(context.captures) and bool((context.captures[:, 1] % options.chunk).any()):
        raise ValueError(f"captures {context.captures.tolist()} must lie on chunk boundaries (chunk {options.chunk})")
    if context.states is not None:
        layer = context.states.layers[options.layer]
        if layer.tail_x.dtype != xbc.dtype:
            raise TypeError(
                f"x is {xbc.dtype}, but the states are {layer.tail_x.dtype}: "
                "the model changed its dtype after the rollout worker was built"
            )
        memory, captured = layer.scan_arrays, context.states.checkpoints[options.layer].scan_array
    else:
        none = array(xbc.new_empty(0))
        memory, captured = (_NO_FLOATS, _NO_FLOATS, none, _NO_FLOATS, _NO_FLOATS, _NO_DOUBLES), _NO_FLOATS
    low, high = options.dt_limits
    keeps = context.states is not None
    cpu.scan(
        array(xbc.contiguous()), *strided_rows(dt), rates, parameter_array(dt_bias),
        parameter_array(skip), float(low), float(high), context.row_start, context.lengths,
        context.starts, context.table_rows, inner // len(rates), options.groups, options.state_size, keeps,
        context.block_size if keeps else 0, *memory, context.captures, captured, array(out), get_num_threads(),
    )  # fmt: skip
    return out


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
