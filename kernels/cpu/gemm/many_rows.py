"""Compute the matrix product ``out = x @ weight.T + bias`` on the CPU: float32, or bfloat16 that is widened and rounded
once.

Invariants (the row rule):

* An output is the sum, in order, of blocks of `SUM_BLOCK` inputs, each block one chain of fused multiply-adds from 0
  ascending; then the bias. Nothing else enters its arithmetic: not the number of rows, not the threads, not where
  the operands lie.
* Every output is written by one work item; tiles of rows and outputs are only a matter of speed.

A work item is a panel of up to `PANEL_ROWS` rows, transposed so that vectors run over rows, times a share of the
outputs of each layer. Weights are read where they lie, each once a panel. Panels and micro-kernels: Goto & van de
Geijn 2008. T rows, K inputs, N outputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import elements, scratch
from samebit.kernels.cpu.base.numeric import narrow, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.layers import MOST_LAYERS, Layers, most_outputs, share_of, shares
from samebit.kernels.cpu.gemm.many_rows_vectors import (
    HALF,
    HALVES_ARE_FASTER,
    IN_STRIPS,
    MANY_OUTPUTS,
    NARROW,
    OUTPUTS,
    SUM_BLOCK,
    VECTORS,
    multiply_tile,
    transpose_strip,
    widen_outputs,
    write_strip,
)
from samebit.kernels.layout.grids import LANES

PANEL_ROWS = 64

DEPTH = 8 * SUM_BLOCK
"""Inputs of a panel that are transposed at a time: it stays in the second-level cache."""

_SHARE = 240
"""The outputs whose sums are kept at a time; a whole number of tiles."""

_TILE, _PAIR, _ = OUTPUTS

_ZERO = np.float32(0.0)


class Panel(NamedTuple):
    """Holds ``rows`` rows of ``x`` from ``row`` on, transposed: ``values[k, row]``, rows of that ``width`` apart, or in
    strips of `LANES` rows (see `IN_STRIPS`)."""

    values: Any
    width: int
    row: int
    rows: int


@inlined_part
def width_of(rows: int) -> int:
    """Return the lanes of a panel of this count of rows: half vectors, or whole ones where a half gains nothing."""
    halves = (rows + HALF - 1) // HALF * HALF
    return halves if HALVES_ARE_FASTER or halves < 2 * LANES else (rows + LANES - 1) // LANES * LANES


@inlined_part
def lanes_of(left: int) -> int:
    """Return how many of the lanes that are left the next tile covers: of many, whole vectors first."""
    most = min(VECTORS * LANES, left)
    return most if most <= 2 * LANES else most // LANES * LANES


@inlined_part
def tile_of(outputs: int, width: int) -> int:
    """Return how many of the outputs that are left the next tile covers."""
    if outputs >= MANY_OUTPUTS and width <= NARROW:
        return MANY_OUTPUTS
    return _TILE if outputs >= _TILE else (_PAIR if outputs >= _PAIR else 1)


@inlined_part
def _lane(lane: int, count: int, width: int) -> Any:
    """Return where a lane of a panel of ``count`` inputs begins, and how far apart its inputs are.

    Where a tile covers a vector of lanes, these lie by themselves: rows of a whole panel are so far apart that they
    would share a quarter of the first-level cache.
    """
    if IN_STRIPS:
        first = lane // LANES * LANES
        return first * count + lane - first, min(LANES, width - first)
    return lane, width


@kernel_part
def _transpose_rows(x: Any, at: int, stride: int, rows: int, count: int, panel: Any, width: int) -> None:
    """Write ``x[row, k]`` for ``count`` inputs where a panel has them, the last row standing for those beyond it."""
    whole = count // LANES * LANES
    for k in range(0, whole, LANES):  # all rows of a few inputs: lines of the panel are written whole
        for row in range(0, width, HALF):
            strip, there = at + min(row, rows - 1) * stride, max(1, min(HALF, rows - row))
            place, step = _lane(row, count, width)
            transpose_strip(x, strip + k, stride, there, panel, place + k * step, step)
    for k in range(whole, count):
        for row in range(width):
            place, step = _lane(row, count, width)
            panel[place + k * step] = widen(x[at + min(row, rows - 1) * stride + k])


@kernel_part
def _add_products(
    panel: Any, width: int, weight: Any, weight_stride: int, depth: int, count: int, begin: int, end: int, last: int,
    sums: Any,
) -> None:  # fmt: skip
    """Add to ``sums[output, row]`` the products of the panel's inputs, which are those from ``depth`` on."""
    widened = scratch(MANY_OUTPUTS * count if IN_STRIPS else 0)
    output = begin
    while output < end:
        many, at = tile_of(end - output, width), output * weight_stride + depth
        ahead = many * weight_stride if output + 2 * many <= last else 0  # what the next tile reads
        if IN_STRIPS and weight.itemsize < widened.itemsize:
            widen_outputs(weight, at, weight_stride, ahead, many, count, widened)
            _add_tile(panel, width, widened, 0, count, 0, many, count, sums, (output - begin) * width)
        else:
            _add_tile(panel, width, weight, at, weight_stride, ahead, many, count, sums, (output - begin) * width)
        output += many


