"""Compute paged causal attention with autograd: prefill, mixed batches, decode and training through one kernel.

Contract (the row rule and the grid rule of docs/exactness.md): a query row's output depends on its own query and on the
keys and values of its own sequence up to its own position, walked in fixed chunks from position 0.
Grouped-query attention: Ainslie et al. 2023. Soft-capping: Gemma 2. Sinks: gpt-oss; a sink is where the row's softmax
begins, before its first chunk of keys.
"""

from typing import Any

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.forward_context import TRAINING_BLOCK, ForwardContext
from samebit.kernels.layout.grids import KV_CHUNK
from samebit.kernels.layout.options import AttentionOptions, HeadNorms
from samebit.kernels.layout.shape_checks import check_dtype, check_dtype_of_cpu, check_host, check_shape
from samebit.kernels.ops.dispatch import operations_for
from samebit.kernels.ops.errors import changed_dtype
from samebit.kernels.ops.norm import check_rows
from samebit.kernels.ops.rope import RotaryTables, check_rotation


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext, options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Put the call's keys and values into their pages, then attend.

    Args:
        q: ``[T, H, D]`` float32 or bfloat16, rotated.
        k: ``[T, KV heads, D]``, same dtype, rotated.
        v: ``[T, KV heads, D]``.
        context: the layout of the T rows. With pages (rollout) no gradient flows.
        options: the layer's scale, window and soft-cap.
        sinks: ``[H]`` float32, a score of each head that every token sees beside those of its keys and that has no
            value, not scaled and not capped; None for none.

    Returns:
        ``[T, H, D]``; zero for padding rows.

    Raises:
        ValueError: rows that are not the context's, heads that do not match each other or the pages, sinks of other
            heads.
        TypeError: dtypes that differ, pages of another dtype, sinks that are not float32.
    """
    _check(q, k, v, context, options, sinks)
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    if context.pages is None and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        out: torch.Tensor = _Attention.apply(q, k, v, sinks, context, options)
        return out
    return operations_for(q).attention_forward(q, k, v, context, options, sinks)[0]


def attention_of_rotated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: RotaryTables, options: AttentionOptions,
    sinks: torch.Tensor | None = None, norms: HeadNorms | None = None,
) -> torch.Tensor:  # fmt: skip
    """Do as `attention` of queries and keys that are normalised, where there are ``norms``, and rotated.

    That may happen on their way to the pages, with the same bits. Arguments, result and errors are those of
    `attention`; ``tables``: the angles and the layout of the T rows.
    """
    context = tables.context
    check_rotation("q", q, tables)
    check_rotation("k", k, tables)
    _check(q, k, v, context, options, sinks)
    if norms is not None:
        check_rows(q, weight=norms.queries)
        check_rows(k, weight=norms.keys)
    weights = (None, None) if norms is None else (norms.queries, norms.keys)
    given = [tensor for tensor in (q, k, v, sinks, *weights) if tensor is not None]
    if context.pages is None and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        out: torch.Tensor = _AttentionOfRotated.apply(q, k, v, sinks, *weights, tables, options, norms)
        return out
    angles = tables.cos, tables.sin
    return operations_for(q).attention_of_unrotated(q, k, v, angles, context, options, sinks, norms)[0]


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext, options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    """Check shapes, dtypes and pages, and on the CPU what its kernels can read."""
    if q.dim() != 3 or k.shape != v.shape or k.dim() != 3 or not q.shape[0] == k.shape[0] == context.num_rows:
        rows = context.num_rows
        raise ValueError(
            f"q, k and v have the shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}, the context has {rows} "
            f"rows; allowed: [{rows}, heads, D], and twice [{rows}, KV heads, D]"
        )
    _, kv_heads, head_dim = k.shape
    if not kv_heads or q.shape[1] % kv_heads or q.shape[2] != head_dim:
        raise ValueError(
            f"q has {q.shape[1]} heads of {q.shape[2]} elements, k and v have {kv_heads} of {head_dim}; allowed: a "
            "multiple of their number, and their size"
        )
    if q.dtype is not k.dtype:
        raise TypeError(f"queries are {q.dtype} and keys {k.dtype}; allowed: all alike")
    if sinks is not None:
        check_shape("sinks, one a query head,", sinks, q.shape[1])
        check_dtype("sinks", sinks, torch.float32)
    pages = None if context.pages is None else context.pages[options.layer]
    if pages is not None:
        _check_pages(pages, kv_heads, head_dim, context)
    if not device.on_gpu(q):
        check_dtype_of_cpu(q.dtype)
        check_host("k", k)
        check_host("v", v)
        if sinks is not None:
            check_host("sinks", sinks)
        if pages is None and context.block_size != TRAINING_BLOCK:
            raise ValueError(f"a context without pages has blocks of {context.block_size}; allowed: {TRAINING_BLOCK}")
    elif context.block_size % KV_CHUNK:
        raise ValueError(f"a GPU reads pages of {context.block_size} tokens; allowed: a multiple of {KV_CHUNK}")
    held = k.dtype if pages is None else pages.dtype
    if not k.dtype == v.dtype == held:
        raise changed_dtype(f"keys are {k.dtype} and values {v.dtype}", "KV pages", held)


def _check_pages(pages: torch.Tensor, kv_heads: int, head_dim: int, context: ForwardContext) -> None:
    check_shape("the layer's KV memory", pages, len(pages), kv_heads, 2, head_dim * context.block_size)
    if not pages.is_contiguous():
        raise ValueError("the layer's KV memory is not contiguous: what is written to a copy of it would be lost")
    if pages.is_cpu and context.last_written_block >= len(pages):
        raise ValueError(f"block {context.last_written_block} is to be written; the layer has {len(pages)} of them")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        context: ForwardContext, options: AttentionOptions,
    ) -> torch.Tensor:  # fmt: skip
        kernels = ctx.kernels = operations_for(q)
        out, saved = kernels.attention_forward(q, k, v, context, options, sinks)
        ctx.save_for_backward(*saved)
        ctx.layout, ctx.options = context, options
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.kernels.attention_backward(ctx.saved_tensors, grad, ctx.layout, ctx.options), None, None


class _AttentionOfRotated(torch.autograd.Function):
    """Goes back as the operations each would: through attention, the rotation, and the norms where there are any."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        query_weight: torch.Tensor | None, key_weight: torch.Tensor | None, tables: RotaryTables,
        options: AttentionOptions, norms: HeadNorms | None,
    ) -> torch.Tensor:  # fmt: skip
        kernels = ctx.kernels = operations_for(q)
        angles = tables.cos, tables.sin
        out, saved = kernels.attention_of_unrotated(q, k, v, angles, tables.context, options, sinks, norms)
        ctx.save_for_backward(*(tensor for part in saved for tensor in part))
        ctx.lengths = [len(part) for part in saved]
        ctx.tables, ctx.options = tables, options
        ctx.of_norms = None if norms is None else (norms.eps, norms.offset)
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kernels, tables = ctx.kernels, ctx.tables
        attended, keys = ctx.lengths[0], sum(ctx.lengths[:2])
        saved = ctx.saved_tensors
        grad_q, grad_k, grad_v, grad_sinks = kernels.attention_backward(
            saved[:attended], grad, tables.context, ctx.options
        )
        grad_q, grad_k = (kernels.rotate(part, tables.cos, tables.sin, -1.0) for part in (grad_q, grad_k))
        of_queries = of_keys = None
        if ctx.of_norms is not None:
            grad_q, of_queries = kernels.rms_norm_backward(saved[attended:keys], grad_q, *ctx.of_norms)
            grad_k, of_keys = kernels.rms_norm_backward(saved[keys:], grad_k, *ctx.of_norms)
        return grad_q, grad_k, grad_v, grad_sinks, of_queries, of_keys, None, None, None
