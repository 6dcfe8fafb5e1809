"""Compute the matrix product: fixed tiles, the whole depth in one float32 accumulator, in order. M rows, K deep, N
outputs.

Layers of one input may share a launch: which layer a program computes is decided by its tile of outputs, and then it
runs the loop that a launch of this layer alone runs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.triton.numeric import aligned, dot, jit
from samebit.kernels.triton.tiles.file import MatmulTile

GROUP = 8
"""Count of row tiles whose programs run side by side for one tile of outputs after the other: they share the cache."""

MOST_LAYERS = 3
"""The most layers that one launch computes."""


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    tile: MatmulTile,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute ``a @ b + bias``, rounded to ``dtype`` (None: theirs).

    ``a``: ``[M, K]``, ``b``: ``[K, N]``, each contiguous or the transpose of what is, aligned.
    """
    return multiply_first(a, b, bias, tile, b.shape[1], dtype)


def multiply_first(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    tile: MatmulTile,
    outputs: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the first of a layer's ``outputs``, those that ``b`` and ``bias`` hold, with the layer's compiled kernel.

    Raises:
        ValueError: they are not all, and no whole number of tiles, or there are too many rows for that.
    """
    rows, depth = a.shape
    held = b.shape[1]
    row_tiles = ceil_div(rows, tile.rows)
    if held != outputs and (held % tile.outputs or row_tiles > GROUP):
        raise ValueError(
            f"{held} of {outputs} outputs of {rows} rows; allowed: a multiple of {tile.outputs}, and up to "
            f"{GROUP * tile.rows} rows"
        )
    out = torch.empty(rows, outputs, dtype=dtype or a.dtype, device=a.device)
    if rows == 0 or held == 0:
        return out[:, :held]
    # Else the depth is a number of rows, which changes from call to call; so it is of the transpose of one column.
    by_rows = a.stride(1) == 1 and (depth == 1 or a.stride(0) > 1)
    _multiply[(row_tiles * ceil_div(held, tile.outputs),)](
        a, b, out if bias is None else aligned(bias), out, rows, depth, *a.stride(), *b.stride(), outputs,
        bias is not None, depth if by_rows else 0, 0 if by_rows else rows, tile.rows, tile.outputs, tile.depth, GROUP,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out[:, :held]


def multiply_layers(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    tile: MatmulTile,
    outputs: Sequence[int],
) -> list[torch.Tensor]:
    """Compute ``x @ weight.T + bias`` for two or three layers in one launch, or the first of their ``outputs``.

    Args:
        x: ``[M, K]``, aligned.
        weights: ``[N, K]`` each, aligned: all outputs of the layer, or the first of them, a multiple of the tile's.
        biases: ``[N]`` each; None for none.
        tile: of all layers.
        outputs: of each layer, which decide what is compiled.
    """
    rows, depth = x.shape
    outs = [x.new_empty(rows, size) for size in outputs]
    tiles = [ceil_div(len(weight), tile.outputs) for weight in weights]
    added = outs if biases is None else [aligned(bias) for bias in biases]
    if rows and sum(tiles):
        unused = MOST_LAYERS - len(weights)
        _multiply_layers[(ceil_div(rows, tile.rows) * sum(tiles),)](
            x, *weights, *weights[:unused], *added, *added[:unused], *outs, *outs[:unused], rows, *tiles,
            *(0,) * unused, depth, *outputs, *outputs[:unused], biases is not None, tile.rows, tile.outputs,
            tile.depth, GROUP, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return [out[:, : len(weight)] for out, weight in zip(outs, weights, strict=True)]


@jit(do_not_specialize=["rows", "depth"])
def _multiply(
    a: tensor, b: tensor, bias: tensor, out: tensor, rows: tensor, depth: tensor, A_ROW: tl.constexpr,
    A_DEPTH: tl.constexpr, B_DEPTH: tl.constexpr, B_OUTPUT: tl.constexpr, OUTPUTS: tl.constexpr, BIASED: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of the result; ``DEPTH``, ``ROWS``: these where they are the layer's, else 0.

    A mask along contiguous elements that ends at a number known when the kernel is compiled leaves them whole words;
    one that ends anywhere makes each a load of its own.
    """
    row_tile, output_tile = tile_of_program(tl.cdiv(rows, ROW_TILE), tl.cdiv(OUTPUTS, OUTPUT_TILE), GROUP)
    row = row_tile * ROW_TILE + tl.arange(0, ROW_TILE)
    output = output_tile * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    real_rows, real_outputs = row[:, None] < (ROWS if ROWS else rows), output[None, :] < OUTPUTS
    a_at, b_at = a + row.to(tl.int64)[:, None] * A_ROW, b + output.to(tl.int64)[None, :] * B_OUTPUT
    acc = chain(
        a_at, b_at, real_rows, real_outputs, DEPTH if DEPTH else depth, A_DEPTH, B_DEPTH,
        DEPTH > 0 and DEPTH % DEPTH_TILE == 0, ROW_TILE, OUTPUT_TILE, DEPTH_TILE,
    )  # fmt: skip
    if BIASED:
        acc += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    out_at = out + row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=real_rows & real_outputs)


