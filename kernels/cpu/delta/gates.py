"""Compute the gates of the delta rule on the CPU, an element at a time.

T tokens, H value heads.
"""

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from samebit.kernels.cpu.base.jit import RowKernel
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, kind_of, with_unit_stride
from samebit.kernels.cpu.base.numeric import exp, sigmoid, softplus, widen


def _gates(
    a_at: int, a_stride: int, b_at: int, b_stride: int, a_log_at: int, bias_at: int, scale: Any, rows: int, heads: int,
    decay_at: int, beta_at: int, kind: Any,
) -> None:  # fmt: skip
    a, b = elements(a_at, NO_END, kind), elements(b_at, NO_END, kind)
    a_log, bias = floats(a_log_at, heads), floats(bias_at, heads)
    decay, beta = floats(decay_at, rows * heads), floats(beta_at, rows * heads)
    for row in prange(rows):
        place = np.int64(row)
        _gates_row(
            a[place * a_stride : place * a_stride + heads], b[place * b_stride : place * b_stride + heads], a_log, bias,
            scale, decay[place * heads : (place + 1) * heads], beta[place * heads : (place + 1) * heads],
        )  # fmt: skip


@njit(inline="always")
def _gates_row(a: Any, b: Any, a_log: Any, bias: Any, scale: Any, decay: Any, beta: Any) -> None:
    for h in range(len(a_log)):
        decay[h] = -exp(a_log[h]) * softplus(widen(a[h]) + bias[h])
        beta[h] = sigmoid(widen(b[h])) * scale


_gates_rows = RowKernel(_gates)


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Operations.gates`."""
    rows, heads = a.shape
    a, b, a_log, bias = with_unit_stride(a), with_unit_stride(b), a_log.contiguous(), bias.contiguous()
    decay, beta = torch.empty(rows, heads), torch.empty(rows, heads)
    _gates_rows(
        a.numel(), a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), a_log.data_ptr(), bias.data_ptr(),
        np.float32(scale), rows, heads, decay.data_ptr(), beta.data_ptr(), kind_of(a.dtype),
    )  # fmt: skip
    return decay, beta
