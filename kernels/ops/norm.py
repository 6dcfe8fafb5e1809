"""Compute RMSNorm, gated RMSNorm and LayerNorm over the last axis, with autograd.

Contract: a row depends on that row alone; sums run in float32 in a fixed order; the result is rounded once,
to the dtype of the input. RMSNorm: Zhang & Sennrich 2019. LayerNorm: Ba et al. 2016.
Gated RMSNorm: Mamba2 (Dao & Gu 2024).
"""

from typing import Any

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.options import GatedNormOptions
from samebit.kernels.layout.shape_checks import check_dtype, check_dtype_of_cpu, check_host, check_shape
from samebit.kernels.ops.dispatch import operations_for


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Compute ``x / sqrt(mean(x**2) + eps) * (weight + offset)``.

    Args:
        x: ``[..., W]`` float32 or bfloat16.
        weight: ``[W]`` float32 or bfloat16.
        eps: added to the mean square.
        offset: 1.0 for Gemma, which stores ``weight - 1``.

    Raises:
        ValueError: a weight of another width.
        TypeError: other dtypes.
    """
    check_rows(x, weight=weight)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        normed: torch.Tensor = _RMSNorm.apply(x, weight, eps, offset)
        return normed
    return operations_for(x).rms_norm_forward(x, weight, eps, offset)[0]


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Write ``x + y``, rounded to their dtype, to ``total``, and return its RMSNorm as `rms_norm` computes it.

    Args:
        x: ``[..., W]`` float32 or bfloat16, without gradient; ``y`` is like it, both contiguous.
        total: like them; where the sum has a gradient it stands in its graph already, and gets that of the norm.
        weight: as in `rms_norm`, and so are the others.

    Raises:
        ValueError: other shapes, or a weight of another width.
        TypeError: other dtypes.
    """
    check_rows(x, weight=weight)
    for name, part in (("y", y), ("total", total)):
        check_shape(name, part, *x.shape)
        check_dtype(name, part, x.dtype)
    if torch.is_grad_enabled() and (total.requires_grad or weight.requires_grad):
        normed: torch.Tensor = _AddRMSNorm.apply(total, weight, x, y, eps, offset)
        return normed
    return operations_for(x).add_rms_norm(x, y, total, weight, eps, offset)[0]


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis of ``x``: ``[..., W]``.

    Raises:
        ValueError: a weight or a bias of another width.
        TypeError: other dtypes.
    """
    check_rows(x, weight=weight, bias=bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad):
        normed: torch.Tensor = _LayerNorm.apply(x, weight, bias, eps)
        return normed
    return operations_for(x).layer_norm_forward(x, weight, bias, eps)[0]


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, options: GatedNormOptions
) -> torch.Tensor:
    """Compute ``norm(x * silu(gate)) * weight``, or ``norm(x) * weight * silu(gate)``; or with sigmoid instead of silu.

    Args:
        x: ``[T, W]`` float32 or bfloat16, contiguous.
        gate: ``[T, W]``, same dtype; rows may be strided.
        weight: ``[W]`` float32 or bfloat16; or that of one group, which all of them share.
        options: which of the two, and the size of the groups.

    Raises:
        ValueError: a gate or a weight of another shape, groups that do not divide the width.
        TypeError: other dtypes.
    """
    check_rows(x)
    if x.dim() != 2 or gate.shape != x.shape or options.groups < 1 or x.shape[1] % options.groups:
        raise ValueError(
            f"x is {list(x.shape)} and gate {list(gate.shape)}, in {options.groups} groups; allowed: two alike, "
            "[T, W], and a number of groups that divides W"
        )
    if gate.dtype is not x.dtype:
        raise TypeError(f"x is {x.dtype} and gate {gate.dtype}; allowed: two alike")
    shared = weight.shape == (x.shape[1] // options.groups,)
    if not shared:
        check_shape("weight", weight, x.shape[1])
    if not device.on_gpu(x):
        check_host("gate", gate)
        check_host("weight", weight)
        check_dtype_of_cpu(weight.dtype)
    if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad or weight.requires_grad):
        each = weight.repeat(options.groups) if shared else weight
        normed: torch.Tensor = _GatedRMSNorm.apply(x, gate, each, options)
        return normed
    return operations_for(x).gated_rms_norm_forward(x, gate, weight, options)[0]


def check_rows(x: torch.Tensor, **of_width: torch.Tensor) -> None:
    """Check that the others are ``[W]`` like a row of ``x``, and on the CPU that its kernels can read all of them."""
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"x has the shape {list(x.shape)}; allowed: [..., W], W at least 1")
    for name, part in of_width.items():
        check_shape(name, part, x.shape[-1])
        if not device.on_gpu(x):
            check_host(name, part)
            check_dtype_of_cpu(part.dtype)
    if not device.on_gpu(x):
        check_dtype_of_cpu(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(x)
        out, saved = kernels.rms_norm_forward(x, weight, eps, offset)
        ctx.save_for_backward(*saved)
        ctx.eps, ctx.offset = eps, offset
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        return *ctx.kernels.rms_norm_backward(ctx.saved_tensors, grad, ctx.eps, ctx.offset), None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(x)
        out, saved = kernels.add_rms_norm(x, y, total.detach(), weight, eps, offset)
        ctx.save_for_backward(*saved)
        ctx.eps, ctx.offset = eps, offset
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None, None]:
        return *ctx.kernels.rms_norm_backward(ctx.saved_tensors, grad, ctx.eps, ctx.offset), None, None, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(x)
        out, saved = kernels.layer_norm_forward(x, weight, bias, eps)
        ctx.save_for_backward(*saved)
        ctx.eps = eps
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        return *ctx.kernels.layer_norm_backward(ctx.saved_tensors, grad, ctx.eps), None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, options: GatedNormOptions
    ) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(x)
        out, saved = kernels.gated_rms_norm_forward(x, gate, weight, options)
        ctx.save_for_backward(*saved)
        ctx.options = options
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        return *ctx.kernels.gated_rms_norm_backward(ctx.saved_tensors, grad, ctx.options), None
