"""Compute the matrix product: fixed tiles, the whole depth in one float32 accumulator, in order. M rows, K deep, N
outputs."""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.triton.numeric import aligned, dot, jit
from samebit.kernels.triton.tiles.file import MatmulTile

GROUP = 8
"""Programs of so many row tiles run side by side for one tile of outputs after the other: they share the cache."""


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
    by_rows = a.stride(1) == 1  # else the depth is a number of rows, which changes from call to call
    _multiply[(row_tiles * ceil_div(held, tile.outputs),)](
        a, b, out if bias is None else aligned(bias), out, rows, depth, *a.stride(), *b.stride(), outputs,
        bias is not None, depth if by_rows else 0, 0 if by_rows else rows, tile.rows, tile.outputs, tile.depth, GROUP,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out[:, :held]


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
