"""Paged causal attention with autograd: prefill, mixed batches, decode and training through one kernel.

Contract: a query row's output depends on its own query and on the keys and values of its own sequence up to
its own position, walked in fixed chunks from position 0 (DESIGN: the row rule and the grid rule).
Grouped-query attention: Ainslie et al. 2023. Soft-capping: Gemma 2.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import get_num_threads
from torch.autograd.function import once_differentiable

from . import device
from .context import ForwardContext
from .cpu import attention as cpu
from .cpu import attention_backward as cpu_backward
from .cpu import pages as cpu_pages
from .cpu.jit import array
from .rope import RotaryTables, rotate

_SCATTER = 8
"""Writing a key touches a cache line for each element: it weighs more than its number of elements."""

_NO_LSE = np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class AttentionOptions:
    """What tells one attention layer from another.

    Attributes:
        layer: which pages of the context are its own.
        scale: factor on the scores.
        window: a token sees itself and the ``window - 1`` before it; 0 for all.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 for off.
    """

    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext, options: AttentionOptions
) -> torch.Tensor:
    """Put the call's keys and values into their pages, then attend.

    Args:
        q: ``[T, H, D]`` float32 or bfloat16, rotated.
        k: ``[T, KV heads, D]``, same dtype, rotated.
        v: ``[T, KV heads, D]``.
        context: the layout of the T rows. With pages (rollout) no gradient flows.
        options: the layer's scale, window and soft-cap.

    Returns:
        ``[T, H, D]``; zero for padding rows.

    Raises:
        ValueError: rows that are not the context's.
        TypeError: pages of another dtype.
    """
    _check_rows(q, k, v, context)
    if device.on_gpu(q):
        from .triton import attention as gpu

        _check_dtypes(k, v, k if context.pages is None else context.pages[options.layer])
        return gpu.attention(q, k, v, context, options)
    if context.pages is not None:
        pages = context.pages[options.layer]
        _write(k, v, pages, context)
        return _attend(q, pages, context, options, keep_lse=False)[0]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out: torch.Tensor = _Attention.apply(q, k, v, context, options)
        return out
    return _attend(q, _pages_of_call(k, v, context), context, options, keep_lse=False)[0]


def attention_of_rotated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: RotaryTables, options: AttentionOptions
) -> torch.Tensor:
    """`attention` of rotated queries and keys; in a rollout `rotate` happens on their way to the pages, same bits.

    Arguments, result and errors are those of `attention`; ``tables``: the angles and the layout of the T rows.
    """
    context = tables.context
    if context.pages is None or device.on_gpu(q):
        return attention(rotate(q, tables), rotate(k, tables), v, context, options)
    pages = context.pages[options.layer]
    _check_rows(q, k, v, context)
    _check_dtypes(k, v, pages)
    q = q.contiguous()
    rotated = torch.empty_like(q)
    blocks, offsets = context.slots
    cpu_pages.rotate_and_write(
        q.numel() + _SCATTER * k.numel(), array(q), array(k.contiguous()), array(v.contiguous()), tables.cos.numpy(),
        tables.sin.numpy(), blocks, offsets, context.block_size, array(pages).reshape(-1), array(rotated),
    )  # fmt: skip
    return _attend(rotated, pages, context, options, keep_lse=False)[0]


def _pages_of_call(k: torch.Tensor, v: torch.Tensor, context: ForwardContext) -> torch.Tensor:
    _, kv_heads, head_dim = k.shape
    pages = torch.empty(context.num_blocks, kv_heads, 2, head_dim * context.block_size, dtype=k.dtype)
    _write(k, v, pages, context)
    return pages


def _check_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext) -> None:
    if not q.shape[0] == k.shape[0] == v.shape[0] == context.num_rows:
        raise ValueError(
            f"q, k and v have {q.shape[0]}, {k.shape[0]} and {v.shape[0]} rows, the context {len(context.positions)}"
        )


def _check_dtypes(k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor) -> None:
    if not k.dtype == v.dtype == pages.dtype:
        raise TypeError(
            f"keys are {k.dtype} and values {v.dtype}, but the KV pages are {pages.dtype}: "
            "the model changed its dtype after the rollout worker was built"
        )


def _write(k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, context: ForwardContext) -> None:
    _check_dtypes(k, v, pages)
    blocks, offsets = context.slots
    cpu_pages.write_pages(
        _SCATTER * k.numel(), array(k.contiguous()), array(v.contiguous()), blocks, offsets, context.block_size,
        array(pages).reshape(-1),
    )  # fmt: skip


def _attend(
    q: torch.Tensor, pages: torch.Tensor, context: ForwardContext, options: AttentionOptions, keep_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q = q.contiguous()
    tokens, heads, _ = q.shape
    out = torch.empty_like(q) if context.covers_all_rows else torch.zeros_like(q)
    lse = torch.zeros(tokens, heads, dtype=torch.float32) if keep_lse else None
    cpu.attend(
        array(q), array(pages).reshape(-1), context.table_rows, context.block_tables, context.row_start,
        context.lengths, context.starts, context.tiles, pages.shape[1], context.block_size, np.float32(options.scale),
        options.window, np.float32(options.softcap), array(out), _NO_LSE if lse is None else lse.numpy(), keep_lse,
        get_num_threads(),
    )  # fmt: skip
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext, options: AttentionOptions
    ) -> torch.Tensor:
        pages = _pages_of_call(k, v, context)
        out, lse = _attend(q, pages, context, options, keep_lse=True)
        ctx.save_for_backward(q, pages, out, lse)
        ctx.layout, ctx.options, ctx.kv_shape = context, options, k.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, pages, out, lse = ctx.saved_tensors
        context, options = ctx.layout, ctx.options
        grad_q = torch.zeros(q.shape, dtype=torch.float32)
        grad_k = torch.zeros(ctx.kv_shape, dtype=torch.float32)
        grad_v = torch.zeros(ctx.kv_shape, dtype=torch.float32)
        cpu_backward.backward(
            array(q.contiguous()), array(pages).reshape(-1), context.table_rows, context.block_tables,
            context.row_start, context.lengths, context.block_size, np.float32(options.scale), options.window,
            np.float32(options.softcap), array(out), lse.numpy(), array(grad.contiguous()), grad_q.numpy(),
            grad_k.numpy(), grad_v.numpy(), get_num_threads(),
        )  # fmt: skip
        return grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype), None, None
