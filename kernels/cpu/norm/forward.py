"""Compute RMSNorm, gated or not, and LayerNorm on the CPU: a row at a time, sums in sixteen lanes added up in a fixed
order.

T rows of width W.
"""

from typing import Any

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import SharedKernel, array, parameter_array
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, kind_of, with_unit_stride
from samebit.kernels.cpu.base.numeric import fma, narrow, sigmoid, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.options import GatedNormOptions, Saved

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@inlined_part
def mean_of_lanes(lanes: Any, width: int) -> Any:
    """Return what the lanes hold together, lane after lane, over the width of the row that they sum up."""
    total = _ZERO
    for lane in range(LANES):
        total = total + lanes[lane]
    return total / np.float32(width)


@inlined_part
def mean_square(x: Any, center: Any, lanes: Any) -> Any:
    """Return the mean of (x - center)**2. ``lanes``: scratch ``[LANES]``."""
    width = len(x)
    for lane in range(LANES):
        lanes[lane] = _ZERO
    whole = width // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            value = widen(x[i + lane]) - center
            lanes[lane] = fma(value, value, lanes[lane])
    for i in range(whole, width):
        value = widen(x[i]) - center
        lanes[i - whole] = fma(value, value, lanes[i - whole])
    return mean_of_lanes(lanes, width)


@inlined_part
def mean(x: Any, lanes: Any) -> Any:
    """Return the mean of a row. ``lanes``: scratch ``[LANES]``."""
    width = len(x)
    for lane in range(LANES):
        lanes[lane] = _ZERO
    whole = width // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = lanes[lane] + widen(x[i + lane])
    for i in range(whole, width):
        lanes[i - whole] = lanes[i - whole] + widen(x[i])
    return mean_of_lanes(lanes, width)


_PARTS = 16
"""Count of pieces that rows are cut into: scratch memory is allocated once a piece."""


def _rms_norm(
    threads: int, x_address: int, kind: Any, weight_address: int, weight_kind: Any, offset: Any, eps: Any, rows: int,
    width: int, out_address: int, inverse_address: int,
) -> None:  # fmt: skip
    share_out(
        _rms_norm_part, _PARTS, threads,
        (x_address, kind, weight_address, weight_kind, offset, eps, rows, width, out_address, inverse_address),
    )  # fmt: skip


