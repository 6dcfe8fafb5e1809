"""Compute what decay leaves in a chunk of a recurrent layer, from its running sum ``[CHUNK]`` float64.

Invariant: what is left is the exponential of a difference of two sums, which is <= 0 and taken in float64.
"""

from typing import Any

import triton.language as tl
from triton.language import tensor

from samebit.kernels.triton.numeric import jit


@jit()
def left_at_end(sums: tensor, CHUNK: tl.constexpr) -> Any:
    """Return what the chunk leaves of the state before it, and of each of its tokens ``[CHUNK]``."""
    last = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, sums, 0.0), axis=0)
    return tl.exp(last.to(tl.float32)), tl.exp((last - sums).to(tl.float32))


@jit()
def left_between(sums: tensor, CHUNK: tl.constexpr) -> Any:
    """Return ``[t, s]``, what is left of token s at token t; 0 before s."""
    t = tl.arange(0, CHUNK)
    difference = (sums[:, None] - sums[None, :]).to(tl.float32)
    return tl.exp(tl.where(t[None, :] <= t[:, None], difference, float("-inf")))
