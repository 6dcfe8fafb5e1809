"""Compute a decoder layer of attention over latents in one call, for the steps of a rollout.

Contract: the bits of the layer's modules, each called by itself, residual sums included. Where a device has no such
call, or what is given does not fit it, there is no result, and the modules are to be called.
"""

import torch

from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.latent import (
    IndexerOptions,
    IndexWeights,
    LatentLayerOptions,
    LatentTerms,
    LatentWeights,
)
from samebit.kernels.ops.dispatch import whole_calls
from samebit.kernels.ops.layers.fitting import call_fits, pages_fit, rows_fit, weights_fit
from samebit.kernels.ops.rope import RotaryTables


def latent_call(
    x: torch.Tensor, weights: LatentWeights, tables: RotaryTables, options: LatentLayerOptions, terms: LatentTerms
) -> LayerCall | None:
    """Return the call that computes the layer of what is like ``x``: ``[..., W]`` for the T rows of the tables'
    context, whose pages it writes to and reads; or None.

    Where options name no gated MLP the call's first result is what attention makes of ``x``, and the second the norm of
    that, which is the MLP's input. ``terms``: of the adapter that all rows go through, which fit the weights.
    """
    calls = whole_calls(x)
    if calls is None or not _fits(x, weights, tables, options, terms):
        return None
    return calls.latent_call(weights, tables.context, options, terms)


def sparse_call(
    x: torch.Tensor, weights: LatentWeights, tables: RotaryTables, options: LatentLayerOptions, terms: LatentTerms,
    earlier: torch.Tensor | None,
) -> LayerCall | None:  # fmt: skip
    """Do as `latent_call` where rows attend to chosen tokens: the call has chosen them when it has been computed.

    ``earlier``: what a layer before has chosen; read where options name no indexer.
    """
    calls = whole_calls(x)
    if calls is None or not _fits(x, weights, tables, options, terms):
        return None
    if not (_choice_fits(earlier, tables) if options.index is None else _index_fits(x, options.index, tables)):
        return None
    return calls.sparse_call(weights, tables.context, options, terms, earlier)


def _fits(
    x: torch.Tensor, weights: LatentWeights, tables: RotaryTables, options: LatentLayerOptions, terms: LatentTerms
) -> bool:
    context, attention = tables.context, options.attention
    if context.pages is None or not call_fits(context, terms):
        return False
    last = () if weights.index is None else _dtypes_of_factors(weights.index, x.dtype)
    return (
        rows_fit(x, tables, options.width)
        and 2 * tables.cos.size(1) == attention.rope
        and weights_fit(weights, options.shapes, x.dtype, last)
        and pages_fit(context.pages[attention.layer], tables, (context.block_size, attention.width), x.dtype)
    )


def _dtypes_of_factors(weights: IndexWeights, dtype: torch.dtype) -> tuple[torch.dtype]:
    """Return what the weights of the heads may be: float32, whatever the others are."""
    return (torch.float32 if weights.factors.dtype == torch.float32 else dtype,)


def _index_fits(x: torch.Tensor, index: IndexerOptions, tables: RotaryTables) -> bool:
    context, choice = tables.context, index.choice
    shape = (context.block_size, choice.size)
    return context.pages is not None and pages_fit(context.pages[choice.layer], tables, shape, x.dtype)


def _choice_fits(earlier: torch.Tensor | None, tables: RotaryTables) -> bool:
    """Return whether it is a choice for the rows of this call."""
    return (
        earlier is not None
        and earlier.dim() == 2
        and len(earlier) == tables.context.num_rows
        and earlier.dtype == torch.int32
        and earlier.is_contiguous()
    )