@jit(do_not_specialize=["rows", "first_tiles", "second_tiles", "third_tiles"])
def _multiply_layers(
    x: tensor, first: tensor, second: tensor, third: tensor, first_bias: tensor, second_bias: tensor,
    third_bias: tensor, first_out: tensor, second_out: tensor, third_out: tensor, rows: tensor, first_tiles: tensor,
    second_tiles: tensor, third_tiles: tensor, DEPTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    THIRD: tl.constexpr, BIASED: tl.constexpr, ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of one layer's result.

    What tells the layers apart is selected before the loop, of which there is one for all of them.
    """
    before_third = first_tiles + second_tiles
    row_tile, place = tile_of_program(tl.cdiv(rows, ROW_TILE), before_third + third_tiles, GROUP)
    of_first, of_second = place < first_tiles, place < before_third
    tile = place - tl.where(of_first, 0, tl.where(of_second, first_tiles, before_third))
    outputs = tl.where(of_first, FIRST, tl.where(of_second, SECOND, THIRD))
    weight = tl.where(of_first, first, tl.where(of_second, second, third))
    out = tl.where(of_first, first_out, tl.where(of_second, second_out, third_out))
    row = row_tile * ROW_TILE + tl.arange(0, ROW_TILE)
    output = tile * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    real_rows, real_outputs = row[:, None] < rows, output[None, :] < outputs
    acc = chain(
        x + row.to(tl.int64)[:, None] * DEPTH, weight + output.to(tl.int64)[None, :] * DEPTH, real_rows, real_outputs,
        DEPTH, 1, 1, DEPTH % DEPTH_TILE == 0, ROW_TILE, OUTPUT_TILE, DEPTH_TILE,
    )  # fmt: skip
    if BIASED:
        bias = tl.where(of_first, first_bias, tl.where(of_second, second_bias, third_bias))
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    out_at = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out_at, acc.to(first_out.dtype.element_ty), mask=real_rows & real_outputs)


@jit()
def tile_of_program(row_tiles: tensor, output_tiles: tensor, GROUP: tl.constexpr) -> Any:
    """Return which rows, and which outputs, this program computes: ``GROUP`` tiles of rows side by side."""
    program = tl.program_id(0)
    first = program // (GROUP * output_tiles) * GROUP
    beside = tl.minimum(row_tiles - first, GROUP)
    inside = program % (GROUP * output_tiles)
    return first + inside % beside, inside // beside


@jit()
def chain(
    a_at: tensor, b_at: tensor, real_rows: tensor, real_outputs: tensor, depth: tensor, A_DEPTH: tl.constexpr,
    B_DEPTH: tl.constexpr, WHOLE: tl.constexpr, ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the products of a tile of rows and one of outputs over the whole depth, float32: this order alone.

    ``a_at``: ``[ROW_TILE, 1]`` where the rows begin, ``b_at``: ``[1, OUTPUT_TILE]`` where the outputs do.
    """
    step = tl.arange(0, DEPTH_TILE)
    a_at += step[None, :] * A_DEPTH
    b_at += step[:, None] * B_DEPTH
    acc = tl.zeros((ROW_TILE, OUTPUT_TILE), tl.float32)
    for done in range(0, depth, DEPTH_TILE):
        if WHOLE:
            left = tl.load(a_at, mask=real_rows, other=0.0)
            right = tl.load(b_at, mask=real_outputs, other=0.0)
        else:
            left = tl.load(a_at, mask=real_rows & (step[None, :] < depth - done), other=0.0)
            right = tl.load(b_at, mask=real_outputs & (step[:, None] < depth - done), other=0.0)
        acc = dot(left, right, acc)
        a_at += DEPTH_TILE * A_DEPTH
        b_at += DEPTH_TILE * B_DEPTH
    return acc
