"""Fix the grids that arithmetic walks on, and sizes that layouts and kernels of all devices share.

What is a constant of the arithmetic changes bits when it is changed; the others are only a matter of speed.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", int, npt.NDArray[np.int32])

LANES = 16
"""A vector holds so many float32: independent partial sums of a reduction over a row, added up in a fixed order.
Arithmetic."""

KV_CHUNK = 64
"""A softmax accumulator takes in so many tokens at once (C). Arithmetic."""

KV_SPLIT = 512
"""The softmax of so many tokens is one of its own on a GPU, and is then merged with those before it. Arithmetic."""

SCAN_CHUNK = LANES
"""The tokens between two moves of the state of a Mamba layer (C). Arithmetic."""

VOCAB_CHUNK = 1024
"""The exponentials of so many tokens of the vocabulary are summed in float32, before sums go on in float64 (C).
Arithmetic."""

GRADIENT_CHUNK = 64
"""A chunk of the scan's gradients has so many tokens. They agree with the recurrence to rounding, whatever this is."""

QUERY_TILE = 64
"""A work item of attention covers so many query tokens on the CPU. Speed."""

HEAD_TILE = 8
"""The heads of one group that share a copy of the group's B and its scores. Speed."""

CACHE_LINE = 64
"""A cache line of the processor has so many bytes. Speed."""


def ceil_div(count: Number, size: int) -> Number:
    """Return how many pieces of ``size`` it takes to hold ``count``."""
    return -(-count // size)
