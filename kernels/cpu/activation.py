"""Gated activations on the CPU, elementwise: act(gate) * up, and its two gradients.

One kernel an activation: a branch inside the loop would keep LLVM from vectorising it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, prange

from .jit import RowKernel
from .memory import elements
from .numeric import narrow, sigmoid, tanh, widen

_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_ROOT = np.float32(0.7978845608028654)  # sqrt(2 / pi)
_CUBIC = np.float32(0.044715)
_THREE = np.float32(3.0)


@njit(inline="always")
def _row(x: Any, row: int, stride: int, width: int) -> Any:
    """A view of one row: an index from 0 on is what lets LLVM vectorise (no wrap-around check)."""
    return x[row * stride : row * stride + width]


@njit(inline="always")
def _tanh_of(x: Any) -> Any:
    return tanh(_ROOT * (x + _CUBIC * x * x * x))


def _silu(
    gate_address: int, up_address: int, kind: Any, rows: int, width: int, gate_stride: int, up_stride: int,
    out_address: int,
) -> None:  # fmt: skip
    gate, up = elements(gate_address, rows * gate_stride, kind), elements(up_address, rows * up_stride, kind)
    out = elements(out_address, rows * width, kind)
    for row in prange(rows):
        g, u, o = _row(gate, row, gate_stride, width), _row(up, row, up_stride, width), _row(out, row, width, width)
        for i in range(width):
            x = widen(g[i])
            o[i] = narrow(x * sigmoid(x) * widen(u[i]), o[i])


def _silu_backward(
    gate: Any, up: Any, grad: Any, rows: int, width: int, gate_stride: int, up_stride: int, grad_gate: Any, grad_up: Any
) -> None:
    for row in prange(rows):
        g, u = _row(gate, row, gate_stride, width), _row(up, row, up_stride, width)
        upstream = _row(grad, row, width, width)
        to_gate, to_up = _row(grad_gate, row, width, width), _row(grad_up, row, width, width)
        for i in range(width):
            x = widen(g[i])
            d = widen(upstream[i])
            s = sigmoid(x)
            slope = s * (_ONE + x * (_ONE - s))
            to_gate[i] = narrow(d * widen(u[i]) * slope, to_gate[i])
            to_up[i] = narrow(d * x * s, to_up[i])


def _gelu_tanh(
    gate_address: int, up_address: int, kind: Any, rows: int, width: int, gate_stride: int, up_stride: int,
    out_address: int,
) -> None:  # fmt: skip
    gate, up = elements(gate_address, rows * gate_stride, kind), elements(up_address, rows * up_stride, kind)
    out = elements(out_address, rows * width, kind)
    for row in prange(rows):
        g, u, o = _row(gate, row, gate_stride, width), _row(up, row, up_stride, width), _row(out, row, width, width)
        for i in range(width):
            x = widen(g[i])
            o[i] = narrow(_HALF * x * (_ONE + _tanh_of(x)) * widen(u[i]), o[i])


def _gelu_tanh_backward(
    gate: Any, up: Any, grad: Any, rows: int, width: int, gate_stride: int, up_stride: int, grad_gate: Any, grad_up: Any
) -> None:
    for row in prange(rows):
        g, u = _row(gate, row, gate_stride, width), _row(up, row, up_stride, width)
        upstream = _row(grad, row, width, width)
        to_gate, to_up = _row(grad_gate, row, width, width), _row(grad_up, row, width, width)
        for i in range(width):
            x = widen(g[i])
            d = widen(upstream[i])
            t = _tanh_of(x)
            inner = _ROOT * (_ONE + _THREE * _CUBIC * x * x)
            slope = _HALF * (_ONE + t) + _HALF * x * (_ONE - t * t) * inner
            to_gate[i] = narrow(d * widen(u[i]) * slope, to_gate[i])
            to_up[i] = narrow(d * _HALF * x * (_ONE + t), to_up[i])


@dataclass(frozen=True)
class GatedKernels:
    """The two loops of one activation."""

    forward: RowKernel
    backward: RowKernel


SILU = GatedKernels(RowKernel(_silu), RowKernel(_silu_backward))
GELU_TANH = GatedKernels(RowKernel(_gelu_tanh), RowKernel(_gelu_tanh_backward))
