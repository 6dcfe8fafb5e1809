"""Rotary embedding on the CPU: rotates the first ``2 * R`` elements of each head, copies the rest."""

from typing import Any

from numba import prange

from .jit import RowKernel
from .numeric import fma, narrow, widen


def _rotate(x: Any, row_width: int, heads: int, head_dim: int, cos: Any, sin: Any, sign: Any, out: Any) -> None:
    half = cos.shape[1]
    for row in prange(cos.shape[0]):
        c, s = cos[row], sin[row]
        for head in range(heads):
            at = row * row_width + head * head_dim
            low, high = x[at : at + half], x[at + half : at + 2 * half]
            out_low, out_high = out[at : at + half], out[at + half : at + 2 * half]
            for i in range(half):
                x1, x2, turn = widen(low[i]), widen(high[i]), sign * s[i]
                out_low[i] = narrow(fma(x1, c[i], -(x2 * turn)), out_low[i])
                out_high[i] = narrow(fma(x2, c[i], x1 * turn), out_high[i])
            for i in range(at + 2 * half, at + head_dim):
                out[i] = x[i]


rotate = RowKernel(_rotate)
