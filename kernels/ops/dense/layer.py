"""Compute a decoder layer of attention and a gated MLP in one call, for the steps of a rollout.

Contract: the bits of the layer's modules, each called by itself, residual sums included. Where a device has no such
call, or what is given does not fit it, there is no result, and the modules are to be called.
"""

import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.lora.adapters import DenseTerms
from samebit.kernels.layout.options import DenseOptions, DenseWeights
from samebit.kernels.ops.dispatch import dense_layer_of
from samebit.kernels.ops.rope import RotaryTables


def dense_layer(
    x: torch.Tensor, weights: DenseWeights, tables: RotaryTables, options: DenseOptions, terms: DenseTerms
) -> torch.Tensor | None:
    """Return what the layer makes of ``x``: ``[..., W]`` for the T rows of the tables' context, whose pages it writes
    to and reads; or None. ``terms``: of the adapter that all rows go through, which fit the weights."""
    kernel = dense_layer_of(x)
    context = tables.context
    if kernel is None or context.pages is None or not context.covers_all_rows or torch.is_grad_enabled():
        return None
    pages = context.pages[options.attention.layer]
    if any(placed is not None and not placed[1].in_float32 for placed in terms):
        return None
    if not (_fits(x, weights, tables, options) and _pages_fit(pages, x.dtype, options, context)):
        return None
    return kernel(x, weights, (tables.cos, tables.sin), context, options, terms)


def _fits(x: torch.Tensor, weights: DenseWeights, tables: RotaryTables, options: DenseOptions) -> bool:
    """Return whether a kernel that trusts addresses and sizes may have them."""
    half, dtype = tables.cos.size(1), x.dtype
    return (
        x.size(-1) == options.width
        and x.numel() == tables.context.num_rows * options.width
        and 2 * half <= options.head_dim
        and tables.cos.is_contiguous()
        and tables.sin.is_contiguous()
        and all(
            weight is None
            or (weight.dtype is dtype and weight.shape == shape and weight.is_contiguous() and weight.is_cpu)
            for weight, shape in zip(weights.flat(), options.shapes, strict=True)
        )
    )


def _pages_fit(pages: torch.Tensor, dtype: torch.dtype, options: DenseOptions, context: ForwardContext) -> bool:
    """Return whether the layer's pages are what the context and the options say."""
    shape = (options.kv_heads, 2, options.head_dim * context.block_size)
    return (
        pages.dtype is dtype
        and pages.shape[1:] == shape
        and pages.is_contiguous()
        and context.last_written_block < len(pages)
    )
