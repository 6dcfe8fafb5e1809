"""Matrix product ``out = x @ weight.T + bias`` in bfloat16 on processors with tile instructions.

Invariants (the row rule): an output is one chain of `tiles_amx.add_tile_products`, input pair after input pair from 0,
in float32; then the bias; rounded once. A last pair or tile that is not whole is filled up with zeros. Rows, threads
and places enter nowhere, as in `gemm`, whose work items these are.

Weights are not asked for ahead: a tile has sixteen rows of them, and the time of asking was a quarter of the whole.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from .gemm import PANEL_ROWS, Layer, shares, write_rows
from .jit import RowKernel
from .memory import elements, scratch
from .numeric import LANES
from .tiles_amx import (
    TILE_INPUTS,
    TILE_OUTPUTS,
    VECTORS,
    add_tile_products,
    configure_tiles,
    release_tiles,
    transpose_pairs,
)

_SHARE = 16 * TILE_OUTPUTS
"""Outputs whose sums are kept at a time."""

_ZERO = np.float32(0.0)


def _multiply(
    x_address: int, x_stride: int, rows: int, inputs: int, first: Layer, second: Layer, third: Layer, threads: int
) -> None:
    """As `gemm.multiply`, of bfloat16."""
    kind = np.uint16(0)
    x = elements(x_address, rows * x_stride, kind)
    panels = (rows + PANEL_ROWS - 1) // PANEL_ROWS
    parts = shares(panels, max(first[2], second[2], third[2]), TILE_OUTPUTS, threads)
    for item in prange(panels * parts):
        row = item % panels * PANEL_ROWS
        count = min(PANEL_ROWS, rows - row)
        width = (count + LANES - 1) // LANES * LANES
        steps = (inputs + TILE_INPUTS - 1) // TILE_INPUTS
        panel = scratch(steps * (TILE_INPUTS // 2) * width)
        _pair_rows(x, row * x_stride, x_stride, count, inputs, panel, width)
        configure_tiles()
        for place in range(3):
            weight, bias, outputs, out = first if place == 0 else (second if place == 1 else third)
            share = (outputs + parts * TILE_OUTPUTS - 1) // (parts * TILE_OUTPUTS) * TILE_OUTPUTS
            begin = min(item // panels * share, outputs)
            end = min(begin + share, outputs)
            _multiply_panel(
                panel, width, count, elements(weight, outputs * inputs, kind),
                elements(bias, outputs if bias else 0, kind), begin, end, inputs,
                elements(out, rows * outputs, kind), row, outputs,
            )  # fmt: skip
        release_tiles()


multiply = RowKernel(_multiply)


@njit(nogil=True, error_model="numpy")
def _pair_rows(x: Any, at: int, stride: int, rows: int, inputs: int, panel: Any, width: int) -> None:
    """The panel: each row's inputs in pairs; rows beyond the last and inputs beyond the last are 0."""
    whole = inputs // TILE_INPUTS * TILE_INPUTS
    halves = panel.view(np.uint16)
    for row in range(0, width, LANES):
        filled = row + LANES <= rows
        if filled:
            for k in range(0, whole, TILE_INPUTS):
                transpose_pairs(x, at + row * stride + k, stride, panel, k // 2 * width + row, width)
        for pair in range(whole // 2 if filled else 0, len(panel) // width):
            for lane in range(row, row + LANES):
                for k in range(2 * pair, 2 * pair + 2):
                    there = lane < rows and k < inputs
                    value = x[at + lane * stride + k] if there else np.uint16(0)
                    halves[2 * (pair * width + lane) + k - 2 * pair] = value


@njit(nogil=True, error_model="numpy")
def _multiply_panel(
    panel: Any, width: int, rows: int, weight: Any, bias: Any, first: int, last: int, inputs: int, out: Any, row: int,
    out_stride: int,
) -> None:  # fmt: skip
    """Outputs ``first`` to ``last`` of the rows from ``row`` on."""
    sums = scratch(min((last - first + TILE_OUTPUTS - 1) // TILE_OUTPUTS * TILE_OUTPUTS, _SHARE) * width)
    patch = np.empty(TILE_OUTPUTS * TILE_INPUTS, np.uint16)
    for begin in range(first, last, _SHARE):
        end = min(begin + _SHARE, last)
        sums[:] = _ZERO
        for output in range(begin, end, TILE_OUTPUTS):
            _add_products(panel, width, weight, output, last, inputs, patch, sums, (output - begin) * width)
        write_rows(sums, width, bias, rows, begin, end, out, row * out_stride, out_stride)


@njit(nogil=True, error_model="numpy")
def _add_products(
    panel: Any, width: int, weight: Any, output: int, last: int, inputs: int, patch: Any, sums: Any, sums_at: int
) -> None:
    """Sixteen outputs of all rows; where a tile would reach beyond the weight, a copy of what is there is read."""
    whole = inputs // TILE_INPUTS if output + TILE_OUTPUTS <= last else 0
    for lane in range(0, width, VECTORS * LANES):
        vectors = min(VECTORS, (width - lane) // LANES)
        if whole > 0:
            add_tile_products(vectors, whole, panel, lane, width, weight, output * inputs, inputs, sums, sums_at + lane)
        for k in range(whole * TILE_INPUTS, inputs, TILE_INPUTS):
            _copy_tile(weight, output, last, inputs, k, patch)
            add_tile_products(
                vectors, 1, panel, k // 2 * width + lane, width, patch, 0, TILE_INPUTS, sums, sums_at + lane
            )


@njit(nogil=True, error_model="numpy")
def _copy_tile(weight: Any, output: int, last: int, inputs: int, k: int, patch: Any) -> None:
    for j in range(TILE_OUTPUTS):
        for i in range(TILE_INPUTS):
            there = output + j < last and k + i < inputs
            patch[j * TILE_INPUTS + i] = weight[(output + j) * inputs + k + i] if there else np.uint16(0)
