"""Compute gated activations and plain ones, and their gradients, element by element: T rows of width W."""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.options import Saved
from samebit.kernels.triton.numeric import aligned, jit, sigmoid, tanh
from samebit.kernels.triton.tiles.table import ELEMENTS

_SILU, _GELU_TANH, _GELU, _SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
_QUICK_GELU = tl.constexpr(5)
KINDS = {
    "silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu": 2, "relu2": 3, "sigmoid": 4, "quick_gelu": 5,
}  # fmt: skip
"""Numbers the activations by their Hugging Face names. relu2, max(x, 0) ** 2, and quick_gelu have no gate."""

_ROOT = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715)
_HALF_ROOT = tl.constexpr(0.7071067811865476)  # 1 / sqrt(2)
_QUICK = tl.constexpr(1.702)
_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)


def gated_forward(activation: str, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.gated_forward`."""
    gate, up = aligned(gate), aligned(up)
    out = torch.empty_like(gate)
    if gate.numel():
        _forward[_grid(gate)](gate, up, out, gate.shape[-1], KINDS[activation], ELEMENTS)
    return out, (gate, up)


def gated_backward(activation: str, saved: Saved, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Operations.gated_backward`."""
    gate, up = saved
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        _backward[_grid(gate)](gate, up, aligned(grad), grad_gate, grad_up, gate.shape[-1], KINDS[activation], ELEMENTS)
    return grad_gate, grad_up


def activated_forward(activation: str, x: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.activated_forward`."""
    x = aligned(x)
    out = torch.empty_like(x)
    if x.numel():
        _plain_forward[_grid(x)](x, out, x.shape[-1], KINDS[activation], ELEMENTS)
    return out


def activated_backward(activation: str, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.activated_backward`."""
    x = aligned(x)
    out = torch.empty_like(x)
    if x.numel():
        _plain_backward[_grid(x)](x, aligned(grad), out, x.shape[-1], KINDS[activation], ELEMENTS)
    return out


def _grid(gate: torch.Tensor) -> tuple[int, int]:
    """Return the programs of ``[..., W]``: a row's parts, so that only the width, a layer's own, ends a mask."""
    width = gate.shape[-1]
    return gate.numel() // width, ceil_div(width, ELEMENTS)


@jit()
def value_and_slope(x: tensor, KIND: tl.constexpr) -> Any:
    """Return act(x) and its derivative."""
    if KIND == _SILU:
        share = sigmoid(x)
        value, slope = x * share, share * (1.0 + x * (1.0 - share))
    elif KIND == _GELU_TANH:
        t = tanh((x + x * x * x * _CUBIC) * _ROOT)
        inner = (1.0 + x * x * (3.0 * _CUBIC)) * _ROOT
        value, slope = 0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    elif KIND == _GELU:
        below = 0.5 * (1.0 + tl.erf(x * _HALF_ROOT))
        value, slope = x * below, below + x * tl.exp(-0.5 * x * x) * _DENSITY
    elif KIND == _SIGMOID:
        value = sigmoid(x)
        slope = value * (1.0 - value)
    elif KIND == _QUICK_GELU:
        share = sigmoid(x * _QUICK)
        value, slope = x * share, share * (1.0 + x * _QUICK * (1.0 - share))
    else:
        above = tl.maximum(x, 0.0)
        value, slope = above * above, 2.0 * above
    return value, slope


@jit()
def _places(WIDTH: tl.constexpr, SIZE: tl.constexpr) -> Any:
    """Return the places of this program's elements, and which of them are real."""
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    return tl.program_id(0).to(tl.int64) * WIDTH + column, column < WIDTH


@jit()
def _forward(
    gate: tensor, up: tensor, out: tensor, WIDTH: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr
) -> None:
    place, real = _places(WIDTH, SIZE)
    value, _ = value_and_slope(tl.load(gate + place, mask=real, other=0.0).to(tl.float32), KIND)
    result = value * tl.load(up + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=real)


@jit()
def _backward(
    gate: tensor, up: tensor, grad: tensor, grad_gate: tensor, grad_up: tensor, WIDTH: tl.constexpr,
    KIND: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    place, real = _places(WIDTH, SIZE)
    value, slope = value_and_slope(tl.load(gate + place, mask=real, other=0.0).to(tl.float32), KIND)
    upstream = tl.load(grad + place, mask=real, other=0.0).to(tl.float32)
    to_gate = upstream * slope * tl.load(up + place, mask=real, other=0.0).to(tl.float32)
    tl.store(grad_gate + place, to_gate.to(grad_gate.dtype.element_ty), mask=real)
    tl.store(grad_up + place, (upstream * value).to(grad_up.dtype.element_ty), mask=real)


@jit()
def _plain_forward(x: tensor, out: tensor, WIDTH: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr) -> None:
    place, real = _places(WIDTH, SIZE)
    value, _ = value_and_slope(tl.load(x + place, mask=real, other=0.0).to(tl.float32), KIND)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=real)


@jit()
def _plain_backward(
    x: tensor, grad: tensor, out: tensor, WIDTH: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr
) -> None:
    place, real = _places(WIDTH, SIZE)
    _, slope = value_and_slope(tl.load(x + place, mask=real, other=0.0).to(tl.float32), KIND)
    upstream = tl.load(grad + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out + place, (upstream * slope).to(out.dtype.element_ty), mask=real)
