"""Compute activations on the CPU, elementwise: act(gate) * up and its two gradients, or act(x) and its gradient.

One kernel an activation: a branch inside the loop would keep LLVM from vectorising it. Kernels are functions of the
module, by whose names Numba keeps them on disk; what they call may be closures. T rows of width W.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import typeof, types
from torch.nn import functional as F

from samebit.kernels.cpu.base.jit import SharedKernel, array
from samebit.kernels.cpu.base.memory import elements, kind_of
from samebit.kernels.cpu.base.numeric import erf, narrow, share_left, sigmoid, tanh, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.layout.options import Saved

_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_ROOT = np.float32(0.7978845608028654)  # sqrt(2 / pi)
_CUBIC = np.float32(0.044715)
_THREE = np.float32(3.0)
_HALF_ROOT = np.float32(0.7071067811865476)  # 1 / sqrt(2)
_DENSITY = np.float32(0.3989422804014327)  # 1 / sqrt(2 pi)
_QUICK = np.float32(1.702)

_PART = 1 << 12
"""Count of elements that a thread takes at once. Speed."""


@inlined_part
def _silu_of(x: Any) -> Any:
    return x * sigmoid(x)


@inlined_part
def _silu_gradients(x: Any, up: Any, d: Any) -> Any:
    s = sigmoid(x)
    return d * up * (s * (_ONE + x * (_ONE - s))), d * x * s


@inlined_part
def _tanh_of(x: Any) -> Any:
    return tanh(_ROOT * (x + _CUBIC * x * x * x))


@inlined_part
def _gelu_tanh_of(x: Any) -> Any:
    return _HALF * x * (_ONE + _tanh_of(x))


@inlined_part
def _gelu_tanh_slope_of(x: Any, t: Any) -> Any:
    inner = _ROOT * (_ONE + _THREE * _CUBIC * x * x)
    return _HALF * (_ONE + t) + _HALF * x * (_ONE - t * t) * inner


@inlined_part
def _gelu_tanh_gradients(x: Any, up: Any, d: Any) -> Any:
    t = _tanh_of(x)
    return d * up * _gelu_tanh_slope_of(x, t), d * _HALF * x * (_ONE + t)


@inlined_part
def _gelu_tanh_slope(x: Any) -> Any:
    return _gelu_tanh_slope_of(x, _tanh_of(x))


@inlined_part
def _gelu_of(x: Any) -> Any:
    return _HALF * x * (_ONE + erf(x * _HALF_ROOT))


@inlined_part
def _gelu_slope(x: Any) -> Any:
    return _HALF * (_ONE + erf(x * _HALF_ROOT)) + x * share_left(-_HALF * x * x) * _DENSITY


@inlined_part
def _quick_gelu_of(x: Any) -> Any:
    return x * sigmoid(_QUICK * x)


@inlined_part
def _quick_gelu_slope(x: Any) -> Any:
    s = sigmoid(_QUICK * x)
    return s * (_ONE + _QUICK * x * (_ONE - s))


@inlined_part
def _sigmoid_gradients(x: Any, up: Any, d: Any) -> Any:
    s = sigmoid(x)
    return d * up * (s * (_ONE - s)), d * s


@inlined_part
def _row(x: Any, row: int, stride: int, width: int) -> Any:
    """Return a view of one row: an index from 0 on lets LLVM vectorise (no wrap-around check)."""
    return x[row * stride : row * stride + width]


def _row_parts(act: Any, gradients: Any) -> tuple[Any, Any]:
    """Make the parts that compute a row, forward and backward, from those that compute an element.

    Args:
        act: of the gate.
        gradients: of gate, up and the gradient of the result; returns those of gate and up.
    """

    @kernel_part
    def forward(
        row: int, gate_address: int, up_address: int, kind: Any, rows: int, width: int, gate_stride: int,
        up_stride: int, out_address: int,
    ) -> None:  # fmt: skip
        gate, up = elements(gate_address, rows * gate_stride, kind), elements(up_address, rows * up_stride, kind)
        out = elements(out_address, rows * width, kind)
        g, u, o = _row(gate, row, gate_stride, width), _row(up, row, up_stride, width), _row(out, row, width, width)
        for i in range(width):
            o[i] = narrow(act(widen(g[i])) * widen(u[i]), o[i])

    @kernel_part
    def backward(
        row: int, gate: Any, up: Any, grad: Any, width: int, gate_stride: int, up_stride: int, grad_gate: Any,
        grad_up: Any,
    ) -> None:  # fmt: skip
        g, u = _row(gate, row, gate_stride, width), _row(up, row, up_stride, width)
        upstream = _row(grad, row, width, width)
        to_gate, to_up = _row(grad_gate, row, width, width), _row(grad_up, row, width, width)
        for i in range(width):
            of_gate, of_up = gradients(widen(g[i]), widen(u[i]), widen(upstream[i]))
            to_gate[i], to_up[i] = narrow(of_gate, to_gate[i]), narrow(of_up, to_up[i])

    return forward, backward


_silu_row, _silu_backward_row = _row_parts(_silu_of, _silu_gradients)
_gelu_tanh_row, _gelu_tanh_backward_row = _row_parts(_gelu_tanh_of, _gelu_tanh_gradients)
_sigmoid_row, _sigmoid_backward_row = _row_parts(sigmoid, _sigmoid_gradients)


def _silu(
    threads: int, gate_address: int, up_address: int, kind: Any, rows: int, width: int, gate_stride: int,
    up_stride: int, out_address: int,
) -> None:  # fmt: skip
    share_out(
        _silu_row, rows, threads,
        (gate_address, up_address, kind, rows, width, gate_stride, up_stride, out_address),
    )  # fmt: skip


def _silu_backward(
    threads: int, gate: Any, up: Any, grad: Any, rows: int, width: int, gate_stride: int, up_stride: int,
    grad_gate: Any, grad_up: Any,
) -> None:  # fmt: skip
    share_out(
        _silu_backward_row, rows, threads, (gate, up, grad, width, gate_stride, up_stride, grad_gate, grad_up)
    )  # fmt: skip


def _gelu_tanh(
    threads: int, gate_address: int, up_address: int, kind: Any, rows: int, width: int, gate_stride: int,
    up_stride: int, out_address: int,
) -> None:  # fmt: skip
    share_out(
        _gelu_tanh_row, rows, threads,
        (gate_address, up_address, kind, rows, width, gate_stride, up_stride, out_address),
    )  # fmt: skip


def _gelu_tanh_backward(
    threads: int, gate: Any, up: Any, grad: Any, rows: int, width: int, gate_stride: int, up_stride: int,
    grad_gate: Any, grad_up: Any,
) -> None:  # fmt: skip
    share_out(
        _gelu_tanh_backward_row, rows, threads, (gate, up, grad, width, gate_stride, up_stride, grad_gate, grad_up)
    )  # fmt: skip


def _sigmoid(
    threads: int, gate_address: int, up_address: int, kind: Any, rows: int, width: int, gate_stride: int,
    up_stride: int, out_address: int,
) -> None:  # fmt: skip
    share_out(
        _sigmoid_row, rows, threads,
        (gate_address, up_address, kind, rows, width, gate_stride, up_stride, out_address),
    )  # fmt: skip


def _sigmoid_backward(
    threads: int, gate: Any, up: Any, grad: Any, rows: int, width: int, gate_stride: int, up_stride: int,
    grad_gate: Any, grad_up: Any,
) -> None:  # fmt: skip
    share_out(
        _sigmoid_backward_row, rows, threads, (gate, up, grad, width, gate_stride, up_stride, grad_gate, grad_up)
    )  # fmt: skip


def _plain_parts(act: Any, slope: Any) -> tuple[Any, Any]:
    """Make the parts that compute some of the elements, forward and backward, from those that compute one."""

    @kernel_part
    def forward(part: int, x_address: int, kind: Any, size: int, out_address: int) -> None:
        width = min(_PART, size - part * _PART)
        x = _row(elements(x_address, size, kind), part, _PART, width)
        out = _row(elements(out_address, size, kind), part, _PART, width)
        for i in range(width):
            out[i] = narrow(act(widen(x[i])), out[i])

    @kernel_part
    def backward(part: int, x_address: int, grad_address: int, kind: Any, size: int, out_address: int) -> None:
        width = min(_PART, size - part * _PART)
        x = _row(elements(x_address, size, kind), part, _PART, width)
        grad = _row(elements(grad_address, size, kind), part, _PART, width)
        out = _row(elements(out_address, size, kind), part, _PART, width)
        for i in range(width):
            out[i] = narrow(widen(grad[i]) * slope(widen(x[i])), out[i])

    return forward, backward


_plain_gelu_part, _plain_gelu_backward_part = _plain_parts(_gelu_of, _gelu_slope)
_plain_gelu_tanh_part, _plain_gelu_tanh_backward_part = _plain_parts(_gelu_tanh_of, _gelu_tanh_slope)
_quick_gelu_part, _quick_gelu_backward_part = _plain_parts(_quick_gelu_of, _quick_gelu_slope)


def _plain_gelu(threads: int, x: int, kind: Any, size: int, out: int) -> None:
    share_out(_plain_gelu_part, (size + _PART - 1) // _PART, threads, (x, kind, size, out))


def _plain_gelu_backward(threads: int, x: int, grad: int, kind: Any, size: int, out: int) -> None:
    share_out(_plain_gelu_backward_part, (size + _PART - 1) // _PART, threads, (x, grad, kind, size, out))


def _plain_gelu_tanh(threads: int, x: int, kind: Any, size: int, out: int) -> None:
    share_out(_plain_gelu_tanh_part, (size + _PART - 1) // _PART, threads, (x, kind, size, out))


def _plain_gelu_tanh_backward(threads: int, x: int, grad: int, kind: Any, size: int, out: int) -> None:
    share_out(_plain_gelu_tanh_backward_part, (size + _PART - 1) // _PART, threads, (x, grad, kind, size, out))


def _quick_gelu(threads: int, x: int, kind: Any, size: int, out: int) -> None:
    share_out(_quick_gelu_part, (size + _PART - 1) // _PART, threads, (x, kind, size, out))


def _quick_gelu_backward(threads: int, x: int, grad: int, kind: Any, size: int, out: int) -> None:
    share_out(_quick_gelu_backward_part, (size + _PART - 1) // _PART, threads, (x, grad, kind, size, out))


@dataclass(frozen=True)
class _Loops:
    """Holds the two loops of one activation."""

    forward: SharedKernel
    backward: SharedKernel


silu_rows, sigmoid_rows = SharedKernel(_silu), SharedKernel(_sigmoid)

_SILU_LOOPS = _Loops(silu_rows, SharedKernel(_silu_backward))
_GELU_TANH_LOOPS = _Loops(SharedKernel(_gelu_tanh), SharedKernel(_gelu_tanh_backward))
_LOOPS = {
    "silu": _SILU_LOOPS,
    "swish": _SILU_LOOPS,
    "gelu_pytorch_tanh": _GELU_TANH_LOOPS,
    "gelu_new": _GELU_TANH_LOOPS,
    "sigmoid": _Loops(sigmoid_rows, SharedKernel(_sigmoid_backward)),
}
"""Finds the loops by name; ``gelu``, the erf form, is torch's, whose result does not vary on contiguous rows
(measured)."""

_PLAIN_GELU_TANH = _Loops(SharedKernel(_plain_gelu_tanh), SharedKernel(_plain_gelu_tanh_backward))
_PLAIN_LOOPS = {
    "gelu": _Loops(SharedKernel(_plain_gelu), SharedKernel(_plain_gelu_backward)),
    "gelu_pytorch_tanh": _PLAIN_GELU_TANH,
    "gelu_new": _PLAIN_GELU_TANH,
    "quick_gelu": _Loops(SharedKernel(_quick_gelu), SharedKernel(_quick_gelu_backward)),
}
"""Finds the loops of activations without a gate."""


def kernel_of(activation: str) -> SharedKernel | None:
    """Return the kernel of an activation, as `silu_rows`; None for that which is torch's."""
    return _LOOPS[activation].forward if activation in _LOOPS else None


