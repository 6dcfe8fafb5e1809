"""Compute the matrix product ``out = x @ weight.T + bias`` in bfloat16 on processors with tile instructions.

Invariants (the row rule): an output is one chain of `amx_tiles.add_tile_products`, input pair after input pair from 0,
in float32; then the bias; rounded once. A last pair or tile that is not whole is filled up with zeros. Rows, threads
and places enter nowhere, as in `many_rows`, whose work items these are.

Weights are not asked for ahead: a tile has sixteen rows of them, and the time of asking was a quarter of the whole.
T rows, K inputs, N outputs.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import elements, scratch
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.amx_tiles import (
    TILE_INPUTS,
    TILE_OUTPUTS,
    VECTORS,
    add_tile_products,
    configure_tiles,
    release_tiles,
)
from samebit.kernels.cpu.gemm.layers import MOST_LAYERS, Layers, most_outputs, share_of, shares
from samebit.kernels.cpu.gemm.many_rows import PANEL_ROWS, Panel, write_rows
from samebit.kernels.cpu.gemm.pairs import pair_rows
from samebit.kernels.layout.grids import LANES

_SHARE = 16 * TILE_OUTPUTS
"""The outputs whose sums are kept at a time."""

_ZERO = np.float32(0.0)


def _multiply(threads: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Layers) -> None:
    """Multiply as `many_rows.multiply` does, in bfloat16."""
    panels = (rows + PANEL_ROWS - 1) // PANEL_ROWS
    parts = shares(panels, most_outputs(layers), TILE_OUTPUTS, threads)
    share_out(_multiply_item, panels * parts, threads, (panels, parts, x_address, x_stride, rows, inputs, layers))


multiply = SharedKernel(_multiply)


@kernel_part
def _multiply_item(
    item: int, panels: int, parts: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Layers
) -> None:  # fmt: skip
    """Compute one of ``parts`` shares of each layer's outputs for a panel of rows; a share's panels are neighbours."""
    row, part = item % panels * PANEL_ROWS, item // panels
    kind = np.uint16(0)
    count = min(PANEL_ROWS, rows - row)
    width = (count + LANES - 1) // LANES * LANES
    steps = (inputs + TILE_INPUTS - 1) // TILE_INPUTS
    panel = Panel(scratch(steps * (TILE_INPUTS // 2) * width), width, row, count)
    pair_rows(elements(x_address, rows * x_stride, kind), x_stride, inputs, panel)
    configure_tiles()
    for place in range(MOST_LAYERS):
        share = share_of(layers, place, part, parts, TILE_OUTPUTS, rows, inputs, kind)
        multiply_panel(panel, inputs, share)
    release_tiles()


@kernel_part
def multiply_panel(panel: Any, inputs: int, share: Any) -> None:
    """Compute a share of the outputs for the rows of a panel."""
    values, width, weight, first, last = panel.values, panel.width, share.weight, share.first, share.last
    sums = scratch(min((last - first + TILE_OUTPUTS - 1) // TILE_OUTPUTS * TILE_OUTPUTS, _SHARE) * width)
    patch = np.empty(TILE_OUTPUTS * TILE_INPUTS, np.uint16)
    for begin in range(first, last, _SHARE):
        end = min(begin + _SHARE, last)
        sums[:] = _ZERO
        for output in range(begin, end, TILE_OUTPUTS):
            _add_products(values, width, weight, output, last, inputs, patch, sums, (output - begin) * width)
        write_rows(sums, panel, share, begin, end)


@kernel_part
def _add_products(
    panel: Any, width: int, weight: Any, output: int, last: int, inputs: int, patch: Any, sums: Any, sums_at: int
) -> None:
    """Add to sixteen outputs of all rows; a tile that would reach beyond the weight is read from a copy."""
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


@kernel_part
def _copy_tile(weight: Any, output: int, last: int, inputs: int, k: int, patch: Any) -> None:
    """Copy what is there of a tile of the weight, 0 for the rest."""
    for j in range(TILE_OUTPUTS):
        for i in range(TILE_INPUTS):
            there = output + j < last and k + i < inputs
            patch[j * TILE_INPUTS + i] = weight[(output + j) * inputs + k + i] if there else np.uint16(0)
