"""Compute a whole Gated DeltaNet layer in one call, for the steps of a rollout.

Contract: the bits of the layer's operations, each called by itself. Where a device has no such call, or what is given
does not fit it, there is no result, and the operations are to be called.
"""

import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import LANES, SCAN_CHUNK, ceil_div
from samebit.kernels.layout.options import DeltaOptions, MixerOptions, MixerWeights
from samebit.kernels.layout.states.delta import DeltaStates
from samebit.kernels.ops.dispatch import delta_mixer_of


def delta_mixer(
    x: torch.Tensor, weights: MixerWeights, context: ForwardContext, options: MixerOptions
) -> torch.Tensor | None:
    """Return what the layer makes of ``x`` ``[T, W]``, whose states and windows in the context move on; or None."""
    kernel = delta_mixer_of(x)
    if kernel is None or context.states is None or not context.covers_all_rows or torch.is_grad_enabled():
        return None
    if not (_fits(x, weights, context, options) and _memory_fits(x, context, options)):
        return None
    return kernel(x, weights, context, options)


def _fits(x: torch.Tensor, weights: MixerWeights, context: ForwardContext, options: MixerOptions) -> bool:
    """Return whether a kernel that trusts addresses and sizes may have them."""
    given = weights.flat()
    gates = len(given) - 2  # their parameters are float32
    return x.shape == (context.num_rows, options.width) and all(
        weight is None
        or (
            weight.dtype is (x.dtype if place < gates else torch.float32)
            and weight.shape == shape
            and weight.is_contiguous()
            and weight.is_cpu
        )
        for place, (weight, shape) in enumerate(zip(given, options.shapes, strict=True))
    )


def _memory_fits(x: torch.Tensor, context: ForwardContext, options: MixerOptions) -> bool:
    """Return whether the layer's states and windows are what the context and the options say."""
    memory = context.states.layers[options.rule.layer] if context.states is not None else None
    if not isinstance(memory, DeltaStates) or memory.dtype is not x.dtype or context.last_slot >= len(memory.state):
        return False
    slots, rule = len(memory.state), options.rule
    return (
        memory.state.shape[1:] == _state_shape(rule)
        and memory.tail_k.shape[1:] == (rule.key_heads, SCAN_CHUNK, ceil_div(rule.key_dim, LANES) * LANES)
        and memory.window.shape == (slots, options.taps - 1, rule.width)
        and not (len(context.captures) and bool((context.captures[:, 1] % rule.chunk).any()))
    )


def _state_shape(rule: DeltaOptions) -> tuple[int, int, int]:
    return rule.value_heads, rule.key_dim, ceil_div(rule.value_dim, LANES) * LANES
