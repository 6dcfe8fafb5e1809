"""Depthwise causal convolution with bias and silu on the CPU, one row at a time.

Invariant: an element is ``bias + sum over k of weight[k] * input[t - K + 1 + k]``, k ascending, wherever the inputs
come from: the rows of this call or the window of those before it. Inputs before position 0 are left out.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from .jit import RowKernel
from .numeric import fma, narrow, sigmoid, widen

_PARTS = 16
"""Pieces that the rows are cut into, so that scratch memory is allocated once a piece."""


def _conv(
    x: Any, stride: int, weight: Any, bias: Any, sequence_of_row: Any, within: Any, starts: Any, slots: Any,
    windows: Any, out: Any,
) -> None:  # fmt: skip
    rows, width = out.shape
    for part in prange(_PARTS):
        acc = np.empty(width, np.float32)
        for row in range(rows * part // _PARTS, rows * (part + 1) // _PARTS):
            sequence = sequence_of_row[row]
            result = out[row]
            if sequence < 0:
                for c in range(width):
                    result[c] = 0
            else:
                _conv_row(x, stride, weight, bias, row, within[row], starts[sequence], slots[sequence], windows, acc)
                for c in range(width):
                    result[c] = narrow(acc[c] * sigmoid(acc[c]), result[c])


@njit(inline="always")
def _conv_row(
    x: Any, stride: int, weight: Any, bias: Any, row: int, within: int, start: int, slot: int, windows: Any, acc: Any
) -> None:
    """The row before its activation, in ``acc``."""
    taps = len(weight)
    width = len(acc)
    for c in range(width):
        acc[c] = bias[c]
    for k in range(taps):
        offset = within - (taps - 1) + k
        if offset >= 0:
            source = (row - (taps - 1) + k) * stride
            _add(weight[k], x[source : source + width], acc)
        elif start + offset >= 0:
            _add(weight[k], windows[slot, taps - 1 + offset], acc)


@njit(inline="always")
def _add(weight: Any, source: Any, acc: Any) -> None:
    for c in range(len(acc)):
        acc[c] = fma(weight[c], widen(source[c]), acc[c])


def _move_windows(
    x: Any, stride: int, row_start: Any, lengths: Any, starts: Any, slots: Any, grid: int, windows: Any,
    block_windows: Any, captures: Any, captured: Any,
) -> None:  # fmt: skip
    """After a call: the inputs before its end, before its last block boundary, and where captures want them."""
    for s in prange(len(lengths)):
        row, length, start, slot = row_start[s], lengths[s], starts[s], slots[s]
        for c in range(len(captures)):
            if captures[c, 0] == s:
                _window_at(x, stride, row, captures[c, 1] - start, windows[slot], captured[captures[c, 2]])
        boundary = (start + length) // grid * grid
        if boundary > start:
            _window_at(x, stride, row, boundary - start, windows[slot], block_windows[slot])
        _window_at(x, stride, row, length, windows[slot], windows[slot])


@njit(inline="always")
def _window_at(x: Any, stride: int, row: int, offset: int, before: Any, target: Any) -> None:
    """The last inputs before row ``row + offset``; ascending, so that ``target`` may be ``before``."""
    size, width = before.shape
    for j in range(size):
        place = offset - size + j
        for c in range(width):
            target[j, c] = x[(row + place) * stride + c] if place >= 0 else before[size + place, c]


convolve = RowKernel(_conv)
move_windows = RowKernel(_move_windows)
