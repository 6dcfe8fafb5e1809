"""Compute gradients of weights and biases: sums over the rows of each expert, in the order of the rows, by one program.

Of an expert without rows they are zero. P sorted pairs, T rows, M and N the elements of a pair's or a row's vectors.
"""

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.triton.experts.sorting import Pairs
from samebit.kernels.triton.matmul import GROUP, tile_of_program
from samebit.kernels.triton.numeric import aligned, dot, jit
from samebit.kernels.triton.tiles.file import MatmulTile

_ROWS, _COLUMNS = 16, 256


def sum_of_products(
    left: torch.Tensor, right: torch.Tensor, pairs: Pairs, tile: MatmulTile, *, left_gathered: bool
) -> torch.Tensor:
    """Add up ``left.T @ right`` over each expert's pairs: ``[E, M, N]``.

    One of the two is ``[T, ...]`` and gathered, the other has an element a pair.
    """
    sizes = left.shape[1], right.shape[1]
    out = torch.empty(pairs.experts, *sizes, dtype=left.dtype, device=left.device)
    tiles = ceil_div(sizes[0], tile.rows) * ceil_div(sizes[1], tile.outputs)
    _sum_products[(tiles, pairs.experts)](
        aligned(left), aligned(right), out, pairs.choice_of, pairs.offsets, *sizes, pairs.top_k, left_gathered,
        tile.rows, tile.outputs, tile.depth, GROUP, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def sum_of_pairs(values: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Add up the values ``[P, N]`` of each expert's pairs: ``[E, N]``."""
    return _sums(values, values, pairs, weighted=False)


def weighted_sum_of_rows(rows: torch.Tensor, weights: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Add up the rows ``[T, N]`` of each expert, each times its weight ``[T, top_k]`` of that expert: ``[E, N]``."""
    return _sums(rows, weights, pairs, weighted=True)


def _sums(values: torch.Tensor, weights: torch.Tensor, pairs: Pairs, *, weighted: bool) -> torch.Tensor:
    width = values.shape[1]
    out = torch.empty(pairs.experts, width, dtype=values.dtype, device=values.device)
    _sum_pairs[(ceil_div(width, _COLUMNS), pairs.experts)](
        aligned(values), aligned(weights), out, pairs.choice_of, pairs.offsets, width, pairs.top_k, weighted, _ROWS,
        _COLUMNS,
    )  # fmt: skip
    return out


@jit()
def _sum_products(
    left: tensor, right: tensor, out: tensor, choice_of: tensor, offsets: tensor, M: tl.constexpr, N: tl.constexpr,
    TOP_K: tl.constexpr, LEFT_GATHERED: tl.constexpr, ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    row_tile, output_tile = tile_of_program(tl.cdiv(M, ROW_TILE), tl.cdiv(N, OUTPUT_TILE), GROUP)
    expert = tl.program_id(1).to(tl.int64)
    m = row_tile * ROW_TILE + tl.arange(0, ROW_TILE)
    n = output_tile * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    first, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    acc = tl.zeros((ROW_TILE, OUTPUT_TILE), tl.float32)
    for done in range(first, end, DEPTH_TILE):
        pair = done + tl.arange(0, DEPTH_TILE)
        row = tl.load(choice_of + pair, mask=pair < end, other=0) // TOP_K
        left_row, right_row = (row, pair) if LEFT_GATHERED else (pair, row)
        left_at = left + left_row.to(tl.int64)[None, :] * M + m[:, None]
        right_at = right + right_row.to(tl.int64)[:, None] * N + n[None, :]
        a = tl.load(left_at, mask=(pair < end)[None, :] & (m < M)[:, None], other=0.0)
        b = tl.load(right_at, mask=(pair < end)[:, None] & (n < N)[None, :], other=0.0)
        acc = dot(a, b, acc)
    out_at = out + expert * (M * N) + m[:, None] * N + n[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@jit()
def _sum_pairs(
    values: tensor, weights: tensor, out: tensor, choice_of: tensor, offsets: tensor, WIDTH: tl.constexpr,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for done in range(first, end, ROWS):
        pair = done + tl.arange(0, ROWS)
        there = pair < end
        row = pair
        if WEIGHTED:
            choice = tl.load(choice_of + pair, mask=there, other=0)
            row = choice // TOP_K
        at = values + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        value = tl.load(at, mask=there[:, None] & (column < WIDTH)[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + choice, mask=there, other=0.0)[:, None]
        acc += tl.sum(value, axis=0)
    tl.store(out + expert * WIDTH + column, acc.to(out.dtype.element_ty), mask=column < WIDTH)
