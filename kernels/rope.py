"""Rotary position embedding (Su et al. 2021, half-split layout) with autograd.

Contract: angles are float32 products of a position and a frequency computed from the model's config, never
from a module's buffer (``.to(bfloat16)`` truncates those); the rotation runs in float32 and rounds once.
"""

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from . import device
from .context import ForwardContext
from .cpu import rope as cpu
from .cpu.jit import array


class RotaryTables:
    """What a bound rotary module hands to the layers: the angles of one forward call, and its layout.

    Riding on an argument of the layer, the layout survives gradient checkpointing: the recomputation gets
    the same object, whatever forward call was made in between and in whichever thread it runs. No dataclass: FSDP2
    casts the tensors of those to the dtype it computes in, and angles stay float32.

    Attributes:
        cos: ``[T, R]`` float32, scaled by the model's attention scaling.
        sin: ``[T, R]`` float32.
        context: the layout of the T rows.
    """

    __slots__ = ("context", "cos", "sin")

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, context: ForwardContext) -> None:
        self.cos = cos
        self.sin = sin
        self.context = context


def rotary_tables(inverse_frequencies: torch.Tensor, scaling: float, context: ForwardContext) -> RotaryTables:
    """Angles of the context's positions; ``inverse_frequencies``: ``[R]`` float32 on their device."""
    angles = context.positions.to(torch.float32)[:, None] * inverse_frequencies[None, :]
    return RotaryTables(cos=angles.cos() * scaling, sin=angles.sin() * scaling, context=context)


def rotate(x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Rotate the first ``2 R`` elements of every head of ``x``: ``[T, H, D]``; the others are copied."""
    if device.on_gpu(x):
        from .triton import rope as gpu

        return gpu.rotate(x, tables.cos, tables.sin)
    if torch.is_grad_enabled() and x.requires_grad:
        rotated: torch.Tensor = _Rotate.apply(x, tables)
        return rotated
    return _rotate(x, tables, 1.0)


def _rotate(x: torch.Tensor, tables: RotaryTables, sign: float) -> torch.Tensor:
    x = x.contiguous()
    _, heads, head_dim = x.shape
    out = torch.empty_like(x)
    cpu.rotate(
        x.numel(), array(x).reshape(-1), heads * head_dim, heads, head_dim, tables.cos.numpy(), tables.sin.numpy(),
        np.float32(sign), array(out).reshape(-1),
    )  # fmt: skip
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
        ctx.tables = tables
        return _rotate(x, tables, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _rotate(grad, ctx.tables, -1.0), None
