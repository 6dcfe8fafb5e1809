"""Row-invariant linear layer, with autograd.

Contract: ``linear(x, w, b)[i]`` depends on ``x[i]`` alone, not on how many rows are multiplied with it nor
on the number of threads. In float32 the order of the sum is written out (`cpu.gemm`). Other dtypes are torch's, whose
GEMMs keep that promise only while every thread has at least four rows, so the rows are padded with zeros to a multiple
of `ROW_TILE`; measured, not proved: ``samebit check`` repeats the measurement with the shapes of your model on your
machine. Gradients are torch's own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from numba import get_num_threads
from torch import nn
from torch.nn import functional as F

from . import device
from .cpu import gemm

ROW_TILE = 16
"""Rows of torch's GEMMs are padded to a multiple of this."""

FEWEST_OUTPUTS = 16
"""With fewer outputs a row's bits in torch's GEMMs depend on its address, so on its place: zeros are added."""

_PRODUCTS_AN_ELEMENT = 16
"""Products that take the time of one element of a row-wise kernel."""

Layer = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias."""


def row_tile(weight: torch.Tensor) -> int:
    """Rows that a product with this weight is padded to a multiple of: 1 where the kernel is our own."""
    return 1 if weight.dtype == torch.float32 or device.on_gpu(weight) else ROW_TILE


def padded_rows(rows: int, tile: int = ROW_TILE) -> int:
    """``rows`` rounded up to a whole number of row tiles."""
    return -(-rows // tile) * tile


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` with bits that do not depend on the other rows.

    Args:
        x: ``[..., K]``, the dtype of ``weight``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.

    Returns:
        ``[..., N]`` in the same dtype.
    """
    if device.on_gpu(x):
        from .triton import linear as gpu

        return gpu.linear(x, weight, bias)
    if not x.dtype == weight.dtype == torch.float32:
        return _padded(x, weight, bias) if weight.shape[0] >= FEWEST_OUTPUTS else _narrow(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        product: torch.Tensor = _Linear.apply(x, weight, bias)
        return product
    return _multiplied(x, weight, bias)


def linears(x: torch.Tensor, modules: Sequence[nn.Linear]) -> list[torch.Tensor]:
    """Each module's own call on the same ``x``, or one call of all where nobody could tell: the same bits.

    Args:
        x: ``[..., K]``.
        modules: up to three bound ones, each ``[N, K]``.
    """
    if x.dtype == torch.float32 and not torch.is_grad_enabled() and not device.on_gpu(x):
        layers = [(module.weight, module.bias) for module in modules if _is_plain(module)]
        if len(layers) == len(modules) and all(weight.dtype == torch.float32 for weight, _ in layers):
            return _multiplied_at_once(x, layers)
    return [module(x) for module in modules]


def _is_plain(module: nn.Module) -> bool:
    """Whether a call does no more than multiply: no adapter in the module's place, no hook."""
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _multiplied(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight if of_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _multiplied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _multiplied_at_once(x, [(weight, bias)])[0]


def _multiplied_at_once(x: torch.Tensor, layers: Sequence[Layer]) -> list[torch.Tensor]:
    """The products of up to three layers, which share the preparation of ``x`` and the start of the threads."""
    *shape, inputs = x.shape
    rows = _with_unit_stride(x if len(shape) == 1 else x.reshape(-1, inputs))
    places = list(gemm.NO_LAYERS)
    results: list[torch.Tensor] = []
    count = rows.shape[0]
    layers = [(weight.contiguous(), None if bias is None else bias.contiguous()) for weight, bias in layers]
    for place, (weight, bias) in enumerate(layers):
        outputs, depth = weight.shape
        if depth != inputs or (bias is not None and bias.shape != (outputs,)):
            raise ValueError(
                f"x is {list(x.shape)}, weight {list(weight.shape)}, "
                f"bias {None if bias is None else list(bias.shape)}; allowed: [..., K], [N, K] and [N] or None"
            )
        out = torch.empty(*shape, outputs)
        results.append(out)
        places[place] = weight.data_ptr(), 0 if bias is None else bias.data_ptr(), outputs, out.data_ptr()
    work = padded_rows(count) * inputs * max(place[2] for place in places) // _PRODUCTS_AN_ELEMENT
    gemm.multiply(work, rows.data_ptr(), rows.stride(0), count, inputs, *places, get_num_threads())
    return results


def _with_unit_stride(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _padded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    missing = -(x.numel() // x.shape[-1]) % ROW_TILE
    if missing == 0 and x.dim() <= 3:
        return F.linear(x.contiguous(), weight, bias)  # torch folds these into the same matrix product
    rows = x.reshape(-1, x.shape[-1])
    padded = F.linear(F.pad(rows, (0, 0, 0, missing)), weight, bias)
    return padded[: rows.shape[0]].view(*x.shape[:-1], weight.shape[0])


def _narrow(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    outputs = weight.shape[0]
    missing = FEWEST_OUTPUTS - outputs
    wide_bias = None if bias is None else F.pad(bias, (0, missing))
    return linear(x, F.pad(weight, (0, 0, 0, missing)), wide_bias)[..., :outputs].contiguous()
