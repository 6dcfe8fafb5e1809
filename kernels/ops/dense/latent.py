"""Compute a decoder layer of attention over latents in one call, for the steps of a rollout.

Contract: the bits of the layer's modules, each called by itself, residual sums included. Where a device has no such
call, or what is given does not fit it, there is no result, and the modules are to be called.
"""

import torch

from samebit.kernels.layout.layers.latent import LatentLayerOptions, LatentTerms, LatentWeights
from samebit.kernels.ops.dense.fitting import call_fits, pages_fit, rows_fit, weights_fit
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
    kernel, context, attention = latent_layer_of(x), tables.context, options.attention
    if kernel is None or context.pages is None or not call_fits(context, terms):
        return None
    shape = (context.block_size, attention.width)
    if not (
        rows_fit(x, tables, options.width)
        and 2 * tables.cos.size(1) == attention.rope
        and weights_fit(weights, options.shapes, x.dtype)
        and pages_fit(context.pages[attention.layer], tables, shape, x.dtype)
    ):
        return None
    return kernel(x, weights, (tables.cos, tables.sin), context, options, terms)
