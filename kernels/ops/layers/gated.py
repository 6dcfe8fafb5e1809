"""Compute the gated activation of two linear layers of one input, with autograd.

Contract: the bits of `activation.gated` of what the layers give, in the forward and of all gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch

from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.options import Layer
from samebit.kernels.ops.activation import ACTIVATIONS, gated
from samebit.kernels.ops.dispatch import operations_for
from samebit.kernels.ops.linear import (
    check_layers,
    gradients_of_layers,
    linears,
    only_multiply,
    recorded_parts,
    weight_and_bias,
)


def gated_linears(activation: str, x: torch.Tensor, modules: Sequence[Any]) -> torch.Tensor:
    """Compute ``activation(gate(x)) * up(x)``, in one call where no hook could tell.

    Args:
        activation: one of `ACTIVATIONS`.
        x: ``[..., K]``.
        modules: gate and up, each ``[N, K]``. Those that are not bound (``exact=False``) are called.

    Returns:
        ``[..., N]``.

    Raises:
        ValueError: an activation that is not exact, layers of different sizes, or shapes that do not match.
        TypeError: dtypes that differ, or that are not exact.
    """
    joined = only_multiply(modules) and activation in ACTIVATIONS and x.numel() > 0
    layers = [weight_and_bias(module) for module in modules] if joined else []
    if not joined or layers[0][0].shape != layers[1][0].shape:
        return gated(activation, *linears(x, modules))
    check_layers(x, layers)
    recorded = recorded_parts(x, layers)
    if recorded is None:
        return operations_for(x).multiply_gated(activation, x, layers, kept=False)[0]
    out: torch.Tensor = _GatedLinears.apply(activation, layers, *recorded)
    return out


class _GatedLinears(torch.autograd.Function):
    """Computes both layers, given as `recorded_parts`, and the activation."""

    @staticmethod
    def forward(
        ctx: Any, activation: str, layers: Sequence[Layer], x: torch.Tensor, *parts: torch.Tensor | None
    ) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(x)
        out, saved = kernels.multiply_gated(activation, x, layers, kept=True)
        ctx.save_for_backward(x, *(weight for weight, _ in layers), *saved)
        ctx.activation = activation
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate_weight, up_weight, *saved = ctx.saved_tensors
        grads = ctx.kernels.gated_backward(ctx.activation, tuple(saved), grad)
        weights, needed = (gate_weight, up_weight), ctx.needs_input_grad[2:]
        return None, None, *gradients_of_layers(ctx.kernels, x, weights, grads, needed)
