"""RMSNorm and LayerNorm on the CPU: one row at a time, sums in sixteen lanes added up in a fixed order."""

from typing import Any

import numpy as np
from numba import njit, prange

from .jit import RowKernel
from .numeric import LANES, fma, narrow, widen

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@njit(inline="always")
def _mean_square(x: Any, at: int, width: int, center: Any, lanes: Any) -> Any:
    """Mean of (x - center)**2 over x[at : at + width]."""
    for lane in range(LANES):
        lanes[lane] = _ZERO
    whole = width // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            value = widen(x[at + i + lane]) - center
            lanes[lane] = fma(value, value, lanes[lane])
    for i in range(whole, width):
        value = widen(x[at + i]) - center
        lanes[i - whole] = fma(value, value, lanes[i - whole])
    total = _ZERO
    for lane in range(LANES):
        total = total + lanes[lane]
    return total / np.float32(width)


@njit(inline="always")
def _mean(x: Any, at: int, width: int, lanes: Any) -> Any:
    for lane in range(LANES):
        lanes[lane] = _ZERO
    whole = width // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = lanes[lane] + widen(x[at + i + lane])
    for i in range(whole, width):
        lanes[i - whole] = lanes[i - whole] + widen(x[at + i])
    total = _ZERO
    for lane in range(LANES):
        total = total + lanes[lane]
    return total / np.float32(width)


def _rms_norm(x: Any, weight: Any, offset: Any, eps: Any, rows: int, width: int, out: Any, inverse: Any) -> None:
    for row in prange(rows):
        lanes = np.empty(LANES, np.float32)
        at = row * width
        scale = _ONE / np.sqrt(_mean_square(x, at, width, _ZERO, lanes) + eps)
        inverse[row] = scale
        for i in range(width):
            out[at + i] = narrow(widen(x[at + i]) * scale * (widen(weight[i]) + offset), out[at + i])


def _layer_norm(
    x: Any, weight: Any, bias: Any, eps: Any, rows: int, width: int, out: Any, mean: Any, inverse: Any
) -> None:
    for row in prange(rows):
        lanes = np.empty(LANES, np.float32)
        at = row * width
        center = _mean(x, at, width, lanes)
        scale = _ONE / np.sqrt(_mean_square(x, at, width, center, lanes) + eps)
        mean[row] = center
        inverse[row] = scale
        for i in range(width):
            value = (widen(x[at + i]) - center) * scale
            out[at + i] = narrow(fma(value, widen(weight[i]), widen(bias[i])), out[at + i])


rms_norm = RowKernel(_rms_norm)
layer_norm = RowKernel(_layer_norm)
