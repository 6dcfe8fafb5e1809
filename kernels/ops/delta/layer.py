"""Prepare the one call of a decoder layer of a Gated DeltaNet mixer, for the steps of a rollout.

Contract: the bits of the layer's modules, each called by itself, residual sums included. Where a device has no such
call, or what is given does not fit it, there is none, and the modules are to be called.
"""

import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.delta import DeltaLayerOptions, DeltaTerms, DeltaWeights, MixerOptions
from samebit.kernels.layout.states.delta import DeltaStates
from samebit.kernels.ops.conv import windows_align
from samebit.kernels.ops.dispatch import whole_calls
from samebit.kernels.ops.layers.fitting import call_fits, weights_fit


def delta_call(
    x: torch.Tensor, weights: DeltaWeights, context: ForwardContext, options: DeltaLayerOptions, terms: DeltaTerms
) -> LayerCall | None:
    """Return the call that makes the layer of what is like ``x``, ``[..., W]`` for the T rows of the context, whose
    states and windows move on; or None.

    Where options name no gated MLP, its result is what the mixer makes of ``x``, beside the norm of that, which is the
    MLP's input. ``terms``: of the adapter that all rows go through, which fit the weights.
    """
    calls, width = whole_calls(x), options.mixer.width
    if calls is None or not call_fits(context, terms):
        return None
    if x.size(-1) != width or x.numel() != context.num_rows * width:
        return None
    if not (_weights_fit(weights, options, x.dtype) and _memory_fits(context, options.mixer, x.dtype)):
        return None
    return calls.delta_call(weights, context, options, terms)


def _weights_fit(weights: DeltaWeights, options: DeltaLayerOptions, dtype: torch.dtype) -> bool:
    """Return whether a kernel that trusts addresses and sizes may have them."""
    gates = weights.mixer.a_log.dtype
    return gates in (dtype, torch.float32) and weights_fit(weights, options.shapes, dtype, (gates, gates))


def _memory_fits(context: ForwardContext, mixer: MixerOptions, dtype: torch.dtype) -> bool:
    """Return whether the layer's states and windows are what the context and the options say."""
    memory = context.states.layers[mixer.rule.layer] if context.states is not None else None
    if not isinstance(memory, DeltaStates) or memory.dtype is not dtype or context.last_slot >= len(memory.state):
        return False
    slots, rule = len(memory.state), mixer.rule
    return (
        (memory.state.shape[1:], memory.tail_k.shape[1:]) == rule.shapes_of_slot
        and (memory.windows[0], memory.windows[2]) == (slots, (mixer.taps - 1, rule.width))
        and windows_align(memory, context)
        and not (len(context.captures) and bool((context.captures[:, 1] % rule.chunk).any()))
    )
