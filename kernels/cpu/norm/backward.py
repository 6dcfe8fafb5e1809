"""Compute the gradients of RMSNorm, gated or not, and of LayerNorm on the CPU: a row at a time, in float32.

Invariants
----------
* The gradient of a row depends on that row alone; its sums run in sixteen lanes, added up in a fixed order.
* The gradient of a weight is a sum over rows. They are cut into `_PIECES` pieces, however many threads there are. A
  piece is the sum of blocks of `_BLOCK` rows, each one chain in float32 from 0; blocks, and then pieces, are added in
  their order, in float64. So the threads enter nowhere, and no chain of roundings is long.

T rows of width W.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import NO_END, doubles, elements, floats, kind_of, with_unit_stride
from samebit.kernels.cpu.base.numeric import fma, narrow, sigmoid, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.norm.forward import mean, mean_of_lanes, mean_square
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.options import GatedNormOptions, Saved

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)

_PIECES = 16
"""Count of pieces of rows, each of which sums up a gradient of the weight. Arithmetic."""

_BLOCK = 16
"""Count of rows whose terms of the weight's gradient are one chain. Arithmetic."""


@inlined_part
def _rows_of(piece: int, rows: int) -> tuple[int, int]:
    """Return the first row of a piece, and that behind its last one."""
    return rows * piece // _PIECES, rows * (piece + 1) // _PIECES


@inlined_part
def _add_block(block: Any, sums: Any) -> None:
    """Add the sums of a block of rows to those of its piece, in float64; the next block begins from 0."""
    for i in range(len(block)):
        sums[i] = sums[i] + np.float64(block[i])
        block[i] = _ZERO


@inlined_part
def _add_pieces(sums: Any, first: int, stride: int, out: Any) -> None:
    """Write the sum of what all pieces have, each ``stride`` elements behind the one before."""
    for i in range(len(out)):
        total = 0.0
        for piece in range(_PIECES):
            total = total + sums[piece * stride + first + i]
        out[i] = narrow(np.float32(total), out[i])


@inlined_part
def _mean_product(x: Any, y: Any, lanes: Any) -> Any:
    """Return the mean of the products of two rows of float32. ``lanes``: scratch ``[LANES]``."""
    width = len(x)
    for lane in range(LANES):
        lanes[lane] = _ZERO
    whole = width // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = fma(x[i + lane], y[i + lane], lanes[lane])
    for i in range(whole, width):
        lanes[i - whole] = fma(x[i], y[i], lanes[i - whole])
    return mean_of_lanes(lanes, width)


def _rms_norm(
    threads: int, x_at: int, grad_at: int, kind: Any, weight_at: int, weight_kind: Any, offset: Any, inverse_at: int,
    rows: int, width: int, grad_x_at: int, grad_weight_at: int,
) -> None:  # fmt: skip
    sums = np.zeros(_PIECES * width, np.float64)
    share_out(
        _rms_norm_piece, _PIECES, threads,
        (x_at, grad_at, kind, weight_at, weight_kind, offset, inverse_at, rows, width, grad_x_at, sums.ctypes.data),
    )  # fmt: skip
    _add_pieces(sums, 0, width, elements(grad_weight_at, width, weight_kind))


