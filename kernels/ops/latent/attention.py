"""Compute paged causal attention over latents, with autograd: prefill, mixed batches, decode and training through one
kernel.

A token is one row of memory: its latent, and its rotated key, which all heads share. The row is the key of every head,
and its latent the value: attention of many query heads over one KV head whose value is the beginning of its key.
Multi-head latent attention in its absorbed form: DeepSeek-V2 (2024), section 2.1.

A row may attend to some of the tokens before it alone, those that an indexer has chosen for it (DeepSeek-V3.2, 2025).

Contract (the row rule and the grid rule of docs/exactness.md): a query row's output depends on its own query and on the
rows of its own sequence up to its own position, walked in fixed chunks from position 0; of chosen tokens, in fixed
chunks of their list. A row for which all tokens are chosen has the bits of one for which none had to be.
"""

from typing import Any

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.forward_context import TRAINING_BLOCK, ForwardContext
from samebit.kernels.layout.options import LatentOptions
from samebit.kernels.layout.shape_checks import check_dtype, check_dtype_of_cpu, check_host, check_shape
from samebit.kernels.ops.dispatch import operations_for
from samebit.kernels.ops.errors import changed_dtype


def latent_attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    context: ForwardContext,
    options: LatentOptions,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Put the call's latents into their pages, then attend.

    Args:
        q: ``[T, H, rank + rope]`` float32 or bfloat16: absorbed queries, and behind them the rotated ones.
        latents: ``[T, rank + rope]``, same dtype: latents, and behind them the rotated keys.
        context: the layout of the T rows. With pages (rollout) no gradient flows.
        options: the layer's scale and sizes.
        chosen: what `selection.choose_keys` returned for these rows; None for all tokens up to a row's own.

    Returns:
        ``[T, H, rank]``; zero for padding rows.

    Raises:
        ValueError: rows that are not the context's, sizes that are not the options' or the pages'.
        TypeError: dtypes that differ, pages of another dtype.
    """
    _check(q, latents, context, options)
    if chosen is not None:
        _check_chosen(chosen, context)
        chosen = chosen if chosen.shape[1] else None
    if context.pages is None and torch.is_grad_enabled() and (q.requires_grad or latents.requires_grad):
        out: torch.Tensor = _LatentAttention.apply(q, latents, context, options, chosen)
        return out
    return operations_for(q).latent_forward(q, latents, context, options, chosen)[0]


def _check(q: torch.Tensor, latents: torch.Tensor, context: ForwardContext, options: LatentOptions) -> None:
    rows, width = context.num_rows, options.width
    if q.dim() != 3 or q.shape[0] != rows or not q.shape[1] or q.shape[2] != width:
        raise ValueError(
            f"q has the shape {list(q.shape)}; allowed: [{rows}, heads, {width}], the rows of the context, and "
            f"rank {options.rank} + rope {options.rope}"
        )
    check_shape("the latents", latents, rows, width)
    if q.dtype is not latents.dtype:
        raise TypeError(f"queries are {q.dtype} and latents {latents.dtype}; allowed: all alike")
    pages = None if context.pages is None else context.pages[options.layer]
    if pages is not None:
        check_pages("latents", pages, width, context)
    if not device.on_gpu(q):
        check_dtype_of_cpu(q.dtype)
        check_host("the latents", latents)
        if pages is None and context.block_size != TRAINING_BLOCK:
            raise ValueError(f"a context without pages has blocks of {context.block_size}; allowed: {TRAINING_BLOCK}")
    if pages is not None and pages.dtype is not latents.dtype:
        raise changed_dtype(f"latents are {latents.dtype}", "pages", pages.dtype)


def check_pages(name: str, pages: torch.Tensor, width: int, context: ForwardContext) -> None:
    """Raise ValueError unless these are contiguous pages of rows of this width, as the context needs them."""
    check_shape(f"the layer's memory of {name}", pages, len(pages), context.block_size, width)
    if not pages.is_contiguous():
        raise ValueError(f"the layer's memory of {name} is not contiguous: what is written to a copy would be lost")
    if pages.is_cpu and context.last_written_block >= len(pages):
        raise ValueError(f"block {context.last_written_block} is to be written; the layer has {len(pages)} of them")


def _check_chosen(chosen: torch.Tensor, context: ForwardContext) -> None:
    if chosen.dim() != 2 or len(chosen) != context.num_rows:
        raise ValueError(f"chosen has the shape {list(chosen.shape)}; allowed: [{context.num_rows}, top_k]")
    check_dtype("chosen", chosen, torch.int32)
    if not chosen.is_contiguous():
        raise ValueError(f"chosen has the strides {chosen.stride()}; allowed: contiguous rows")


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        latents: torch.Tensor,
        context: ForwardContext,
        options: LatentOptions,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(q)
        out, saved = kernels.latent_forward(q, latents, context, options, chosen)
        ctx.save_for_backward(*saved)
        ctx.layout, ctx.options = context, options
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.kernels.latent_backward(ctx.saved_tensors, grad, ctx.layout, ctx.options), None, None, None
