"""Multiply each head's part of a row with that head's weight, with autograd.

Contract: a head's part of a result has the bits of `linear` of it alone: it depends neither on other rows, nor on other
heads, nor on the number of threads. Weights are read where they lie, a part of a larger parameter: nothing is copied
that an update of the parameter would have to follow. Gradients on the CPU are torch's own.
"""

from typing import Any

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.device import EXACT_EVERYWHERE, exact_dtypes, plain_backward
from samebit.kernels.layout.shape_checks import check_host
from samebit.kernels.ops.dispatch import operations_for


def multiply_heads(x: torch.Tensor, weight: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """Compute ``x[:, h] @ weight[h].T`` of every head h; transposed: ``x[:, h] @ weight[h]``.

    Args:
        x: ``[T, H, K]``, the dtype of ``weight``.
        weight: ``[H, N, K]``, transposed ``[H, K, N]``; each head's rows side by side, heads any distance apart.
        transposed: how the weight lies.

    Returns:
        ``[T, H, N]`` in the same dtype.

    Raises:
        ValueError: shapes that do not match, or a weight whose heads are not contiguous.
        TypeError: dtypes that differ, or others than float32 and bfloat16 (on a GPU float16 too).
    """
    _check(x, weight, transposed)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        product: torch.Tensor = _Heads.apply(x, weight, transposed)
        return product
    return operations_for(x).multiply_heads(x, weight, transposed)


def _check(x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> None:
    matching = x.dim() == weight.dim() == 3 and x.shape[1:] == (
        weight.shape[0],
        weight.shape[1] if transposed else weight.shape[2],
    )
    if not matching:
        allowed = "[heads, K, N]" if transposed else "[heads, N, K]"
        raise ValueError(f"x is {list(x.shape)}, weight {list(weight.shape)}; allowed: [T, heads, K] and {allowed}")
    if not weight[0].is_contiguous():
        raise ValueError(f"the weight has the strides {weight.stride()}; allowed: heads that are contiguous matrices")
    exact = x.dtype in EXACT_EVERYWHERE or x.dtype in exact_dtypes(x)
    if not exact or x.dtype is not weight.dtype:
        allowed = ", ".join(map(str, exact_dtypes(x)))
        raise TypeError(f"x is {x.dtype}, weight {weight.dtype}; allowed: all alike, of {allowed}")
    if not device.on_gpu(x):
        check_host("weight", weight)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(x)
        ctx.save_for_backward(x, weight)
        ctx.transposed = transposed
        return kernels.multiply_heads(x, weight, transposed)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        return *ctx.kernels.gradients_of_heads(x, weight, grad, ctx.transposed, (of_x, of_weight)), None
