"""Fix the grids that arithmetic walks on, and sizes that layouts and kernels of all devices share.

What is a constant of the arithmetic changes bits when it is changed; the others are only a matter of speed.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", int, npt.NDArray[np.int32])

LANES = 16
"""Count of float32 in a vector: independent partial sums of a reduction over a row, added up in a fixed order.
Arithmetic."""

KV_CHUNK = 64
"""Count of tokens that a softmax accumulator takes in at once (C). Arithmetic."""

KV_SPLIT = 512
"""Count of tokens whose softmax is one of its own on a GPU, and is then merged with those before it. Arithmetic."""

SCAN_CHUNK = LANES
"""The tokens between two moves of the state of a recurrent layer (C). Arithmetic."""

VOCAB_CHUNK = 1024
"""Count of tokens of the vocabulary whose exponentials are summed in float32, before sums go on in float64 (C).
Arithmetic."""

GRADIENT_CHUNK = 64
"""Count of tokens in a chunk of the scan's gradients, which agree with the recurrence to rounding, whatever this is."""

QUERY_TILE = 64
"""Count of query tokens that a work item of attention covers on the CPU. Speed."""

HEAD_TILE = 8
"""The heads of one group that share a copy of the group's B and its scores. Speed."""

CACHE_LINE = 64
"""Bytes of a cache line of the processor. Speed."""


def ceil_div(count: Number, size: int) -> Number:
    """Return how many pieces of ``size`` it takes to hold ``count``."""
    return -(-count // size)
