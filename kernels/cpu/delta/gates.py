"""Compute the gates of the delta rule on the CPU, an element at a time.

T tokens, H value heads, each with its channels that decay (1: the head decays as a whole).
"""

from typing import Any

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, kind_of, with_unit_stride
from samebit.kernels.cpu.base.numeric import exp, sigmoid, softplus, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out


def _gates(
    threads: int, a_at: int, a_stride: int, b_at: int, b_stride: int, a_log_at: int, bias_at: int, scale: Any,
    rows: int, heads: int, channels: int, decay_at: int, beta_at: int, kind: Any,
) -> None:  # fmt: skip
    share_out(
        _gates_row, rows, threads,
        (a_at, a_stride, b_at, b_stride, a_log_at, bias_at, scale, rows, heads, channels, decay_at, beta_at, kind),
    )  # fmt: skip


@kernel_part
def _gates_row(
    row: int, a_at: int, a_stride: int, b_at: int, b_stride: int, a_log_at: int, bias_at: int, scale: Any, rows: int,
    heads: int, channels: int, decay_at: int, beta_at: int, kind: Any,
) -> None:  # fmt: skip
    a, b = elements(a_at, NO_END, kind), elements(b_at, NO_END, kind)
    a_log, bias = floats(a_log_at, heads), floats(bias_at, heads * channels)
    wide = heads * channels
    decay, beta = floats(decay_at, rows * wide), floats(beta_at, rows * heads)
    place = np.int64(row)
    _gates_of(
        a[place * a_stride : place * a_stride + wide], b[place * b_stride : place * b_stride + heads], a_log, bias,
        scale, decay[place * wide : (place + 1) * wide], beta[place * heads : (place + 1) * heads],
    )  # fmt: skip


@inlined_part
def _gates_of(a: Any, b: Any, a_log: Any, bias: Any, scale: Any, decay: Any, beta: Any) -> None:
    heads = len(a_log)
    channels = len(a) // heads
    if channels == 1:
        for h in range(heads):
            decay[h] = -exp(a_log[h]) * softplus(widen(a[h]) + bias[h])
    else:
        for h in range(heads):
            rate = -exp(a_log[h])
            for i in range(h * channels, (h + 1) * channels):
                decay[i] = rate * softplus(widen(a[i]) + bias[i])
    for h in range(heads):
        beta[h] = sigmoid(widen(b[h])) * scale


_gates_rows = SharedKernel(_gates)


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Operations.gates`."""
    rows, heads = b.shape
    a, b, a_log, bias = with_unit_stride(a), with_unit_stride(b), a_log.contiguous(), bias.contiguous()
    decay, beta = torch.empty(a.shape), torch.empty(b.shape)
    _gates_rows(
        a.numel(), a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), a_log.data_ptr(), bias.data_ptr(),
        np.float32(scale), rows, heads, a.shape[1] // heads, decay.data_ptr(), beta.data_ptr(), kind_of(a.dtype),
    )  # fmt: skip
    return decay, beta
