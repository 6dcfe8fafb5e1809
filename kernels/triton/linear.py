"""Row-invariant matrix product: fixed tiles, the whole depth in one float32 accumulator, in order.

One kernel serves the forward (``x @ W.T``), the gradient of x (``grad @ W``) and that of W (``grad.T @ x``, a sum over
the rows in their order).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable
from triton.language import tensor

from .numeric import aligned, blocks, dot
from .tiles import matmul_tile

_GROUP = 8
"""Row tiles whose programs run side by side for one tile of outputs after the other: they share the cache."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `samebit.kernels.linear.linear`."""
    outputs, inputs = weight.shape
    if x.shape[-1] != inputs or (bias is not None and bias.shape != (outputs,)):
        raise ValueError(
            f"x is {list(x.shape)}, weight {list(weight.shape)}, bias {None if bias is None else list(bias.shape)}; "
            "allowed: [..., K], [N, K] and [N] or None"
        )
    if x.dtype != weight.dtype:
        raise TypeError(f"x is {x.dtype}, weight {weight.dtype}: they must be alike")
    product: torch.Tensor = _Linear.apply(x, weight, bias)
    return product


def gradient_of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As `samebit.kernels.linear.gradient_of_weight`."""
    return _product(aligned(grad).t(), aligned(x), None, x.dtype)


def gradient_of_inputs(grad: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``grad @ weight`` ``[R, K]`` in this dtype."""
    return _product(aligned(grad), aligned(weight), None, dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = _product(aligned(x.reshape(-1, x.shape[-1])), aligned(weight).t(), bias, x.dtype)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            gradient_of_inputs(rows, weight, x.dtype).view(x.shape) if of_x else None,
            gradient_of_weight(rows, x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b + bias``, rounded to ``dtype``.

    ``a``: ``[M, K]``, ``b``: ``[K, N]``, each contiguous or the transpose of what is.
    """
    rows, depth = a.shape
    outputs = b.shape[1]
    out = torch.empty(rows, outputs, dtype=dtype, device=a.device)
    tile = matmul_tile(depth, outputs, a.dtype)
    grid = (blocks(rows, tile.rows) * blocks(outputs, tile.outputs),)
    if out.numel() == 0:
        return out
    by_rows = a.stride(1) == 1  # else the depth is a number of rows, which changes from call to call
    _multiply[grid](
        a, b, out if bias is None else aligned(bias), out, rows, depth, *a.stride(), *b.stride(), outputs,
        bias is not None, by_rows and depth % tile.depth == 0, tile.rows, tile.outputs, tile.depth, _GROUP,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "depth"])
def _multiply(
    a: tensor, b: tensor, bias: tensor, out: tensor, rows: tensor, depth: tensor, A_ROW: tl.constexpr,
    A_DEPTH: tl.constexpr, B_DEPTH: tl.constexpr, B_OUTPUT: tl.constexpr, OUTPUTS: tl.constexpr, BIASED: tl.constexpr,
    WHOLE: tl.constexpr, ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr, DEPTH_TILE: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:  # fmt: skip
    row_tiles, output_tiles = tl.cdiv(rows, ROW_TILE), tl.cdiv(OUTPUTS, OUTPUT_TILE)
    program = tl.program_id(0)
    first = program // (GROUP * output_tiles) * GROUP
    beside = tl.minimum(row_tiles - first, GROUP)
    inside = program % (GROUP * output_tiles)
    row = (first + inside % beside) * ROW_TILE + tl.arange(0, ROW_TILE)
    output = inside // beside * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    step = tl.arange(0, DEPTH_TILE)
    real_rows, real_outputs = row[:, None] < rows, output[None, :] < OUTPUTS
    a_at = a + row.to(tl.int64)[:, None] * A_ROW + step[None, :] * A_DEPTH
    b_at = b + step[:, None] * B_DEPTH + output.to(tl.int64)[None, :] * B_OUTPUT
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
    if BIASED:
        acc += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    out_at = out + row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=real_rows & real_outputs)
