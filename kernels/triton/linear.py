"""Row-invariant linear layer, with autograd.

One kernel (`matmul`) serves the forward (``x @ W.T``), the gradient of x (``grad @ W``) and that of W (``grad.T @ x``,
a sum over the rows in their order). The tiles are the layer's; gradients take the one for many rows.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .equal_tiles import tiles_of
from .matmul import multiply
from .numeric import aligned
from .tiles import matmul_tiles


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
    tile = matmul_tiles(x.device, x.shape[1], grad.shape[1], x.dtype).tile
    return multiply(aligned(grad).t(), aligned(x), None, tile)


def gradient_of_inputs(grad: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``grad @ weight`` ``[R, K]`` in this dtype."""
    outputs, inputs = weight.shape
    tile = matmul_tiles(weight.device, inputs, outputs, weight.dtype).tile
    return multiply(aligned(grad), aligned(weight), None, tile, dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        outputs, inputs = weight.shape
        tiles = tiles_of(x.device, inputs, outputs, x.dtype, bias is not None)
        ctx.save_for_backward(x, weight)
        rows = aligned(x.reshape(-1, inputs))
        out = multiply(rows, aligned(weight).t(), bias, tiles.for_rows(len(rows)))
        return out.view(*x.shape[:-1], outputs)

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
