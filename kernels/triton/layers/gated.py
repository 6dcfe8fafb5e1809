"""Compute the gate and the up of an MLP and their gated activation in one launch.

A tile of outputs holds the columns of both layers in turn, gate first: the loop is that of one layer (`matmul.chain`),
each column a whole chain over the depth, and behind it a thread that has a column of gate has up's beside it. M rows, K
deep, N outputs of each layer.
"""

from collections.abc import Sequence

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.triton.activation import KINDS, value_and_slope
from samebit.kernels.triton.matmul import GROUP, chain, tile_of_program
from samebit.kernels.triton.numeric import aligned, jit
from samebit.kernels.triton.tiles.file import MatmulTile


def multiply_both(
    activation: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    tile: MatmulTile,
    outputs: int,
    *,
    kept: bool,
) -> list[torch.Tensor]:
    """Compute ``activation(gate) * up``, or the first of the ``outputs``; behind it gate and up where they are kept.

    Args:
        activation: one of `KINDS` that has a gate.
        x: ``[M, K]``, aligned.
        weights: ``[N, K]`` of gate and of up, aligned: all outputs, or the first of them, a multiple of the tile's.
        biases: ``[N]`` each; None for none.
        tile: its outputs are half gate's, half up's.
        outputs: N, which decides what is compiled.
        kept: gate and up are written too, by the same compiled kernel.
    """
    rows, depth = x.shape
    held = len(weights[0])
    outs = [x.new_empty(rows, outputs) for _ in range(3 if kept else 1)]
    gate, up = outs[1:] or weights
    added = weights if biases is None else [aligned(bias) for bias in biases]
    tiles = ceil_div(held, tile.outputs // 2)
    if rows and tiles:
        _multiply_gated[(ceil_div(rows, tile.rows) * tiles,)](
            x, *weights, *added, outs[0], gate, up, rows, tiles, int(kept), depth, outputs, KINDS[activation],
            biases is not None, tile.rows, tile.outputs, tile.depth, GROUP, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
    return [out[:, :held] for out in outs]


@jit(do_not_specialize=["rows", "tiles", "kept"])
def _multiply_gated(
    x: tensor, gate_weight: tensor, up_weight: tensor, gate_bias: tensor, up_bias: tensor, out: tensor, gate: tensor,
    up: tensor, rows: tensor, tiles: tensor, kept: tensor, DEPTH: tl.constexpr, OUTPUTS: tl.constexpr,
    KIND: tl.constexpr, BIASED: tl.constexpr, ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of the result; gate and up are rounded as launches of their own would store them."""
    HALF: tl.constexpr = OUTPUT_TILE // 2
    row_tile, tile = tile_of_program(tl.cdiv(rows, ROW_TILE), tiles, GROUP)
    row = row_tile * ROW_TILE + tl.arange(0, ROW_TILE)
    column = tl.arange(0, OUTPUT_TILE)
    output, of_gate = tile * HALF + column // 2, column % 2 == 0
    weight = tl.where(of_gate, gate_weight, up_weight) + output.to(tl.int64) * DEPTH
    acc = chain(
        x + row.to(tl.int64)[:, None] * DEPTH, weight[None, :], row[:, None] < rows, output[None, :] < OUTPUTS, DEPTH,
        1, 1, DEPTH % DEPTH_TILE == 0, ROW_TILE, OUTPUT_TILE, DEPTH_TILE,
    )  # fmt: skip
    opening, carried = tl.split(tl.reshape(acc, (ROW_TILE, HALF, 2)))
    output = tile * HALF + tl.arange(0, HALF)
    if BIASED:
        opening += tl.load(gate_bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
        carried += tl.load(up_bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    opening, carried = opening.to(out.dtype.element_ty), carried.to(out.dtype.element_ty)
    place = row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    real = (row[:, None] < rows) & (output[None, :] < OUTPUTS)
    if kept:
        tl.store(gate + place, opening, mask=real)
        tl.store(up + place, carried, mask=real)
    value, _ = value_and_slope(opening.to(tl.float32), KIND)
    tl.store(out + place, (value * carried.to(tl.float32)).to(out.dtype.element_ty), mask=real)
