"""Compute the gates of the delta rule on the CPU, an element at a time.

T tokens, H value heads, each with its channels that decay (1: the head decays as a whole).
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, kind_of, with_unit_stride
from samebit.kernels.cpu.base.numeric import exp, sigmoid, softplus, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out


class Tensors(NamedTuple):
    """Holds the addresses of what is read and written, and the strides of a and b."""

    a: int
    a_stride: int
    b: int
    b_stride: int
    a_log: int
    bias: int
    decay: int
    beta: int


def _gates(threads: int, tensors: Any, sizes: Any, scale: Any, kind: Any) -> None:
    """Compute the gates of all rows; ``tensors``: `Tensors` as a plain tuple; ``sizes``: T, H, channels of a head."""
    share_out(_gates_row, sizes[0], threads, (Tensors(*tensors), sizes, scale, kind))


@kernel_part
def _gates_row(row: int, tensors: Any, sizes: Any, scale: Any, kind: Any) -> None:
    rows, heads, channels = sizes
    a, b = elements(tensors.a, NO_END, kind), elements(tensors.b, NO_END, kind)
    a_log, bias = floats(tensors.a_log, heads), floats(tensors.bias, heads * channels)
    wide = heads * channels
    decay, beta = floats(tensors.decay, rows * wide), floats(tensors.beta, rows * heads)
    place = np.int64(row)
    _gates_of(
        a[place * tensors.a_stride : place * tensors.a_stride + wide],
        b[place * tensors.b_stride : place * tensors.b_stride + heads], a_log, bias,
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


gates_of_rows = SharedKernel(_gates)


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Operations.gates`."""
    (rows, wide), heads = a.shape, b.shape[1]
    (a, a_stride), (b, b_stride) = with_unit_stride(a), with_unit_stride(b)
    a_log, bias = a_log.contiguous(), bias.contiguous()
    # numbers: a shape takes twice as long
    decay = torch.empty(rows, wide, dtype=torch.float32, device="cpu")
    beta = torch.empty(rows, heads, dtype=torch.float32, device="cpu")
    tensors = (
        a.data_ptr(), a_stride, b.data_ptr(), b_stride, a_log.data_ptr(), bias.data_ptr(), decay.data_ptr(),
        beta.data_ptr(),
    )  # fmt: skip
    gates_of_rows(rows * wide, tensors, (rows, heads, wide // heads), np.float32(scale), kind_of(a.dtype))
    return decay, beta
