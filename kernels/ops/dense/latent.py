"""Compute a decoder layer of attention over latents in one call, for the steps of a rollout.

Contract: the bits of the layer's modules, each called by itself, residual sums included. Where a device has no such
call, or what is given does not fit it, there is no result, and the modules are to be called.
"""

import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.latent import LatentLayerOptions, LatentTerms, LatentWeights
from samebit.kernels.ops.dispatch import latent_layer_of
from samebit.kernels.ops.rope import RotaryTables


def latent_layer(
    x: torch.Tensor, weights: LatentWeights, tables: RotaryTables, options: LatentLayerOptions, terms: LatentTerms
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return what the layer makes of ``x``: ``[..., W]`` for the T rows of the tables' context, whose pages it writes
    to and reads; or None.

    Where options name no gated MLP the first result is what attention makes of ``x``, and the second the norm of that,
    which is the MLP's input. ``terms``: of the adapter that all rows go through, which fit the weights.
    """
    kernel = latent_layer_of(x)
    context = tables.context
    if kernel is None or context.pages is None or not context.covers_all_rows or torch.is_grad_enabled():
        return None
    pages = context.pages[options.attention.layer]
    if any(placed is not None and not placed[1].in_float32 for placed in terms):
        return None
    if not (_fits(x, weights, tables, options) and _pages_fit(pages, x.dtype, options, context)):
        return None
    return kernel(x, weights, (tables.cos, tables.sin), context, options, terms)


def _fits(x: torch.Tensor, weights: LatentWeights, tables: RotaryTables, options: LatentLayerOptions) -> bool:
    """Return whether a kernel that trusts addresses and sizes may have them."""
    dtype = x.dtype
    return (
        x.size(-1) == options.width
        and x.numel() == tables.context.num_rows * options.width
        and 2 * tables.cos.size(1) == options.attention.rope
        and tables.cos.is_contiguous()
        and tables.sin.is_contiguous()
        and all(
            weight is None
            or (weight.dtype is dtype and weight.shape == shape and weight.is_contiguous() and weight.is_cpu)
            for weight, shape in zip(weights.flat(), options.shapes, strict=True)
        )
    )


def _pages_fit(pages: torch.Tensor, dtype: torch.dtype, options: LatentLayerOptions, context: ForwardContext) -> bool:
    """Return whether the layer's pages are what the context and the options say."""
    return (
        pages.dtype is dtype
        and pages.shape[1:] == (context.block_size, options.attention.width)
        and pages.is_contiguous()
        and context.last_written_block < len(pages)
    )