@cache
def activation_at(activation: str, dtype: torch.dtype) -> int:
    """Return the address of the kernel of an activation, for `callee.call_at`.

    Raises:
        ValueError: one that is torch's.
    """
    kernel = kernel_of(activation)
    if kernel is None:
        raise ValueError(f"activation {activation!r} is not in a kernel; allowed: {', '.join(_LOOPS)}")
    return kernel.address(*(types.int64,) * 2, typeof(kind_of(dtype)), *(types.int64,) * 5)


def gated_forward(activation: str, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.gated_forward`."""
    if activation not in _LOOPS:
        return (F.gelu(gate.float().contiguous()) * up.float()).to(gate.dtype), (gate, up)
    gate, up = _rows(gate), _rows(up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    width, size = gate.shape[-1], gate.numel()
    _LOOPS[activation].forward(
        size, gate.data_ptr(), up.data_ptr(), kind_of(gate.dtype), size // width, width, _row_stride(gate),
        _row_stride(up), out.data_ptr(),
    )  # fmt: skip
    return out, (gate, up)


def gated_backward(activation: str, saved: Saved, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Operations.gated_backward`."""
    gate, up = saved
    if activation not in _LOOPS:
        return _gelu_backward(gate, up, grad)
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device="cpu")
    grad_up = torch.empty(up.shape, dtype=up.dtype, device="cpu")
    width = gate.shape[-1]
    _LOOPS[activation].backward(
        gate.numel(), _flat(gate), _flat(up), array(grad.contiguous()).reshape(-1), gate.numel() // width, width,
        _row_stride(gate), _row_stride(up), array(grad_gate).reshape(-1), array(grad_up).reshape(-1),
    )  # fmt: skip
    return grad_gate, grad_up


def activated_forward(activation: str, x: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.activated_forward`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _PLAIN_LOOPS[activation].forward(x.numel(), x.data_ptr(), kind_of(x.dtype), x.numel(), out.data_ptr())
    return out


def activated_backward(activation: str, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.activated_backward`."""
    x, grad = x.contiguous(), grad.contiguous()
    out, kind, size = torch.empty_like(x), kind_of(x.dtype), x.numel()
    _PLAIN_LOOPS[activation].backward(size, x.data_ptr(), grad.data_ptr(), kind, size, out.data_ptr())
    return out


def _gelu_backward(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, upstream = gate.float().contiguous(), grad.float()
    grad_gate = torch.ops.aten.gelu_backward(upstream * up.float(), x)
    return grad_gate.to(gate.dtype), (upstream * F.gelu(x)).to(up.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` itself if its last axis is contiguous and the others are evenly strided, else a copy."""
    if x.is_contiguous():
        return x
    uniform = x.dim() < 3 or all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))
    return x if x.stride(-1) == 1 and uniform else x.contiguous()


def _flat(x: torch.Tensor) -> Any:
    """Return the storage of evenly strided rows, from the first element on, as a flat array."""
    if x.is_contiguous():
        return array(x).reshape(-1)
    width = x.shape[-1]
    rows = x.numel() // width
    stride = _row_stride(x)
    return array(x.as_strided(((rows - 1) * stride + width if rows else 0,), (1,)))


def _row_stride(x: torch.Tensor) -> int:
    """Return how far apart rows lie; the stride of an axis of size 1 says nothing of it."""
    return x.shape[-1] if x.dim() < 2 or x.is_contiguous() else x.stride(-2)