@kernel_part
def _rms_norm_part(
    part: int, x_address: int, kind: Any, weight_address: int, weight_kind: Any, offset: Any, eps: Any, rows: int,
    width: int, out_address: int, inverse_address: int,
) -> None:  # fmt: skip
    x, out = elements(x_address, rows * width, kind), elements(out_address, rows * width, kind)
    weight, inverse = elements(weight_address, width, weight_kind), floats(inverse_address, rows)
    lanes = np.empty(LANES, np.float32)
    for row in range(rows * part // _PARTS, rows * (part + 1) // _PARTS):
        first, last = row * width, (row + 1) * width
        inverse[row] = rms_norm_row(x[first:last], weight, offset, eps, lanes, out[first:last])


@inlined_part
def rms_norm_row(x: Any, weight: Any, offset: Any, eps: Any, lanes: Any, out: Any) -> Any:
    """Write the norm of a row to ``out``; return what the row was multiplied with. ``lanes``: scratch ``[LANES]``."""
    scale = _ONE / np.sqrt(mean_square(x, _ZERO, lanes) + eps)
    for i in range(len(x)):
        out[i] = _normed(x[i], scale, weight[i], offset, out[i])
    return scale


@inlined_part
def add_rms_norm_row(x: Any, y: Any, weight: Any, offset: Any, eps: Any, lanes: Any, total: Any) -> None:
    """Write the sum of a row and of the norm of another, which is rounded first. ``lanes``: scratch ``[LANES]``."""
    scale = _ONE / np.sqrt(mean_square(y, _ZERO, lanes) + eps)
    for i in range(len(x)):
        total[i] = narrow(widen(x[i]) + widen(_normed(y[i], scale, weight[i], offset, total[i])), total[i])


@inlined_part
def _normed(x: Any, scale: Any, weight: Any, offset: Any, like: Any) -> Any:
    """Return an element of a row's norm, rounded to the type of ``like``."""
    return narrow(widen(x) * scale * (widen(weight) + offset), like)


def _layer_norm(
    threads: int, x: Any, weight: Any, bias: Any, eps: Any, rows: int, width: int, out: Any, mean: Any, inverse: Any,
) -> None:  # fmt: skip
    share_out(_layer_norm_row, rows, threads, (x, weight, bias, eps, rows, width, out, mean, inverse))


@kernel_part
def _layer_norm_row(
    row: int, x: Any, weight: Any, bias: Any, eps: Any, rows: int, width: int, out: Any, mean: Any, inverse: Any,
) -> None:  # fmt: skip
    lanes = np.empty(LANES, np.float32)
    row_in, row_out = x[row * width : (row + 1) * width], out[row * width : (row + 1) * width]
    mean[row], inverse[row] = layer_norm_row(row_in, weight, bias, eps, lanes, row_out)


@inlined_part
def layer_norm_row(x: Any, weight: Any, bias: Any, eps: Any, lanes: Any, out: Any) -> Any:
    """Write the norm of a row to ``out``, which may be the row; return its mean, and what the rest was multiplied with.
    ``lanes``: scratch ``[LANES]``."""
    center = mean(x, lanes)
    scale = _ONE / np.sqrt(mean_square(x, center, lanes) + eps)
    for i in range(len(x)):
        value = (widen(x[i]) - center) * scale
        out[i] = narrow(fma(value, widen(weight[i]), widen(bias[i])), out[i])
    return center, scale


def _gated_rms_norm(
    threads: int, addresses: tuple[int, int, int, int], gate_stride: int, sizes: tuple[int, int, int, int], eps: Any,
    gate_first: bool, by_sigmoid: bool, kind: Any, weight_kind: Any,
) -> None:  # fmt: skip
    """Normalise all rows; addresses of x, gate, weight and out; rows, their width, groups, width of the weight."""
    share_out(
        _gated_rms_norm_part, _PARTS, threads,
        (addresses, gate_stride, sizes, eps, gate_first, by_sigmoid, kind, weight_kind),
    )  # fmt: skip


@kernel_part
def _gated_rms_norm_part(
    part: int, addresses: Any, gate_stride: int, sizes: Any, eps: Any, gate_first: bool, by_sigmoid: bool, kind: Any,
    weight_kind: Any,
) -> None:  # fmt: skip
    x_at, gate_at, weight_at, out_at = addresses
    rows, width, groups, weight_width = sizes
    x, gate, out = elements(x_at, rows * width, kind), elements(gate_at, NO_END, kind), elements(out_at, NO_END, kind)
    weight = elements(weight_at, weight_width, weight_kind)
    size = width // groups
    lanes = np.empty(LANES, np.float32)
    scaled = np.empty(size, np.float32)
    gates = np.empty(size, np.float32)
    for row in range(rows * part // _PARTS, rows * (part + 1) // _PARTS):
        for group in range(groups):
            at, first = row * width + group * size, group * size % weight_width
            opening = row * gate_stride + group * size
            _gated_rms_norm_group(
                x[at : at + size], gate[opening : opening + size], weight[first : first + size], eps, gate_first,
                by_sigmoid, out[at : at + size], scaled, gates, lanes,
            )  # fmt: skip


@inlined_part
def _gated_rms_norm_group(
    x: Any, gate: Any, weight: Any, eps: Any, gate_first: bool, by_sigmoid: bool, out: Any, scaled: Any, gates: Any,
    lanes: Any,
) -> None:  # fmt: skip
    for i in range(len(scaled)):
        value = widen(gate[i])
        gates[i] = sigmoid(value) if by_sigmoid else value * sigmoid(value)
        scaled[i] = widen(x[i]) * gates[i] if gate_first else widen(x[i])
    scale = _ONE / np.sqrt(mean_square(scaled, _ZERO, lanes) + eps)
    for i in range(len(scaled)):
        normed = scaled[i] * scale * widen(weight[i])
        out[i] = narrow(normed if gate_first else normed * gates[i], out[i])


_rms_norm_rows = SharedKernel(_rms_norm)
_layer_norm_rows = SharedKernel(_layer_norm)
gated_rms_norm_rows = SharedKernel(_gated_rms_norm)


def rms_norm_forward(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.rms_norm_forward`."""
    dense, factors = x.contiguous(), weight.contiguous()
    width, size = x.size(-1), x.numel()
    rows = size // width
    out = torch.empty_like(dense)
    inverse = torch.empty(rows, dtype=torch.float32, device="cpu")
    _rms_norm_rows(
        size, dense.data_ptr(), kind_of(x.dtype), factors.data_ptr(), kind_of(weight.dtype), np.float32(offset),
        np.float32(eps), rows, width, out.data_ptr(), inverse.data_ptr(),
    )  # fmt: skip
    return out, (x, weight, inverse)


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.add_rms_norm`."""
    return rms_norm_forward(torch.add(x, y, out=total), weight, eps, offset)


def layer_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.layer_norm_forward`."""
    rows_of_x = x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty_like(rows_of_x)
    mean = torch.empty(rows, dtype=torch.float32, device="cpu")
    inverse = torch.empty(rows, dtype=torch.float32, device="cpu")
    _layer_norm_rows(
        x.numel(), array(rows_of_x).reshape(-1), parameter_array(weight), parameter_array(bias), np.float32(eps), rows,
        width, array(out).reshape(-1), mean.numpy(), inverse.numpy(),
    )  # fmt: skip
    return out, (x, weight, mean, inverse)


def gated_rms_norm_forward(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, options: GatedNormOptions
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.gated_rms_norm_forward`."""
    dense, (gates, gate_stride), factors = x.contiguous(), with_unit_stride(gate), weight.contiguous()
    out = torch.empty_like(dense)
    gated_rms_norm_rows(
        x.numel(), (dense.data_ptr(), gates.data_ptr(), factors.data_ptr(), out.data_ptr()), gate_stride,
        (*x.shape, options.groups, len(factors)), np.float32(options.eps), options.gate_first, options.sigmoid,
        kind_of(x.dtype), kind_of(weight.dtype),
    )  # fmt: skip
    return out, (x, gate, weight)