@kernel_part
def _add_tile(
    panel: Any, width: int, weight: Any, at: int, stride: int, ahead: int, many: int, count: int, sums: Any,
    sums_at: int,
) -> None:  # fmt: skip
    """Add the products of all lanes of a panel with the weights of ``many`` outputs."""
    lane = 0
    while lane < width:
        lanes = lanes_of(width - lane)
        place, step = _lane(lane, count, width)
        multiply_tile(
            lanes, many, panel, place, step, weight, at, stride, 1, ahead, count, sums, sums_at + lane, width,
        )  # fmt: skip
        lane += lanes


@kernel_part
def write_rows(sums: Any, panel: Any, share: Any, begin: int, end: int) -> None:
    """Write ``out[row, output] = sums[output, row] + bias[output]``, rounded once; an empty bias is none."""
    width, rows = panel.width, panel.rows
    bias, out, stride = share.bias, share.out, share.outputs
    at = panel.row * stride
    if len(bias) > 0:
        for output in range(begin, end):
            for row in range(width):
                sums[(output - begin) * width + row] += widen(bias[output])
    whole = (end - begin) // LANES * LANES
    for output in range(0, whole, LANES):
        for row in range(0, rows, HALF):
            write_strip(
                sums, output * width + row, width, out, at + row * stride + begin + output, stride,
                min(HALF, rows - row),
            )  # fmt: skip
    for row in range(rows):
        for output in range(whole, end - begin):
            out[at + row * stride + begin + output] = narrow(sums[output * width + row], out[0])


def with_panels(fill: Callable[..., None], add_products: Callable[..., None]) -> Callable[..., None]:
    """Make the product of a panel: ``fill`` writes inputs of its rows, ``add_products`` adds those of some outputs."""

    @kernel_part
    def multiply_panel(x: Any, x_stride: int, inputs: int, panel: Any, filled: bool, share: Any) -> None:
        """Compute a share of the outputs for the rows of a panel, which holds their inputs already if ``filled``."""
        values, width, row, rows = panel
        weight, first, last = share.weight, share.first, share.last
        sums = scratch(min(last - first, _SHARE) * width)
        for begin in range(first, last, _SHARE):
            end = min(begin + _SHARE, last)
            sums[: (end - begin) * width] = _ZERO
            for depth in range(0, inputs, DEPTH):
                count = min(DEPTH, inputs - depth)
                if inputs > DEPTH or not filled:
                    fill(x, row * x_stride + depth, x_stride, rows, count, values, width)
                add_products(values, width, weight, inputs, depth, count, begin, end, last, sums)
            filled = True
            write_rows(sums, panel, share, begin, end)

    computed: Callable[..., None] = multiply_panel
    return computed


multiply_panel = with_panels(_transpose_rows, _add_products)


@kernel_part
def _multiply_item(
    item: int, panels: int, parts: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Layers, kind: Any
) -> None:  # fmt: skip
    """Compute one of ``parts`` shares of each layer's outputs for a panel of rows; a share's panels are neighbours."""
    row, part = item % panels * PANEL_ROWS, item // panels
    x = elements(x_address, rows * x_stride, kind)
    count = min(PANEL_ROWS, rows - row)
    width = width_of(count)
    panel = Panel(scratch(min(inputs, DEPTH) * width), width, row, count)
    filled = False
    for place in range(MOST_LAYERS):
        share = share_of(layers, place, part, parts, _TILE, rows, inputs, kind)
        multiply_panel(x, x_stride, inputs, panel, filled, share)
        filled = filled or share.first < share.last


def _multiply(threads: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Layers, kind: Any) -> None:
    """Multiply one to three layers with the same ``x``: its rows are a stride apart, those of the results contiguous.

    ``kind``: the type of all elements (`memory.kind_of`).
    """
    panels = (rows + PANEL_ROWS - 1) // PANEL_ROWS
    parts = shares(panels, most_outputs(layers), _TILE, threads)
    share_out(_multiply_item, panels * parts, threads, (panels, parts, x_address, x_stride, rows, inputs, layers, kind))


multiply = SharedKernel(_multiply)