@kernel_part
def _rms_norm_piece(
    piece: int, x_at: int, grad_at: int, kind: Any, weight_at: int, weight_kind: Any, offset: Any, inverse_at: int,
    rows: int, width: int, grad_x_at: int, sums_at: int,
) -> None:  # fmt: skip
    x, grad, grad_x = elements(x_at, NO_END, kind), elements(grad_at, NO_END, kind), elements(grad_x_at, NO_END, kind)
    weight, inverse = elements(weight_at, width, weight_kind), floats(inverse_at, rows)
    sums = doubles(sums_at, _PIECES * width)[piece * width : (piece + 1) * width]
    lanes, normed, inner = np.empty(LANES, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    block = np.zeros(width, np.float32)
    begin, end = _rows_of(piece, rows)
    for first in range(begin, end, _BLOCK):
        for row in range(first, min(first + _BLOCK, end)):
            at, until = row * width, (row + 1) * width
            _rms_norm_row(
                x[at:until], grad[at:until], weight, offset, inverse[row], normed, inner, lanes, block,
                grad_x[at:until],
            )  # fmt: skip
        _add_block(block, sums)


@inlined_part
def _rms_norm_row(
    x: Any, grad: Any, weight: Any, offset: Any, scale: Any, normed: Any, inner: Any, lanes: Any, block: Any, out: Any
) -> None:
    for i in range(len(normed)):
        upstream = widen(grad[i])
        normed[i] = widen(x[i]) * scale
        inner[i] = upstream * (widen(weight[i]) + offset)
        block[i] = fma(upstream, normed[i], block[i])
    _through_norm(normed, inner, scale, _ZERO, lanes, out)


@inlined_part
def _through_norm(normed: Any, inner: Any, scale: Any, center: Any, lanes: Any, out: Any) -> None:
    """Write the gradient of what was normalised from that of the result ``inner``, whose mean is taken off."""
    share = _mean_product(inner, normed, lanes)
    for i in range(len(normed)):
        out[i] = narrow(scale * fma(-normed[i], share, inner[i] - center), out[i])


def _layer_norm(
    threads: int, addresses: tuple[int, ...], rows: int, width: int, kind: Any, weight_kind: Any,
    grad_weight_at: int, grad_bias_at: int,
) -> None:  # fmt: skip
    """Compute all gradients; addresses of x, the gradient, weight, mean, inverse and the gradient of x."""
    sums = np.zeros(2 * _PIECES * width, np.float64)
    share_out(_layer_norm_piece, _PIECES, threads, (addresses, rows, width, kind, weight_kind, sums.ctypes.data))
    _add_pieces(sums, 0, 2 * width, elements(grad_weight_at, width, weight_kind))
    _add_pieces(sums, width, 2 * width, elements(grad_bias_at, width, weight_kind))


@kernel_part
def _layer_norm_piece(
    piece: int, addresses: Any, rows: int, width: int, kind: Any, weight_kind: Any, sums_at: int
) -> None:
    x_at, grad_at, weight_at, center_at, inverse_at, grad_x_at = addresses
    x, grad, grad_x = elements(x_at, NO_END, kind), elements(grad_at, NO_END, kind), elements(grad_x_at, NO_END, kind)
    weight, center, inverse = elements(weight_at, width, weight_kind), floats(center_at, rows), floats(inverse_at, rows)
    sums = doubles(sums_at, 2 * _PIECES * width)[2 * piece * width : 2 * (piece + 1) * width]
    lanes, normed, inner = np.empty(LANES, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    block = np.zeros(2 * width, np.float32)
    begin, end = _rows_of(piece, rows)
    for first in range(begin, end, _BLOCK):
        for row in range(first, min(first + _BLOCK, end)):
            at, until = row * width, (row + 1) * width
            _layer_norm_row(
                x[at:until], grad[at:until], weight, center[row], inverse[row], normed, inner, lanes, block[:width],
                block[width:], grad_x[at:until],
            )  # fmt: skip
        _add_block(block, sums)


@inlined_part
def _layer_norm_row(
    x: Any, grad: Any, weight: Any, center: Any, scale: Any, normed: Any, inner: Any, lanes: Any, of_weight: Any,
    of_bias: Any, out: Any,
) -> None:  # fmt: skip
    for i in range(len(normed)):
        upstream = widen(grad[i])
        normed[i] = (widen(x[i]) - center) * scale
        inner[i] = upstream * widen(weight[i])
        of_weight[i] = fma(upstream, normed[i], of_weight[i])
        of_bias[i] = of_bias[i] + upstream
    _through_norm(normed, inner, scale, mean(inner, lanes), lanes, out)


def _gated_rms_norm(
    threads: int, addresses: tuple[int, ...], gate_stride: int, sizes: tuple[int, int, int], eps: Any,
    gate_first: bool, by_sigmoid: bool, kind: Any, weight_kind: Any, grad_weight_at: int,
) -> None:  # fmt: skip
    """Compute all gradients; addresses of x, gate, the gradient, weight, the gradients of x and gate; rows, their
    width, groups."""
    width = sizes[1]
    sums = np.zeros(_PIECES * width, np.float64)
    share_out(
        _gated_rms_norm_piece, _PIECES, threads,
        (addresses, gate_stride, sizes, eps, gate_first, by_sigmoid, kind, weight_kind, sums.ctypes.data),
    )  # fmt: skip
    _add_pieces(sums, 0, width, elements(grad_weight_at, width, weight_kind))


class _Row(NamedTuple):
    """Holds what is known of a group of a row, in float32: scratch of a piece.

    Attributes:
        shares: the sigmoid of the gate.
        factors: what the gate multiplies with.
        normed: what is normalised, then the result.
        inner: the gradient of it.
        lanes: as in `_mean_product`.
    """

    shares: Any
    factors: Any
    normed: Any
    inner: Any
    lanes: Any


@kernel_part
def _gated_rms_norm_piece(
    piece: int, addresses: Any, gate_stride: int, sizes: Any, eps: Any, gate_first: bool, by_sigmoid: bool, kind: Any,
    weight_kind: Any, sums_at: int,
) -> None:  # fmt: skip
    x_at, gate_at, grad_at, weight_at, grad_x_at, grad_gate_at = addresses
    rows, width, groups = sizes
    x, gate, grad = elements(x_at, NO_END, kind), elements(gate_at, NO_END, kind), elements(grad_at, NO_END, kind)
    grad_x, grad_gate = elements(grad_x_at, NO_END, kind), elements(grad_gate_at, NO_END, kind)
    weight = elements(weight_at, width, weight_kind)
    sums = doubles(sums_at, _PIECES * width)[piece * width : (piece + 1) * width]
    size = width // groups
    scratch = _Row(
        np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32),
        np.empty(LANES, np.float32),
    )  # fmt: skip
    block = np.zeros(width, np.float32)
    begin, end = _rows_of(piece, rows)
    for first in range(begin, end, _BLOCK):
        for row in range(first, min(first + _BLOCK, end)):
            for within in range(0, width, size):
                at, opening = row * width + within, row * gate_stride + within
                _gated_rms_norm_group(
                    x[at : at + size], gate[opening : opening + size], grad[at : at + size],
                    weight[within : within + size], eps, gate_first, by_sigmoid, scratch,
                    block[within : within + size], grad_x[at : at + size], grad_gate[at : at + size],
                )  # fmt: skip
        _add_block(block, sums)


@inlined_part
def _gated_rms_norm_group(
    x: Any, gate: Any, grad: Any, weight: Any, eps: Any, gate_first: bool, by_sigmoid: bool, scratch: Any, block: Any,
    grad_x: Any, grad_gate: Any,
) -> None:  # fmt: skip
    shares, factors, normed, inner, lanes = scratch
    for i in range(len(normed)):
        value = widen(gate[i])
        shares[i] = sigmoid(value)
        factors[i] = shares[i] if by_sigmoid else value * shares[i]
        normed[i] = widen(x[i]) * factors[i] if gate_first else widen(x[i])
    scale = _ONE / np.sqrt(mean_square(normed, _ZERO, lanes) + eps)
    for i in range(len(normed)):
        upstream = widen(grad[i]) if gate_first else widen(grad[i]) * factors[i]
        normed[i] = normed[i] * scale
        inner[i] = upstream * widen(weight[i])
        block[i] = fma(upstream, normed[i], block[i])
    share = _mean_product(inner, normed, lanes)
    for i in range(len(normed)):
        value = widen(gate[i])
        rest = _ONE - shares[i]
        slope = shares[i] * rest if by_sigmoid else shares[i] * (_ONE + value * rest)
        through = scale * fma(-normed[i], share, inner[i])
        of_factor = through * widen(x[i]) if gate_first else widen(grad[i]) * normed[i] * widen(weight[i])
        grad_gate[i] = narrow(of_factor * slope, grad_gate[i])
        grad_x[i] = narrow(through * factors[i] if gate_first else through, grad_x[i])


_rms_norm_rows = SharedKernel(_rms_norm)
_layer_norm_rows = SharedKernel(_layer_norm)
_gated_rms_norm_rows = SharedKernel(_gated_rms_norm)


def rms_norm_backward(saved: Saved, grad: torch.Tensor, eps: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Operations.rms_norm_backward`."""
    x, weight, inverse = saved
    dense, upstream, factors = x.contiguous(), grad.contiguous(), weight.contiguous()
    grad_x, grad_weight = torch.empty_like(dense), torch.empty_like(factors)
    width = x.size(-1)
    _rms_norm_rows(
        x.numel(), dense.data_ptr(), upstream.data_ptr(), kind_of(x.dtype), factors.data_ptr(), kind_of(weight.dtype),
        np.float32(offset), inverse.data_ptr(), len(inverse), width, grad_x.data_ptr(), grad_weight.data_ptr(),
    )  # fmt: skip
    return grad_x, grad_weight


def layer_norm_backward(
    saved: Saved, grad: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement `Operations.layer_norm_backward`."""
    x, weight, center, inverse = saved
    dense, upstream, factors = x.contiguous(), grad.contiguous(), weight.contiguous()
    grad_x, grad_weight, grad_bias = torch.empty_like(dense), torch.empty_like(factors), torch.empty_like(factors)
    tensors = dense, upstream, factors, center, inverse, grad_x
    _layer_norm_rows(
        x.numel(), tuple(tensor.data_ptr() for tensor in tensors), len(inverse), x.size(-1), kind_of(x.dtype),
        kind_of(weight.dtype), grad_weight.data_ptr(), grad_bias.data_ptr(),
    )  # fmt: skip
    return grad_x, grad_weight, grad_bias


def gated_rms_norm_backward(
    saved: Saved, grad: torch.Tensor, options: GatedNormOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement `Operations.gated_rms_norm_backward`."""
    x, gate, weight = saved
    dense, (gates, gate_stride) = x.contiguous(), with_unit_stride(gate)
    upstream, factors = grad.contiguous(), weight.contiguous()
    grad_x, grad_gate, grad_weight = torch.empty_like(dense), torch.empty_like(dense), torch.empty_like(factors)
    tensors = dense, gates, upstream, factors, grad_x, grad_gate
    _gated_rms_norm_rows(
        x.numel(), tuple(tensor.data_ptr() for tensor in tensors), gate_stride, (*x.shape, options.groups),
        np.float32(options.eps), options.gate_first, options.sigmoid, kind_of(x.dtype), kind_of(weight.dtype),
        grad_weight.data_ptr(),
    )  # fmt: skip
    return grad_x, grad_gate, grad_weight
