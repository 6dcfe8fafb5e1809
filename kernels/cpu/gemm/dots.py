"""Compute the matrix product ``out = x @ weight.T + bias`` in bfloat16 on processors that multiply pairs of inputs.

Invariants (the row rule): an output is one chain of `dots_vectors`' instruction, input pair after input pair from 0, in
float32; then the bias; rounded once. A last pair that is not whole is filled up with zeros. Rows, threads and places
enter nowhere, nor whether a row is one of many, in a panel as of `many_rows`, or of a few, as of `few_rows`.

T rows, K inputs, N outputs.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import copy, elements, scratch
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm import few_rows
from samebit.kernels.cpu.gemm.dots_vectors import ROWS, add_pair_products, dot_few
from samebit.kernels.cpu.gemm.few_rows import fetch_next, tile_rows, write_few
from samebit.kernels.cpu.gemm.layers import MOST_LAYERS, Layers, most_outputs, share_of, shares
from samebit.kernels.cpu.gemm.many_rows import DEPTH, PANEL_ROWS, Panel, lanes_of, tile_of, width_of, with_panels
from samebit.kernels.cpu.gemm.many_rows_vectors import HALVES_ARE_FASTER, MANY_OUTPUTS, OUTPUTS
from samebit.kernels.cpu.gemm.pairs import STEP, pair_rows
from samebit.kernels.layout.grids import LANES

MOST_ROWS = few_rows.MOST_ROWS if HALVES_ARE_FASTER else ROWS[-1]
"""Rows up to which the kernel of a few rows is the faster one."""

_TILE = OUTPUTS[0]


@inlined_part
def new_panel(inputs: int, row: int, rows: int) -> Any:
    """Return a panel for the pairs of up to `PANEL_ROWS` rows from ``row`` on."""
    width = width_of(rows)
    return Panel(scratch((min(inputs, DEPTH) + STEP - 1) // STEP * (STEP // 2) * width), width, row, rows)


@kernel_part
def _fill(x: Any, at: int, stride: int, rows: int, count: int, panel: Any, width: int) -> None:
    """Write ``panel[pair, row] = x[row, 2 pair : 2 pair + 2]`` for ``count`` inputs, what is beyond them being 0."""
    words = (count + STEP - 1) // STEP * (STEP // 2) * width
    pair_rows(x[at:], stride, count, Panel(panel[:words], width, 0, rows))


@kernel_part
def _add_products(
    panel: Any, width: int, weight: Any, weight_stride: int, depth: int, count: int, begin: int, end: int, last: int,
    sums: Any,
) -> None:  # fmt: skip
    """Go on with the chains of some outputs by the panel's inputs, which are those from ``depth`` on."""
    pairs = count // 2
    patch = np.zeros(2 * MANY_OUTPUTS, np.uint16)  # last inputs without a partner
    output = begin
    while output < end:
        many = tile_of(end - output, width)
        at = output * weight_stride + depth
        ahead = many * weight_stride if output + 2 * many <= last else 0  # what the next tile reads
        if count % 2:
            for j in range(many):
                patch[2 * j] = weight[at + j * weight_stride + count - 1]
        lane = 0
        while lane < width:
            lanes, sums_at = lanes_of(width - lane), (output - begin) * width + lane
            add_pair_products(lanes, many, panel, lane, width, weight, at, weight_stride, ahead, pairs, sums, sums_at)
            if count % 2:
                place = pairs * width + lane
                add_pair_products(lanes, many, panel, place, width, patch, 0, 2, 0, 1, sums, sums_at)
            lane += lanes
        output += many


multiply_panel = with_panels(_fill, _add_products)


@kernel_part
def _multiply_item(
    item: int, panels: int, parts: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Layers
) -> None:  # fmt: skip
    """Compute one of ``parts`` shares of each layer's outputs for a panel of rows; a share's panels are neighbours."""
    row, part = item % panels * PANEL_ROWS, item // panels
    kind = np.uint16(0)
    x = elements(x_address, rows * x_stride, kind)
    panel = new_panel(inputs, row, min(PANEL_ROWS, rows - row))
    filled = False
    for place in range(MOST_LAYERS):
        share = share_of(layers, place, part, parts, _TILE, rows, inputs, kind)
        multiply_panel(x, x_stride, inputs, panel, filled, share)
        filled = filled or share.first < share.last


@kernel_part
def copy_rows(x: Any, x_stride: int, rows: int, inputs: int) -> Any:
    """Return a few rows with a zero behind their inputs; the last also stands for those that a tile has beyond."""
    copied = np.zeros((MOST_ROWS, inputs + 1), np.uint16)
    for row in range(tile_rows(rows)):
        at = min(row, rows - 1) * x_stride
        copy(x[at : at + inputs], copied[row])
    return copied.reshape(-1)


@kernel_part
def multiply_share(copied: Any, rows: int, inputs: int, share: Any) -> None:
    """Compute a share of the outputs for a few rows."""
    weight, first, last = share.weight, share.first, share.last
    many = tile_rows(rows)
    sums = scratch(many * LANES)
    for begin in range(first, last, LANES):
        count = min(LANES, last - begin)
        fetch_next(weight, begin, last, inputs, 0, inputs)
        dot_few(many, copied, inputs + 1, count, weight, begin * inputs, inputs, sums)
        write_few(sums, rows, begin, count, share)


@kernel_part
def _multiply_part(
    part: int, parts: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Layers
) -> None:
    """Compute one of ``parts`` shares of each layer's outputs, for a few rows."""
    kind = np.uint16(0)
    copied = copy_rows(elements(x_address, rows * x_stride, kind), x_stride, rows, inputs)
    for place in range(MOST_LAYERS):
        multiply_share(copied, rows, inputs, share_of(layers, place, part, parts, LANES, rows, inputs, kind))


def _multiply(threads: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Layers) -> None:
    """Multiply as `many_rows.multiply` does, in bfloat16."""
    panels = (rows + PANEL_ROWS - 1) // PANEL_ROWS
    parts = shares(panels, most_outputs(layers), _TILE, threads)
    share_out(_multiply_item, panels * parts, threads, (panels, parts, x_address, x_stride, rows, inputs, layers))


def _multiply_few(threads: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Layers) -> None:
    """Multiply as `few_rows.multiply` does, in bfloat16."""
    parts = shares(1, most_outputs(layers), LANES, threads) if rows > 0 else 0
    share_out(_multiply_part, parts, threads, (parts, x_address, x_stride, rows, inputs, layers))


multiply = SharedKernel(_multiply)
multiply_few = SharedKernel(_multiply_few)
