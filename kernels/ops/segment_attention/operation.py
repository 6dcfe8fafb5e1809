"""Compute attention of rows to all rows of their own segment, with autograd: windows and images of a vision tower.

Contract (the row rule and the grid rule of docs/exactness.md): a row's output depends on its own query and on the keys
and values of its segment, walked in fixed chunks from the segment's first row on. What other segments are beside it
changes no bit. Gradients agree to rounding where segments are laid out otherwise.
"""

from collections.abc import Sequence
from typing import Any

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.shape_checks import check_dtype, check_dtype_of_cpu, check_host, check_shape
from samebit.kernels.layout.vision.segments import Segments
from samebit.kernels.ops.dispatch import operations_for
from samebit.kernels.ops.segment_attention.gradients import gradients


def segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments | Sequence[int] | torch.Tensor, scale: float
) -> torch.Tensor:
    """Let every row attend to all rows of its segment.

    Args:
        q: ``[T, H, D]`` float32 or bfloat16, rotated.
        k: like ``q``.
        v: like ``q``.
        segments: what the T rows are cut into. `Segments`, made once for all layers, or the lengths of consecutive
            segments, which are laid out anew in each call.
        scale: factor on the scores.

    Returns:
        ``[T, H, D]``.

    Raises:
        ValueError: shapes or devices that differ, segments of other rows, a segment without rows.
        TypeError: dtypes that differ or are not exact on the device, lengths that are no integers.
    """
    if not isinstance(segments, Segments):
        segments = Segments.of(segments, q.device)
    _check(q, k, v, segments)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out: torch.Tensor = _SegmentAttention.apply(q, k, v, segments, scale)
        return out
    return operations_for(q).segment_attention(q, k, v, segments, scale)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> None:
    """Check shapes, dtypes and devices."""
    if q.dim() != 3 or 0 in q.shape[1:]:
        raise ValueError(f"q has the shape {list(q.shape)}; allowed: [T, H, D], at least 1 head of 1 element")
    if segments.num_rows != len(q):
        raise ValueError(f"segments have {segments.num_rows} rows together, and q has {len(q)}; allowed: as many")
    for name, part in (("k", k), ("v", v)):
        check_shape(name, part, *q.shape)
        check_dtype(name, part, q.dtype)
    if not device.on_gpu(q):
        check_dtype_of_cpu(q.dtype)
        for name, part in (("q", q), ("k", k), ("v", v)):
            check_host(name, part)
    if segments.device != q.device:
        raise ValueError(f"segments were laid out for {segments.device}, and q is on {q.device}; allowed: one device")


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.segments, ctx.scale = segments, scale
        return operations_for(q).segment_attention(q, k, v, segments, scale)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        return *gradients(q, k, v, grad, ctx.segments, ctx.scale), None, None
