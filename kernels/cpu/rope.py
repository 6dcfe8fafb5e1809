"""Rotate the first ``2 * R`` elements of each head on the CPU, and copy the rest.

T tokens, H heads, D head size, R angles.
"""

from typing import Any

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import SharedKernel, array
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
