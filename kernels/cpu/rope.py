"""Rotary embedding on the CPU: rotates the first ``2 * R`` elements of each head, copies the rest."""

from typing import Any

from numba import prange

from .jit import RowKernel
from .numeric import fma, narrow, widen


def _rotate(x: Any, row_width: int, heads: int, head_dim: int, cos: Any, sin: Any, sign: Any, out: Any) -> None:
    half = cos.shape[1]
    for row in prange(cos.shape[0]):
        for head in range(heads):
            at = row * row_width + head * head_dim
            for i in range(half):
                c = cos[row, i]
                s = sign * sin[row, i]
                x1 = widen(x[at + i])
                x2 = widen(x[at + half + i])
                out[at + i] = narrow(fma(x1, c, -(x2 * s)), out[at + i])
                out[at + half + i] = narrow(fma(x2, c, x1 * s), out[at + half + i])
            for i in range(at + 2 * half, at + head_dim):
                out[i] = x[i]


rotate = RowKernel(_rotate)
