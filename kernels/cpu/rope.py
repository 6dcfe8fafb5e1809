"""Rotary embedding on the CPU: rotates the first ``2 * R`` elements of each head, copies the rest."""

from typing import Any

from numba import njit, prange

from .jit import RowKernel
from .numeric import fma, narrow, widen


@njit(inline="always")
def rotate_head(x: Any, cos: Any, sin: Any, sign: Any, out: Any) -> None:
    """One head ``[D]`` of one row by its angles ``[R]``; ``sign`` -1 turns it back."""
    half = len(cos)
    low, high = x[:half], x[half : 2 * half]
    out_low, out_high = out[:half], out[half : 2 * half]
    for i in range(half):
        x1, x2, turn = widen(low[i]), widen(high[i]), sign * sin[i]
        out_low[i] = narrow(fma(x1, cos[i], -(x2 * turn)), out_low[i])
        out_high[i] = narrow(fma(x2, cos[i], x1 * turn), out_high[i])
    for i in range(2 * half, len(x)):
        out[i] = x[i]


def _rotate(x: Any, row_width: int, heads: int, head_dim: int, cos: Any, sin: Any, sign: Any, out: Any) -> None:
    for row in prange(cos.shape[0]):
        for head in range(heads):
            at = row * row_width + head * head_dim
            rotate_head(x[at : at + head_dim], cos[row], sin[row], sign, out[at : at + head_dim])


rotate = RowKernel(_rotate)
