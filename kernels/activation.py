"""Gated activations ``act(gate) * up`` with autograd.

Contract: elementwise in float32, rounded once. torch's own ``silu`` and tanh-``gelu`` round differently in
their vector body and scalar tail, so an element would change with the number of elements around it.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import device
from .cpu import activation as cpu
from .cpu.jit import array
from .cpu.memory import kind_of

_KERNELS = {
    "silu": cpu.SILU,
    "swish": cpu.SILU,
    "gelu_pytorch_tanh": cpu.GELU_TANH,
    "gelu_new": cpu.GELU_TANH,
}

ACTIVATIONS = (*_KERNELS, "gelu")
"""Activations that are exact, by their Hugging Face names."""


def gated(activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``activation(gate) * up``.

    Args:
        activation: one of `ACTIVATIONS`.
        gate: ``[..., W]`` float32 or bfloat16; rows may be strided (a half of a fused projection).
        up: like ``gate``.

    Returns:
        ``[..., W]``, contiguous, in the dtype of ``gate``.

    Raises:
        ValueError: for an activation that is not exact.
        TypeError: for a gate and an up of different dtypes.
    """
    if gate.dtype != up.dtype:
        raise TypeError(f"gate is {gate.dtype} and up {up.dtype}; allowed: two alike")
    if activation in ACTIVATIONS and device.on_gpu(gate):
        from .triton import activation as gpu

        return gpu.gated(activation, gate, up)
    if activation == "gelu":  # the erf form: torch's result does not vary on contiguous rows (measured)
        return (F.gelu(gate.float().contiguous()) * up.float()).to(gate.dtype)
    if activation not in _KERNELS:
        raise ValueError(f"activation {activation!r} is not exact; allowed: {', '.join(ACTIVATIONS)}")
    gate, up = _rows(gate), _rows(up)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        out: torch.Tensor = _Gated.apply(_KERNELS[activation], gate, up)
        return out
    return _forward(_KERNELS[activation], gate, up)


PLAIN_ACTIVATIONS = ("relu2",)
"""Activations of MLPs without a gate."""


def activated(activation: str, x: torch.Tensor) -> torch.Tensor:
    """``activation(x)``; relu2 is ``max(x, 0) ** 2``: torch's, one IEEE product an element.

    Raises:
        ValueError: for an activation that is not exact.
    """
    if activation not in PLAIN_ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not exact; allowed: {', '.join(PLAIN_ACTIVATIONS)}")
    return F.relu(x).square()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself if its last axis is contiguous and the others are evenly strided, else a copy."""
    if x.is_contiguous():
        return x
    uniform = x.dim() < 3 or all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))
    return x if x.stride(-1) == 1 and uniform else x.contiguous()


def _flat(x: torch.Tensor) -> Any:
    """The storage of evenly strided rows, from the first element on, as a flat array."""
    if x.is_contiguous():
        return array(x).reshape(-1)
    width = x.shape[-1]
    rows = x.numel() // width
    stride = _row_stride(x)
    return array(x.as_strided(((rows - 1) * stride + width if rows else 0,), (1,)))


def _row_stride(x: torch.Tensor) -> int:
    return x.stride(-2) if x.dim() > 1 else x.shape[-1]


def _forward(kernels: cpu.GatedKernels, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    width, size = gate.shape[-1], gate.numel()
    kernels.forward(
        size, gate.data_ptr(), up.data_ptr(), kind_of(gate.dtype), size // width, width, _row_stride(gate),
        _row_stride(up), out.data_ptr(),
    )  # fmt: skip
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: cpu.GatedKernels, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return _forward(kernels, gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.empty(gate.shape, dtype=gate.dtype)
        grad_up = torch.empty(up.shape, dtype=up.dtype)
        width = gate.shape[-1]
        ctx.kernels.backward(
            gate.numel(), _flat(gate), _flat(up), array(grad.contiguous()).reshape(-1),
            gate.numel() // width, width, _row_stride(gate), _row_stride(up), array(grad_gate).reshape(-1),
            array(grad_up).reshape(-1),
        )  # fmt: skip
        return None, grad_gate, grad_up
