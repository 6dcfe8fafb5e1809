"""Multiply each head's part of a row with that head's weight, and the gradients of it: one kernel.

Invariant: a row's products are the chain of `matmul`, with one tile for all calls of a layer, whatever other rows and
heads there are. Operands are read where they lie, as parts of larger tensors. T rows, H heads, K inputs, N outputs.
"""

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.triton.matmul import GROUP, chain, tile_of_program
from samebit.kernels.triton.numeric import jit
from samebit.kernels.triton.tiles.table import matmul_tiles


def multiply_heads(x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Implement `Operations.multiply_heads`."""
    matrix = weight if transposed else weight.mT
    out = x.new_empty(*x.shape[:2], matrix.shape[2])
    _multiply_into(out.transpose(0, 1), x.transpose(0, 1), matrix)
    return out


def gradients_of_heads(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, transposed: bool, needed: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Implement `Operations.gradients_of_heads`."""
    of_x = of_weight = None
    inputs, upstream = x.transpose(0, 1), grad.contiguous().transpose(0, 1)
    if needed[0]:
        of_x = x.new_empty(x.shape)
        _multiply_into(of_x.transpose(0, 1), upstream, weight.mT if transposed else weight)
    if needed[1]:
        of_weight = weight.new_empty(weight.shape)
        left, right = (inputs, upstream) if transposed else (upstream, inputs)
        _multiply_into(of_weight, left.mT, right)
    return of_x, of_weight


def _multiply_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Write ``out[h] = a[h] @ b[h]``: ``[H, M, N]`` of ``[H, M, depth]`` and ``[H, depth, N]``, of any strides but for
    the rows of ``out``, which are contiguous."""
    heads, rows, depth = a.shape
    outputs = b.shape[2]
    tile = matmul_tiles(a.device, depth if a.stride(2) == 1 else rows, outputs, a.dtype).tile
    by_rows = a.stride(2) == 1  # else the depth is a number of rows, which changes from call to call
    if out.numel():
        _multiply[(ceil_div(rows, tile.rows) * ceil_div(outputs, tile.outputs), heads)](
            a, b, out, rows, depth, *a.stride(), *b.stride(), *out.stride()[:2], outputs,
            depth if by_rows else 0, 0 if by_rows else rows, tile.rows, tile.outputs, tile.depth, GROUP,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


@jit(do_not_specialize=["rows", "depth"])
def _multiply(
    a: tensor, b: tensor, out: tensor, rows: tensor, depth: tensor, A_HEAD: tl.constexpr, A_ROW: tl.constexpr,
    A_DEPTH: tl.constexpr, B_HEAD: tl.constexpr, B_DEPTH: tl.constexpr, B_OUTPUT: tl.constexpr, OUT_HEAD: tl.constexpr,
    OUT_ROW: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, ROW_TILE: tl.constexpr,
    OUTPUT_TILE: tl.constexpr, DEPTH_TILE: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of a head's result; ``DEPTH``, ``ROWS``: these where they are the layer's, else 0, so that masks
    along contiguous elements end at a number known when the kernel is compiled."""
    row_tile, output_tile = tile_of_program(tl.cdiv(rows, ROW_TILE), tl.cdiv(OUTPUTS, OUTPUT_TILE), GROUP)
    head = tl.program_id(1).to(tl.int64)
    row = row_tile * ROW_TILE + tl.arange(0, ROW_TILE)
    output = output_tile * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    real_rows, real_outputs = row[:, None] < (ROWS if ROWS else rows), output[None, :] < OUTPUTS
    a_at = a + head * A_HEAD + row.to(tl.int64)[:, None] * A_ROW
    b_at = b + head * B_HEAD + output.to(tl.int64)[None, :] * B_OUTPUT
    acc = chain(
        a_at, b_at, real_rows, real_outputs, DEPTH if DEPTH else depth, A_DEPTH, B_DEPTH,
        DEPTH > 0 and DEPTH % DEPTH_TILE == 0, ROW_TILE, OUTPUT_TILE, DEPTH_TILE,
    )  # fmt: skip
    out_at = out + head * OUT_HEAD + row.to(tl.int64)[:, None] * OUT_ROW + output[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=real_rows & real_outputs)
