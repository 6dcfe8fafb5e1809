"""RMSNorm and LayerNorm over the last axis, with autograd.

Contract: a row depends on that row alone; sums run in float32 in a fixed order; the result is rounded once,
to the dtype of the input. RMSNorm: Zhang & Sennrich 2019. LayerNorm: Ba et al. 2016.
"""

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from .cpu import norm as cpu
from .cpu.jit import array


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """``x / sqrt(mean(x**2) + eps) * (weight + offset)``.

    Args:
        x: ``[..., W]`` float32 or bfloat16.
        weight: ``[W]`` float32 or bfloat16.
        eps: added to the mean square.
        offset: 1.0 for Gemma, which stores ``weight - 1``.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        normed: torch.Tensor = _RMSNorm.apply(x, weight, eps, offset)
        return normed
    return _rms_norm_forward(x, weight, eps, offset)[0]


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis of ``x``: ``[..., W]``."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad):
        normed: torch.Tensor = _LayerNorm.apply(x, weight, bias, eps)
        return normed
    return _layer_norm_forward(x, weight, bias, eps)[0]


def _rms_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty_like(x)
    inverse = torch.empty(rows, dtype=torch.float32)
    cpu.rms_norm(
        x.numel(), array(x).reshape(-1), array(weight), np.float32(offset), np.float32(eps), rows, width,
        array(out).reshape(-1), inverse.numpy(),
    )  # fmt: skip
    return out, inverse


def _layer_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty_like(x)
    mean = torch.empty(rows, dtype=torch.float32)
    inverse = torch.empty(rows, dtype=torch.float32)
    cpu.layer_norm(
        x.numel(), array(x).reshape(-1), array(weight), array(bias), np.float32(eps), rows, width,
        array(out).reshape(-1), mean.numpy(), inverse.numpy(),
    )  # fmt: skip
    return out, mean, inverse


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        out, inverse = _rms_norm_forward(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        scale = inverse.view(*x.shape[:-1], 1)
        normed = x.float() * scale
        upstream = grad.float()
        inner = upstream * (weight.float() + ctx.offset)
        grad_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        grad_weight = (upstream * normed).reshape(-1, x.shape[-1]).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        out, mean, inverse = _layer_norm_forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, weight, mean, inverse = ctx.saved_tensors
        scale = inverse.view(*x.shape[:-1], 1)
        normed = (x.float() - mean.view_as(scale)) * scale
        upstream = grad.float()
        inner = upstream * weight.float()
        centered = inner - inner.mean(-1, keepdim=True)
        grad_x = scale * (centered - normed * (inner * normed).mean(-1, keepdim=True))
        rows = upstream.reshape(-1, x.shape[-1])
        grad_weight = (rows * normed.reshape(-1, x.shape[-1])).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), rows.sum(0).to(weight.dtype), None
