"""Compute paged causal attention on the CPU as operations call it: give the kernels of this folder arrays of tensors.

T tokens, S sequences, H heads, D head size. Pages hold B tokens of a KV head each (`samebit.kernels.layout.kv_pages`).
"""

from typing import Any

import numpy as np
import torch

from samebit.kernels.cpu.attention import backward, forward, write_pages
from samebit.kernels.cpu.base.jit import array, parameter_array
from samebit.kernels.cpu.base.memory import kind_of
from samebit.kernels.cpu.norm.forward import rms_norm_forward
from samebit.kernels.cpu.rope import rotate
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.options import AttentionOptions, HeadNorms, Saved
from samebit.kernels.layout.vision.segments import Segments
from samebit.kernels.openmp import num_threads

_SCATTER = 8
"""Writing a key touches a cache line for each element: it weighs more than its number of elements."""

_ZERO = np.float32(0.0)
_NO_LSE = np.empty((0, 0), np.float32)
_NO_SINKS = np.empty(0, np.float32)


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext, options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, Saved]:  # fmt: skip
    """Implement `Operations.attention_forward`."""
    if context.pages is not None:
        pages = context.pages[options.layer]
        _write(k, v, pages, context)
        return _attend(q, pages, context, options, sinks, None), ()
    tokens, kv_heads, head_dim = k.shape
    pages = torch.empty(context.num_blocks, kv_heads, 2, head_dim * context.block_size, dtype=k.dtype, device="cpu")
    lse = torch.zeros(tokens, q.shape[1], dtype=torch.float32, device="cpu")
    _write(k, v, pages, context)
    out = _attend(q, pages, context, options, sinks, lse)
    return out, (q, pages, out, lse) if sinks is None else (q, pages, out, lse, sinks)


def attention_of_unrotated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor],
    context: ForwardContext, options: AttentionOptions, sinks: torch.Tensor | None, norms: HeadNorms | None,
) -> tuple[torch.Tensor, tuple[Saved, Saved, Saved]]:  # fmt: skip
    """Implement `Operations.attention_of_unrotated`: in a rollout all is done on the way to the pages, in training one
    after the other, because each saves something."""
    if context.pages is None:
        of_queries: Saved = ()
        of_keys: Saved = ()
        if norms is not None:
            q, of_queries = rms_norm_forward(q, norms.queries, norms.eps, norms.offset)
            k, of_keys = rms_norm_forward(k, norms.keys, norms.eps, norms.offset)
        q, k = rotate(q, *angles, 1.0), rotate(k, *angles, 1.0)
        out, saved = attention_forward(q, k, v, context, options, sinks)
        return out, (saved, of_queries, of_keys)
    if norms is not None:
        norms = norms._replace(queries=norms.queries.contiguous(), keys=norms.keys.contiguous())
    pages, (cos, sin) = context.pages[options.layer], angles
    q, k, v, cos, sin = (part.contiguous() for part in (q, k, v, cos, sin))
    rotated = torch.empty_like(q)
    write_pages.rotate_and_write(
        q.numel() + _SCATTER * k.numel(), tuple(part.data_ptr() for part in (q, k, v, cos, sin, pages, rotated)),
        (*q.shape[:2], *k.shape[1:], cos.size(1), context.block_size, 0), _weights(norms, q.dtype),
        *context.blocks_and_offsets, kind_of(q.dtype),
    )  # fmt: skip
    return _attend(rotated, pages, context, options, sinks, None), ((), (), ())


def _weights(norms: HeadNorms | None, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return what `write_pages.rotate_and_write` normalises with, whose addresses ``norms`` holds."""
    if norms is None:
        return 0, kind_of(dtype), 0, kind_of(dtype), _ZERO, _ZERO, 0
    queries, keys, eps, offset = norms
    return (
        queries.data_ptr(), kind_of(queries.dtype), keys.data_ptr(), kind_of(keys.dtype), np.float32(offset),
        np.float32(eps), 0,
    )  # fmt: skip


def attention_backward(
    saved: Saved, grad: torch.Tensor, context: ForwardContext, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Implement `Operations.attention_backward`."""
    q, pages, out, lse, *sinks = saved
    tokens, _, head_dim = q.shape
    empty = torch.empty if context.covers_all_rows else torch.zeros  # padding rows are not written
    grad_q = empty(q.shape, dtype=q.dtype, device="cpu")
    grad_kv = empty(2, tokens, pages.shape[1], head_dim, dtype=q.dtype, device="cpu")
    deltas = empty(lse.shape, dtype=torch.float32, device="cpu")
    backward.backward(
        array(q.contiguous()), array(pages), context.layout.numpy(), context.block_tables, _scales(options),
        array(out), lse.numpy(), array(grad.contiguous()), array(grad_q), array(grad_kv), deltas.numpy(), num_threads(),
    )  # fmt: skip
    grad_sinks = _gradient_of_sinks(sinks[0], lse, deltas) if sinks else None
    return grad_q, grad_kv[0], grad_kv[1], grad_sinks


def segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Implement `Operations.segment_attention`."""
    _, heads, head_dim = k.shape
    size = head_dim * segments.keys.block_size
    pages = torch.empty(segments.keys.num_blocks, heads, 2, size, dtype=k.dtype, device="cpu")
    _write(k, v, pages, segments.keys)
    return _attend(q, pages, segments.rows, AttentionOptions(0, scale), None, None)


def _gradient_of_sinks(sinks: torch.Tensor, lse: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """Return what all rows together gain from a lower share of the sink ``[H]``; NumPy adds rows in their order.

    ``deltas`` ``[T, H]``: the products of a row's output and the gradient of it, 0 for padding rows.
    """
    shares = np.exp(sinks.double().numpy() - lse.double().numpy())
    return torch.from_numpy(-(shares * deltas.numpy()).sum(axis=0)).float()


def _scales(options: AttentionOptions) -> tuple[np.float32, np.float32, int]:
    return np.float32(options.scale), np.float32(options.softcap), options.window


def _write(k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, context: ForwardContext) -> None:
    blocks, offsets = context.blocks_and_offsets
    write_pages.write_pages(
        _SCATTER * k.numel(), array(k.contiguous()), array(v.contiguous()), blocks, offsets, context.block_size,
        array(pages).reshape(-1),
    )  # fmt: skip


def _attend(
    q: torch.Tensor, pages: torch.Tensor, context: ForwardContext, options: AttentionOptions,
    sinks: torch.Tensor | None, lse: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attend; ``lse`` ``[T, H]`` float32 gets the log-sum-exp of the scores where it is given."""
    q = q.contiguous()
    out = torch.empty_like(q) if context.covers_all_rows else torch.zeros_like(q)
    forward.attend(
        array(q), array(pages), context.layout.numpy(), context.block_tables, context.tiles, context.bunches,
        _scales(options), _NO_SINKS if sinks is None else parameter_array(sinks), array(out),
        _NO_LSE if lse is None else lse.numpy(), num_threads(),
    )  # fmt: skip
    return out
