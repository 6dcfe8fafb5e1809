"""RMSNorm, gated or not, and LayerNorm on the CPU: a row at a time, sums in sixteen lanes added up in a fixed order."""

from typing import Any

import numpy as np
from numba import njit, prange

from .jit import RowKernel
from .memory import elements, floats
from .numeric import LANES, fma, narrow, sigmoid, widen

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


def _rms_norm(
    x_address: int, kind: Any, weight_address: int, weight_kind: Any, offset: Any, eps: Any, rows: int, width: int,
    out_address: int, inverse_address: int,
) -> None:  # fmt: skip
    x, out = elements(x_address, rows * width, kind), elements(out_address, rows * width, kind)
    weight, inverse = elements(weight_address, width, weight_kind), floats(inverse_address, rows)
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


def _gated_rms_norm(
    x: Any, gate: Any, gate_stride: int, weight: Any, eps: Any, rows: int, width: int, groups: int, gate_first: bool,
    out: Any,
) -> None:  # fmt: skip
    size = width // groups
    for part in prange(_PARTS):
        lanes = np.empty(LANES, np.float32)
        scaled = np.empty(size, np.float32)
        gates = np.empty(size, np.float32)
        for row in range(rows * part // _PARTS, rows * (part + 1) // _PARTS):
            for group in range(groups):
                at = row * width + group * size
                gate_at = row * gate_stride + group * size
                _gated_rms_norm_part(
                    x[at : at + size], gate[gate_at : gate_at + size], weight[group * size : (group + 1) * size], eps,
                    gate_first, out[at : at + size], scaled, gates, lanes,
                )  # fmt: skip


@njit(inline="always")
def _gated_rms_norm_part(
    x: Any, gate: Any, weight: Any, eps: Any, gate_first: bool, out: Any, scaled: Any, gates: Any, lanes: Any
) -> None:
    for i in range(len(scaled)):
        value = widen(gate[i])
        gates[i] = value * sigmoid(value)
        scaled[i] = widen(x[i]) * gates[i] if gate_first else widen(x[i])
    scale = _ONE / np.sqrt(_mean_square(scaled, _ZERO, lanes) + eps)
    for i in range(len(scaled)):
        normed = scaled[i] * scale * widen(weight[i])
        out[i] = narrow(normed if gate_first else normed * gates[i], out[i])


rms_norm = RowKernel(_rms_norm)
layer_norm = RowKernel(_layer_norm)
gated_rms_norm = RowKernel(_gated_rms_norm)
