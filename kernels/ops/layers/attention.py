"""Prepare the one call of a decoder layer of attention, for the steps of a rollout.

Contract: the bits of the layer's modules, each called by itself, residual sums included. Where a device has no such
call, or what is given does not fit it, there is none, and the modules are to be called.
"""

import torch

from samebit.kernels.layout.layers.attention import AttentionLayerOptions, AttentionTerms, AttentionWeights
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.ops.dispatch import whole_calls
from samebit.kernels.ops.layers.fitting import call_fits, pages_fit, rows_fit, weights_fit
from samebit.kernels.ops.rope import RotaryTables


def attention_call(
    x: torch.Tensor, weights: AttentionWeights, tables: RotaryTables, options: AttentionLayerOptions,
    terms: AttentionTerms,
) -> LayerCall | None:  # fmt: skip
    """Return the call that makes the layer of what is like ``x``: ``[..., W]`` for the T rows of the tables' context,
    whose pages it writes to and reads; or None.

    Where options name no gated MLP, its result is what attention makes of ``x``, beside the norm of that, which is the
    MLP's input. ``terms``: of the adapter that all rows go through, which fit the weights.
    """
    calls, context = whole_calls(x), tables.context
    if calls is None or context.pages is None or not call_fits(context, terms):
        return None
    shape = (options.kv_heads, 2, options.head_dim * context.block_size)
    if not (
        rows_fit(x, tables, options.width)
        and 2 * tables.cos.size(1) <= options.head_dim
        and weights_fit(weights, options.shapes, x.dtype)
        and pages_fit(context.pages[options.attention.layer], tables, shape, x.dtype)
    ):
        return None
    return calls.attention_call(weights, context, options, terms)
