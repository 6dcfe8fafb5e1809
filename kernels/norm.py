"""RMSNorm, gated RMSNorm and LayerNorm over the last axis, with autograd.

Contract: a row depends on that row alone; sums run in float32 in a fixed order; the result is rounded once,
to the dtype of the input. RMSNorm: Zhang & Sennrich 2019. LayerNorm: Ba et al. 2016.
Gated RMSNorm: Mamba2 (Dao & Gu 2024).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from . import device
from .cpu import norm as cpu
from .cpu.jit import array, parameter_array, strided_rows
from .cpu.memory import kind_of


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """``x / sqrt(mean(x**2) + eps) * (weight + offset)``.

    Args:
        x: ``[..., W]`` float32 or bfloat16.
        weight: ``[W]`` float32 or bfloat16.
        eps: added to the mean square.
        offset: 1.0 for Gemma, which stores ``weight - 1``.
    """
    if device.on_gpu(x):
        from .triton import norm as gpu

        return gpu.rms_norm(x, weight, eps, offset)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        normed: torch.Tensor = _RMSNorm.apply(x, weight, eps, offset)
        return normed
    return _rms_norm_forward(x, weight, eps, offset)[0]


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis of ``x``: ``[..., W]``."""
    if device.on_gpu(x):
        from .triton import norm as gpu

        return gpu.layer_norm(x, weight, bias, eps)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad):
        normed: torch.Tensor = _LayerNorm.apply(x, weight, bias, eps)
        return normed
    return _layer_norm_forward(x, weight, bias, eps)[0]


@dataclass(frozen=True)
class GatedNormOptions:
    """A gated RMSNorm: each of ``groups`` parts of the axis by itself, the gate before or after the norm."""

    eps: float
    groups: int
    gate_first: bool


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, options: GatedNormOptions
) -> torch.Tensor:
    """``norm(x * silu(gate)) * weight``, or ``norm(x) * weight * silu(gate)``.

    Args:
        x: ``[T, W]`` float32 or bfloat16, contiguous.
        gate: ``[T, W]``, same dtype; rows may be strided.
        weight: ``[W]`` float32 or bfloat16.
        options: which of the two, and the size of the groups.
    """
    if device.on_gpu(x):
        from .triton import norm as gpu

        return gpu.gated_rms_norm(x, gate, weight, options)
    if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad or weight.requires_grad):
        normed: torch.Tensor = _GatedRMSNorm.apply(x, gate, weight, options)
        return normed
    return _gated_rms_norm_forward(x, gate, weight, options)


def _gated_rms_norm_forward(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, options: GatedNormOptions
) -> torch.Tensor:
    rows, width = x.shape
    out = torch.empty_like(x)
    cpu.gated_rms_norm(
        x.numel(), array(x.contiguous()).reshape(-1), *strided_rows(gate), parameter_array(weight),
        np.float32(options.eps), rows, width, options.groups, options.gate_first, array(out).reshape(-1),
    )  # fmt: skip
    return out


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, options: GatedNormOptions
    ) -> torch.Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.options = options
        return _gated_rms_norm_forward(x, gate, weight, options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, gate, weight = ctx.saved_tensors
        options: GatedNormOptions = ctx.options
        first = options.gate_first
        share = torch.sigmoid(gate.float())
        silu = gate.float() * share
        value = x.float() * silu if first else x.float()
        parts = value.unflatten(-1, (options.groups, -1))
        scale = (parts.square().mean(-1, keepdim=True) + options.eps).rsqrt()
        normed = parts * scale
        flat = normed.flatten(-2)
        upstream = grad.float() if first else grad.float() * silu
        inner = (upstream * weight.float()).view_as(parts)
        grad_value = (scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))).flatten(-2)
        grad_silu = grad_value * x.float() if first else grad.float() * flat * weight.float()
        grad_gate = grad_silu * share * (1 + gate.float() * (1 - share))
        grad_x = grad_value * silu if first else grad_value
        return grad_x.to(x.dtype), grad_gate.to(gate.dtype), (upstream * flat).sum(0).to(weight.dtype), None


def _rms_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = x.contiguous(), weight.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty_like(x)
    inverse = torch.empty(rows, dtype=torch.float32)
    cpu.rms_norm(
        x.numel(), x.data_ptr(), kind_of(x.dtype), weight.data_ptr(), kind_of(weight.dtype), np.float32(offset),
        np.float32(eps), rows, width, out.data_ptr(), inverse.data_ptr(),
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
        x.numel(), array(x).reshape(-1), parameter_array(weight), parameter_array(bias), np.float32(eps), rows, width,
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
