"""Compute activations, gated ``act(gate) * up`` and plain ``act(x)``, with autograd.

Contract: elementwise in float32, rounded once. torch's own ``silu`` and tanh-``gelu`` round differently in
their vector body and scalar rest, so an element would change with the number of elements around it.
"""

from typing import Any

import torch
from torch.nn import functional as F

from samebit.kernels.layout import device
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.shape_checks import check_dtype_of_cpu, check_host
from samebit.kernels.ops.dispatch import operations_for

ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu", "sigmoid")
"""Lists the activations that are exact, by their Hugging Face names."""

SILU = ("silu", "swish")
"""Lists the names of one of them."""

IN_KERNELS = (*SILU, "gelu_pytorch_tanh", "gelu_new")
"""Lists those of gated MLPs that each device computes in a kernel of its own, so that one call may have them in it."""

PLAIN_ACTIVATIONS = ("relu2",)
"""Lists the activations of MLPs without a gate."""

TOWER_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu")
"""Lists those that vision towers have without a gate: ``x * sigmoid(1.702 x)`` is the last."""


def gated(activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute ``activation(gate) * up``.

    Args:
        activation: one of `ACTIVATIONS`.
        gate: ``[..., W]`` float32 or bfloat16; rows may be strided (a half of a fused projection).
        up: like ``gate``.

    Returns:
        ``[..., W]``, contiguous, in the dtype of ``gate``.

    Raises:
        ValueError: for an activation that is not exact, or a gate and an up of different shapes.
        TypeError: for a gate and an up of different dtypes.
    """
    if gate.shape != up.shape or not gate.dim():
        raise ValueError(f"gate is {list(gate.shape)} and up {list(up.shape)}; allowed: two alike, [..., W]")
    if gate.dtype != up.dtype:
        raise TypeError(f"gate is {gate.dtype} and up {up.dtype}; allowed: two alike")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not exact; allowed: {', '.join(ACTIVATIONS)}")
    if not device.on_gpu(gate):
        check_host("up", up)
        check_dtype_of_cpu(gate.dtype)
    if not gate.numel():
        return gate * up
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        out: torch.Tensor = _Gated.apply(activation, gate, up)
        return out
    return operations_for(gate).gated_forward(activation, gate, up)[0]


def activated(activation: str, x: torch.Tensor) -> torch.Tensor:
    """Compute ``activation(x)``; relu2 is ``max(x, 0) ** 2``: torch's, one IEEE product an element.

    Args:
        activation: one of `PLAIN_ACTIVATIONS` or `TOWER_ACTIVATIONS`.
        x: ``[..., W]`` float32 or bfloat16.

    Returns:
        ``[..., W]`` in the dtype of ``x``; of `TOWER_ACTIVATIONS` contiguous.

    Raises:
        ValueError: for an activation that is not exact, or a number alone.
        TypeError: for a dtype that is not exact on the CPU.
    """
    if activation in PLAIN_ACTIVATIONS:
        return F.relu(x).square()
    if activation not in TOWER_ACTIVATIONS:
        allowed = ", ".join(PLAIN_ACTIVATIONS + TOWER_ACTIVATIONS)
        raise ValueError(f"activation {activation!r} is not exact; allowed: {allowed}")
    if not x.dim():
        raise ValueError("x has the shape []; allowed: [..., W]")
    if not device.on_gpu(x):
        check_host("x", x)
        check_dtype_of_cpu(x.dtype)
    if torch.is_grad_enabled() and x.requires_grad:
        out: torch.Tensor = _Activated.apply(activation, x)
        return out
    return operations_for(x).activated_forward(activation, x)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(gate)
        out, saved = kernels.gated_forward(activation, gate, up)
        ctx.save_for_backward(*saved)
        ctx.activation = activation
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        return None, *ctx.kernels.gated_backward(ctx.activation, ctx.saved_tensors, grad)


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: str, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        return operations_for(x).activated_forward(activation, x)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return None, operations_for(grad).activated_backward(ctx.activation, x, grad)
