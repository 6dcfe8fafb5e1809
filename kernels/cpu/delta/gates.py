"""Compute the gates of the delta rule on the CPU, an element at a time.

T tokens, H value heads.
"""

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch.nn import functional as F

from samebit.kernels.cpu.base.jit import RowKernel
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, kind_of, with_unit_stride
from samebit.kernels.cpu.base.numeric import sigmoid, softplus, widen
from samebit.kernels.layout.options import Saved


def _gates(
    a_at: int, a_stride: int, b_at: int, b_stride: int, rate_at: int, bias_at: int, scale: Any, rows: int, heads: int,
    decay_at: int, beta_at: int, kind: Any,
) -> None:  # fmt: skip
    a, b = elements(a_at, NO_END, kind), elements(b_at, NO_END, kind)
    rate, bias = floats(rate_at, heads), floats(bias_at, heads)
    decay, beta = floats(decay_at, rows * heads), floats(beta_at, rows * heads)
    for row in prange(rows):
        place = np.int64(row)
        _gates_row(
            a[place * a_stride : place * a_stride + heads], b[place * b_stride : place * b_stride + heads], rate, bias,
            scale, decay[place * heads : (place + 1) * heads], beta[place * heads : (place + 1) * heads],
        )  # fmt: skip


@njit(inline="always")
def _gates_row(a: Any, b: Any, rate: Any, bias: Any, scale: Any, decay: Any, beta: Any) -> None:
    for h in range(len(rate)):
        decay[h] = rate[h] * softplus(widen(a[h]) + bias[h])
        beta[h] = sigmoid(widen(b[h])) * scale


_gates_rows = RowKernel(_gates)


def gates_forward(
    a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, Saved]:
    """Implement `Operations.gates_forward`."""
    saved = a, b, rate, bias
    rows, heads = a.shape
    a, b, rate, bias = with_unit_stride(a), with_unit_stride(b), rate.contiguous(), bias.contiguous()
    decay, beta = torch.empty(rows, heads), torch.empty(rows, heads)
    _gates_rows(
        a.numel(), a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), rate.data_ptr(), bias.data_ptr(),
        np.float32(scale), rows, heads, decay.data_ptr(), beta.data_ptr(), kind_of(a.dtype),
    )  # fmt: skip
    return decay, beta, saved


def gates_backward(
    saved: Saved, grad_decay: torch.Tensor, grad_beta: torch.Tensor, scale: float
) -> tuple[torch.Tensor, ...]:
    """Implement `Operations.gates_backward`."""
    a, b, rate, bias = saved
    raw = a.float() + bias
    grad_raw = grad_decay * rate * torch.sigmoid(raw)
    share = torch.sigmoid(b.float())
    grad_b = grad_beta * share * (1 - share) * scale
    return grad_raw.to(a.dtype), grad_b.to(b.dtype), (grad_decay * F.softplus(raw)).sum(0), grad_raw.sum(0)
