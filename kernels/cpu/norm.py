"""RMSNorm and LayerNorm on the CPU: one row at a time, sums in sixteen lanes added up in a fixed order."""

from typing import Any

import numpy as np
from numba import njit, prange

from .jit import RowKernel
from .numeric import LANES, fma, narrow, widen

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@njit(inline="always")
def _mean_square(x: Any, center: Any, lanes: Any) -> Any:
    """Mean of (x - center)**2."""
    width = len(x)
    for lane in range(LANES):
        lanes[lane] = _ZERO
    whole = width // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            value = widen(x[i + lane]) - center
            lanes[lane] = fma(value, value, lanes[lane])
    for i in range(whole, width):
        value = widen(x[i]) - center
        lanes[i - whole] = fma(value, value, lanes[i - whole])
    total = _ZERO
    for lane in range(LANES):
        total = total + lanes[lane]
    return total / np.float32(width)


@njit(inline="always")
def _mean(x: Any, lanes: Any) -> Any:
    width = len(x)
    for lane in range(LANES):
        lanes[lane] = _ZERO
    whole = width // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = lanes[lane] + widen(x[i + lane])
    for i in range(whole, width):
        lanes[i - whole] = lanes[i - whole] + widen(x[i])
    total = _ZERO
    for lane in range(LANES):
        total = total + lanes[lane]
    return total / np.float32(width)


_PARTS = 16
"""Pieces that the rows are cut into, so that scratch memory is allocated once a piece."""


def _rms_norm(x: Any, weight: Any, offset: Any, eps: Any, rows: int, width: int, out: Any, inverse: Any) -> None:
    for part in prange(_PARTS):
        lanes = np.empty(LANES, np.float32)
        for row in range(rows * part // _PARTS, rows * (part + 1) // _PARTS):
            _rms_norm_row(
                x[row * width : (row + 1) * width], weight, offset, eps, out[row * width : (row + 1) * width],
                inverse[row : row + 1], lanes,
            )  # fmt: skip


@njit(inline="always")
def _rms_norm_row(x: Any, weight: Any, offset: Any, eps: Any, out: Any, inverse: Any, lanes: Any) -> None:
    scale = _ONE / np.sqrt(_mean_square(x, _ZERO, lanes) + eps)
    inverse[0] = scale
    for i in range(len(x)):
        out[i] = narrow(widen(x[i]) * scale * (widen(weight[i]) + offset), out[i])


def _layer_norm(
    x: Any, weight: Any, bias: Any, eps: Any, rows: int, width: int, out: Any, mean: Any, inverse: Any
) -> None:
    for row in prange(rows):
        lanes = np.empty(LANES, np.float32)
        row_in, row_out = x[row * width : (row + 1) * width], out[row * width : (row + 1) * width]
        center = _mean(row_in, lanes)
        scale = _ONE / np.sqrt(_mean_square(row_in, center, lanes) + eps)
        mean[row] = center
        inverse[row] = scale
        for i in range(width):
            value = (widen(row_in[i]) - center) * scale
            row_out[i] = narrow(fma(value, widen(weight[i]), widen(bias[i])), row_out[i])


rms_norm = RowKernel(_rms_norm)
layer_norm = RowKernel(_layer_norm)
