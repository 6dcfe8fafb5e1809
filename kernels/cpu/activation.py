"""Gated activations on the CPU, elementwise: act(gate) * up, and its two gradients."""

from typing import Any

import numpy as np
from numba import njit, prange

from .jit import RowKernel
from .numeric import narrow, sigmoid, tanh, widen

SILU = 0
GELU_TANH = 1

_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_ROOT = np.float32(0.7978845608028654)  # sqrt(2 / pi)
_CUBIC = np.float32(0.044715)
_THREE = np.float32(3.0)


@njit(inline="always")
def _gelu_tanh_inner(x: Any) -> Any:
    return tanh(_ROOT * (x + _CUBIC * x * x * x))


def _forward(kind: int, gate: Any, up: Any, rows: int, width: int, gate_stride: int, up_stride: int, out: Any) -> None:
    for row in prange(rows):
        for i in range(width):
            x = widen(gate[row * gate_stride + i])
            u = widen(up[row * up_stride + i])
            if kind == SILU:
                y = x * sigmoid(x) * u
            else:
                y = _HALF * x * (_ONE + _gelu_tanh_inner(x)) * u
            out[row * width + i] = narrow(y, out[row * width + i])


def _backward(
    kind: int, gate: Any, up: Any, grad: Any, rows: int, width: int, gate_stride: int, up_stride: int,
    grad_gate: Any, grad_up: Any,
) -> None:  # fmt: skip
    for row in prange(rows):
        for i in range(width):
            x = widen(gate[row * gate_stride + i])
            u = widen(up[row * up_stride + i])
            g = widen(grad[row * width + i])
            if kind == SILU:
                s = sigmoid(x)
                value = x * s
                slope = s * (_ONE + x * (_ONE - s))
            else:
                t = _gelu_tanh_inner(x)
                value = _HALF * x * (_ONE + t)
                inner = _ROOT * (_ONE + _THREE * _CUBIC * x * x)
                slope = _HALF * (_ONE + t) + _HALF * x * (_ONE - t * t) * inner
            at = row * width + i
            grad_gate[at] = narrow(g * u * slope, grad_gate[at])
            grad_up[at] = narrow(g * value, grad_up[at])


forward = RowKernel(_forward)
backward = RowKernel(_backward)
