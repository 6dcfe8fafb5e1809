"""Rotate the first ``2 * R`` elements of each head on the CPU, and copy the rest; or all, behind what is not rotated.

T tokens, H heads, D head size, R angles, W elements that are not rotated.
"""

from typing import Any

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import SharedKernel, array
from samebit.kernels.cpu.base.memory import NO_END, copy_elements, elements, kind_of
from samebit.kernels.cpu.base.numeric import fma, narrow, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out


@inlined_part
def rotate_head(x: Any, cos: Any, sin: Any, sign: Any, out: Any) -> None:
    """Rotate one head ``[D]`` of one row by its angles ``[R]``; ``sign`` -1 turns it back."""
    half = len(cos)
    low, high = x[:half], x[half : 2 * half]
    out_low, out_high = out[:half], out[half : 2 * half]
    for i in range(half):
        x1, x2, turn = widen(low[i]), widen(high[i]), sign * sin[i]
        out_low[i] = narrow(fma(x1, cos[i], -(x2 * turn)), out_low[i])
        out_high[i] = narrow(fma(x2, cos[i], x1 * turn), out_high[i])
    for i in range(2 * half, len(x)):
        out[i] = x[i]


def _rotate(
    threads: int, x: Any, row_width: int, heads: int, head_dim: int, cos: Any, sin: Any, sign: Any, out: Any,
) -> None:  # fmt: skip
    share_out(_rotate_row, cos.shape[0], threads, (x, row_width, heads, head_dim, cos, sin, sign, out))


@kernel_part
def _rotate_row(
    row: int, x: Any, row_width: int, heads: int, head_dim: int, cos: Any, sin: Any, sign: Any, out: Any,
) -> None:  # fmt: skip
    for head in range(heads):
        at = row * row_width + head * head_dim
        rotate_head(x[at : at + head_dim], cos[row], sin[row], sign, out[at : at + head_dim])


_rotate_rows = SharedKernel(_rotate)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """Implement `Operations.rotate`."""
    x = x.contiguous()
    _, heads, head_dim = x.shape
    out = torch.empty_like(x)
    _rotate_rows(
        x.numel(), array(x).reshape(-1), heads * head_dim, heads, head_dim, cos.numpy(), sin.numpy(),
        np.float32(sign), array(out).reshape(-1),
    )  # fmt: skip
    return out


@inlined_part
def rotate_to_halves(x: Any, at: int, neighbours: bool, cos: Any, sin: Any, out: Any, to: int) -> None:
    """Rotate ``2 R`` elements from ``at`` on by the angles ``[R]``, and write them as halves from ``to`` on.

    With ``neighbours``, elements 2 i and 2 i + 1 become i and i + R first.
    """
    half = len(cos)
    step, apart = (2, 1) if neighbours else (1, half)
    low, high = out[to : to + half], out[to + half : to + 2 * half]
    for i in range(half):
        x1, x2, turn = widen(x[at + step * i]), widen(x[at + step * i + apart]), sin[i]
        low[i] = narrow(fma(x1, cos[i], -(x2 * turn)), low[i])
        high[i] = narrow(fma(x2, cos[i], x1 * turn), high[i])


def _join(
    threads: int, x: Any, y: int, row_step: int, head_step: int, neighbours: bool, cos: Any, sin: Any, out: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Write ``[T, H, W + 2 R]``: a head of ``x`` ``[T, H, W]``, and behind it that of ``y``, rotated.

    ``y`` is an address; its rows and heads are these steps apart. With ``neighbours``, its elements 2 i and 2 i + 1
    become i and i + R first.
    """
    share_out(_join_row, len(x), threads, (x, y, row_step, head_step, neighbours, cos, sin, out, kind))


@kernel_part
def _join_row(
    row: int, x: Any, y: int, row_step: int, head_step: int, neighbours: bool, cos: Any, sin: Any, out: Any, kind: Any,
) -> None:  # fmt: skip
    heads, width, half = x.shape[1], x.shape[2], cos.shape[1]
    given, source, target = elements(y, NO_END, kind), x.reshape(-1), out.reshape(-1)
    for head in range(heads):
        at, to = row * row_step + head * head_step, (row * heads + head) * (width + 2 * half)
        copy_elements(source, (row * heads + head) * width, width, target, to)
        rotate_to_halves(given, at, neighbours, cos[row], sin[row], target, to + width)


_join_rows = SharedKernel(_join)


def join_rotated(
    x: torch.Tensor, y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neighbours: bool
) -> torch.Tensor:
    """Implement `Operations.join_rotated`."""
    x, y = x.contiguous(), y if y.stride(2) == 1 else y.contiguous()
    rows, heads, width = x.shape
    out = torch.empty(rows, heads, width + y.shape[2], dtype=x.dtype, device="cpu")
    _join_rows(
        y.numel(), array(x), y.data_ptr(), y.stride(0), y.stride(1), neighbours, cos.numpy(), sin.numpy(), array(out),
        kind_of(x.dtype),
    )  # fmt: skip
    return out
