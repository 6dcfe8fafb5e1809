"""Matrix product ``out = x @ weight.T + bias`` on the CPU: float32, or bfloat16 that is widened and rounded once.

Invariants (the row rule):

* An output is the sum, in order, of blocks of `SUM_BLOCK` inputs, each block one chain of fused multiply-adds from 0
  ascending; then the bias. Nothing else enters its arithmetic: not the number of rows, not the threads, not where
  the operands lie.
* Every output is written by one work item; tiles of rows and outputs are only a matter of speed.

A work item is a panel of up to `PANEL_ROWS` rows, transposed so that vectors run over rows, times a share of the
outputs of each layer. Weights are read where they lie, each once a panel. Panels and micro-kernels: Goto & van de
Geijn 2008.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from .jit import RowKernel
from .memory import elements, scratch
from .numeric import LANES, narrow, widen
from .simd_gemm import OUTPUTS, VECTORS, fetch, multiply_tile, transpose_tile

SUM_BLOCK = 128
"""Inputs of one chain. A constant of the arithmetic: changing it changes bits."""

PANEL_ROWS = 64

_DEPTH = 8 * SUM_BLOCK
"""Inputs of a panel that are transposed at a time: it stays in the second-level cache."""

_SHARE = 252
"""Outputs whose sums are kept at a time; a whole number of tiles."""

_TILE, _PAIR, _ = OUTPUTS
_CACHE_LINE = 16
_ZERO = np.float32(0.0)


Layer = tuple[int, int, int, int]
"""Address of the weight, of the bias (0 for none), number of outputs, address of the result."""

NO_LAYERS: tuple[Layer, Layer, Layer] = ((0, 0, 0, 0),) * 3


def _multiply(
    x_address: int, x_stride: int, rows: int, inputs: int, first: Layer, second: Layer, third: Layer, kind: Any,
    threads: int,
) -> None:  # fmt: skip
    """One to three layers of the same ``x``: its rows are a stride apart, those of the results are contiguous.

    ``kind``: the type of all elements (`memory.kind_of`).
    """
    x = elements(x_address, rows * x_stride, kind)
    panels = (rows + PANEL_ROWS - 1) // PANEL_ROWS
    parts = shares(panels, max(first[2], second[2], third[2]), _TILE, threads)
    for item in prange(panels * parts):
        row = item % panels * PANEL_ROWS  # a thread's items: all panels of its share of the outputs
        count = min(PANEL_ROWS, rows - row)
        width = (count + LANES - 1) // LANES * LANES
        panel = scratch(min(inputs, _DEPTH) * width)
        filled = False
        for place in range(3):
            weight, bias, outputs, out = first if place == 0 else (second if place == 1 else third)
            share = (outputs + parts * _TILE - 1) // (parts * _TILE) * _TILE
            begin = min(item // panels * share, outputs)
            end = min(begin + share, outputs)
            _multiply_panel(
                x, row * x_stride, x_stride, count, panel, width, filled, elements(weight, outputs * inputs, kind),
                elements(bias, outputs if bias else 0, kind), begin, end, inputs, elements(out, rows * outputs, kind),
                row, outputs,
            )  # fmt: skip
            filled = filled or begin < end


multiply = RowKernel(_multiply)


@njit(inline="always")
def shares(panels: int, outputs: int, tile: int, threads: int) -> int:
    """Into how many parts the outputs are shared out, so that few panels keep all threads at work."""
    return 1 if panels >= 8 * threads else min(threads, (outputs + 4 * tile - 1) // (4 * tile))


@njit(nogil=True, error_model="numpy")
def _multiply_panel(
    x: Any, x_at: int, x_stride: int, rows: int, panel: Any, width: int, filled: bool, weight: Any, bias: Any,
    first: int, last: int, inputs: int, out: Any, row: int, out_stride: int,
) -> None:  # fmt: skip
    """Outputs ``first`` to ``last`` of the rows from ``row`` on; a panel that is ``filled`` holds their inputs."""
    sums = scratch(min(last - first, _SHARE) * width)
    for begin in range(first, last, _SHARE):
        end = min(begin + _SHARE, last)
        sums[: (end - begin) * width] = _ZERO
        for depth in range(0, inputs, _DEPTH):
            count = min(_DEPTH, inputs - depth)
            if inputs > _DEPTH or not filled:
                _transpose_rows(x, x_at + depth, x_stride, rows, count, panel, width)
            _add_products(panel, width, weight, inputs, depth, count, begin, end, last, sums)
        filled = True
        write_rows(sums, width, bias, rows, begin, end, out, row * out_stride, out_stride)


@njit(nogil=True, error_model="numpy")
def _transpose_rows(x: Any, at: int, stride: int, rows: int, count: int, panel: Any, width: int) -> None:
    """``panel[k, row] = x[row, k]`` for ``count`` inputs, rows beyond the last being 0."""
    whole = count // LANES * LANES
    for row in range(0, width, LANES):
        if row + LANES <= rows:
            for k in range(0, whole, LANES):
                transpose_tile(x, at + row * stride + k, stride, panel, k * width + row, width)
            for k in range(whole, count):
                for lane in range(row, row + LANES):
                    panel[k * width + lane] = widen(x[at + lane * stride + k])
        else:
            for k in range(count):
                for lane in range(row, row + LANES):
                    panel[k * width + lane] = widen(x[at + lane * stride + k]) if lane < rows else _ZERO


@njit(nogil=True, error_model="numpy")
def _add_products(
    panel: Any, width: int, weight: Any, weight_stride: int, depth: int, count: int, begin: int, end: int, last: int,
    sums: Any,
) -> None:  # fmt: skip
    """``sums[output, row] +=`` the products of the panel's inputs from ``depth`` on, block after block."""
    output = begin
    while output < end:
        many = _TILE if output + _TILE <= end else (_PAIR if output + _PAIR <= end else 1)
        for coming in range(output + many, min(output + many + _TILE, last)):  # what the next tile reads
            for k in range(0, count, _CACHE_LINE):
                fetch(weight, coming * weight_stride + depth + k)
        for k in range(0, count, SUM_BLOCK):
            for lane in range(0, width, VECTORS * LANES):
                multiply_tile(
                    min(VECTORS, (width - lane) // LANES), many, panel, k * width + lane, width,
                    weight, output * weight_stride + depth + k, weight_stride, min(SUM_BLOCK, count - k),
                    sums, (output - begin) * width + lane,
                )  # fmt: skip
        output += many


@njit(nogil=True, error_model="numpy")
def write_rows(
    sums: Any, width: int, bias: Any, rows: int, begin: int, end: int, out: Any, at: int, stride: int
) -> None:
    """``out[row, output] = sums[output, row] + bias[output]``, rounded once; an empty bias is none."""
    if len(bias) > 0:
        for output in range(begin, end):
            for row in range(width):
                sums[(output - begin) * width + row] += widen(bias[output])
    whole_rows = rows // LANES * LANES
    whole = (end - begin) // LANES * LANES
    for output in range(0, whole, LANES):
        for row in range(0, whole_rows, LANES):
            transpose_tile(sums, output * width + row, width, out, at + row * stride + begin + output, stride)
    for row in range(rows):
        for output in range(whole if row < whole_rows else 0, end - begin):
            out[at + row * stride + begin + output] = narrow(sums[output * width + row], out[0])
