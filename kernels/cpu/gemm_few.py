"""Matrix product ``out = x @ weight.T + bias`` on the CPU for a few rows, as of a decode step: the bits of `gemm`.

Invariant: an output is summed as `gemm` does it, in chains of `SUM_BLOCK` inputs; only the lanes of the vectors are
others (see `simd_gemm_few`).
"""

from typing import Any

import numpy as np
from numba import njit, prange

from .gemm import SUM_BLOCK, Layer, shares
from .jit import RowKernel
from .memory import elements, scratch
from .numeric import LANES, narrow, widen
from .simd_gemm_few import ROWS, multiply_few

MOST_ROWS = ROWS[-1]
"""Rows up to which this kernel is the faster one."""

READING = 4
"""Rows whose products take the time of reading the weight."""

_ZERO = np.float32(0.0)


def _multiply(
    x_address: int, x_stride: int, rows: int, inputs: int, first: Layer, second: Layer, third: Layer, kind: Any,
    threads: int,
) -> None:  # fmt: skip
    """As `gemm.multiply`, of up to `MOST_ROWS` rows; a work item is a share of the outputs of each layer."""
    x = elements(x_address, rows * x_stride, kind)
    parts = shares(1, max(first[2], second[2], third[2]), LANES, threads) if rows > 0 else 0
    for item in prange(parts):
        panel = scratch(MOST_ROWS * inputs)
        _copy_rows(x, x_stride, rows, inputs, panel)
        for place in range(3):
            weight, bias, outputs, out = first if place == 0 else (second if place == 1 else third)
            share = (outputs + parts * LANES - 1) // (parts * LANES) * LANES
            begin = min(item * share, outputs)
            end = min(begin + share, outputs)
            _multiply_share(
                panel, rows, elements(weight, outputs * inputs, kind), elements(bias, outputs if bias else 0, kind),
                begin, end, inputs, elements(out, rows * outputs, kind), outputs,
            )  # fmt: skip


multiply = RowKernel(_multiply)


@njit(inline="always")
def _tile_rows(rows: int) -> int:
    """The rows of the smallest tile that these fit in."""
    return 1 << int(rows > 1) + int(rows > 2) + int(rows > 4)


@njit(nogil=True, error_model="numpy")
def _copy_rows(x: Any, x_stride: int, rows: int, inputs: int, panel: Any) -> None:
    """``panel[row, k] = x[row, k]`` in float32, the last row of ``x`` standing for those that a tile has beyond."""
    for row in range(_tile_rows(rows)):
        at = min(row, rows - 1) * x_stride
        for k in range(inputs):
            panel[row * inputs + k] = widen(x[at + k])


@njit(nogil=True, error_model="numpy")
def _multiply_share(
    panel: Any, rows: int, weight: Any, bias: Any, first: int, last: int, inputs: int, out: Any, out_stride: int
) -> None:
    """Outputs ``first`` to ``last`` of the rows of a panel."""
    many = _tile_rows(rows)
    sums = scratch(many * LANES)
    for begin in range(first, last, LANES):
        count = min(LANES, last - begin)
        sums[:] = _ZERO
        for k in range(0, inputs, SUM_BLOCK):
            multiply_few(
                many, panel, k, inputs, count, weight, begin * inputs + k, inputs, min(SUM_BLOCK, inputs - k), sums
            )
        for row in range(rows):
            for lane in range(count):
                total = sums[row * LANES + lane]
                if len(bias) > 0:
                    total += widen(bias[begin + lane])
                out[row * out_stride + begin + lane] = narrow(total, out[0])
