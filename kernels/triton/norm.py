"""Compute RMSNorm, gated RMSNorm and LayerNorm: a row's sums are one reduction of a tile whose shape the width decides.

Gradients of weights are summed over `_GRADIENT_ROWS` rows by one program, row tile after row tile, then over the
programs: in an order that the number of rows alone decides. T rows of width W.
"""

import logging
from functools import cache, partial
from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.options import GatedNormOptions, Saved
from samebit.kernels.triton.numeric import aligned, jit, sigmoid, with_aligned_rows
from samebit.kernels.triton.tiles.table import row_tile

logger = logging.getLogger(__name__)

_GRADIENT_ROWS = 32
"""Rows whose share of a weight's gradient one program sums: few, so that 8,192 rows fill a GPU."""

_COMPARED = 67
"""Rows in which a sum and its norm are compared with those of a launch each."""


def rms_norm_forward(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.rms_norm_forward`."""
    return _normalize(x, weight, weight, eps, offset, centered=False), (x, weight)


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.add_rms_norm`."""
    if _sums_in_one_launch(x.device, x.shape[-1], x.dtype, weight.dtype):
        return added(x, y, total, weight, eps, offset), (total, weight)
    return rms_norm_forward(torch.add(x, y, out=total), weight, eps, offset)


@cache
def _sums_in_one_launch(device: torch.device, width: int, dtype: torch.dtype, of_weight: torch.dtype) -> bool:
    """Return whether a sum and its norm were seen to have the bits of a launch each. The first call compares them."""
    if added_equal(device, width, dtype, of_weight):
        return True
    logger.warning("norms of %d %s: with a sum in one launch they do not have the bits of a launch each", width, dtype)
    return False


@torch.no_grad()
def added_equal(device: torch.device, width: int, dtype: torch.dtype, of_weight: torch.dtype) -> bool:
    """Compare on the device a sum and its norm in one launch with those of a launch each.

    Raises:
        RuntimeError: the device is recording a CUDA graph.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the first norm of a sum of {width} elements came while a CUDA graph was recorded; allowed: a call before"
        )
    generator = torch.Generator(device).manual_seed(width)
    floats = partial(torch.empty, dtype=torch.float32, device=device)
    x, y = (floats(_COMPARED, width).normal_(generator=generator).to(dtype) for _ in range(2))
    weight = floats(width).normal_(generator=generator).to(of_weight)
    total, expected = torch.empty_like(x), x + y
    found = added(x, y, total, weight, 1e-6, 1.0)
    return torch.equal(total, expected) and torch.equal(found, rms_norm_forward(expected, weight, 1e-6, 1.0)[0])


def rms_norm_backward(saved: Saved, grad: torch.Tensor, eps: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Operations.rms_norm_backward`."""
    x, weight = saved
    grad_x, grad_weight, _ = _normalize_backward(x, weight, grad, eps, offset, centered=False)
    return grad_x, grad_weight.to(weight.dtype)


def layer_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.layer_norm_forward`."""
    return _normalize(x, weight, bias, eps, 0.0, centered=True), (x, weight, bias)


def layer_norm_backward(
    saved: Saved, grad: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement `Operations.layer_norm_backward`."""
    x, weight, bias = saved
    grad_x, grad_weight, grad_bias = _normalize_backward(x, weight, grad, eps, 0.0, centered=True)
    return grad_x, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype)


def _normalize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, offset: float, *, centered: bool
) -> torch.Tensor:
    """Compute RMSNorm, or LayerNorm if ``centered`` (only then ``bias`` is read)."""
    x, width = aligned(x), x.shape[-1]
    out = torch.empty_like(x)
    count = x.numel() // width
    rows, padded, warps = row_tile(width)
    if count:
        _norm_rows[(ceil_div(count, rows),)](
            x, aligned(weight), aligned(bias), out, count, eps, offset, width, rows, padded, centered, num_warps=warps
        )
    return out


def added(
    x: torch.Tensor, y: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:
    """Compute a sum and its RMSNorm in one launch."""
    x, y, width = aligned(x), aligned(y), x.shape[-1]
    out = torch.empty_like(x)
    count = x.numel() // width
    rows, padded, warps = row_tile(width)
    if count:
        _norm_sums[(ceil_div(count, rows),)](
            x, y, aligned(weight), total, out, count, eps, offset, width, rows, padded, num_warps=warps
        )
    return out


def _normalize_backward(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, eps: float, offset: float, *, centered: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of x, of the weight and of the bias, the last two float32."""
    x, grad, width = aligned(x), aligned(grad), x.shape[-1]
    grad_x = torch.empty_like(x)
    count = x.numel() // width
    rows, padded, warps = row_tile(width)
    parts = torch.empty(2, ceil_div(count, _GRADIENT_ROWS), width, dtype=torch.float32, device=x.device)
    if count:
        _norm_gradients[(parts.shape[1],)](
            x, aligned(weight), grad, grad_x, parts[0], parts[1], count, eps, offset, width, rows, padded, centered,
            _GRADIENT_ROWS, num_warps=warps,
        )  # fmt: skip
    return grad_x, parts[0].sum(0), parts[1].sum(0)


@jit()
def statistics(x: tensor, real: tensor, eps: tensor, WIDTH: tl.constexpr, CENTERED: tl.constexpr) -> Any:
    """Return the normed rows of a tile, and 1 / their deviation."""
    if CENTERED:
        x = tl.where(real, x - (tl.sum(x, axis=1) / WIDTH)[:, None], 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / WIDTH + eps)
    return x * scale[:, None], scale


@jit(do_not_specialize=["count", "eps", "offset"])
def _norm_rows(
    x: tensor, weight: tensor, bias: tensor, out: tensor, count: tensor, eps: tensor, offset: tensor,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, CENTERED: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    real = (row[:, None] < count) & (column[None, :] < WIDTH)
    place = row[:, None] * WIDTH + column[None, :]
    normed, _ = statistics(tl.load(x + place, mask=real, other=0.0).to(tl.float32), real, eps, WIDTH, CENTERED)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
    result = normed * factor[None, :]
    if CENTERED:
        result += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=real)


@jit(do_not_specialize=["count", "eps", "offset"])
def _norm_sums(
    x: tensor, y: tensor, weight: tensor, total: tensor, out: tensor, count: tensor, eps: tensor, offset: tensor,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Do as `_norm_rows` with the sum of two rows, rounded as it is stored."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    real = (row[:, None] < count) & (column[None, :] < WIDTH)
    place = row[:, None] * WIDTH + column[None, :]
    left = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    right = tl.load(y + place, mask=real, other=0.0).to(tl.float32)
    value = (left + right).to(total.dtype.element_ty)
    tl.store(total + place, value, mask=real)
    normed, _ = statistics(value.to(tl.float32), real, eps, WIDTH, False)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
    tl.store(out + place, (normed * factor[None, :]).to(out.dtype.element_ty), mask=real)


@jit(do_not_specialize=["count", "eps", "offset"])
def _norm_gradients(
    x: tensor, weight: tensor, grad: tensor, grad_x: tensor, weight_parts: tensor, bias_parts: tensor, count: tensor,
    eps: tensor, offset: tensor, WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, CENTERED: tl.constexpr,
    PART: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.arange(0, PADDED)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
    of_weight = tl.zeros((PADDED,), tl.float32)
    of_bias = tl.zeros((PADDED,), tl.float32)
    for done in range(0, PART, ROWS):
        row = tl.program_id(0).to(tl.int64) * PART + done + tl.arange(0, ROWS)
        real = (row[:, None] < count) & (done + tl.arange(0, ROWS)[:, None] < PART) & (column[None, :] < WIDTH)
        place = row[:, None] * WIDTH + column[None, :]
        value = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
        normed, scale = statistics(value, real, eps, WIDTH, CENTERED)
        upstream = tl.load(grad + place, mask=real, other=0.0).to(tl.float32)
        inner = upstream * factor[None, :]
        inward = inner - normed * (tl.sum(inner * normed, axis=1) / WIDTH)[:, None]
        if CENTERED:
            inward -= (tl.sum(inner, axis=1) / WIDTH)[:, None]
        tl.store(grad_x + place, (inward * scale[:, None]).to(grad_x.dtype.element_ty), mask=real)
        of_weight += tl.sum(upstream * normed, axis=0)
        of_bias += tl.sum(upstream, axis=0)
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    tl.store(weight_parts + at, of_weight, mask=column < WIDTH)
    tl.store(bias_parts + at, of_bias, mask=column < WIDTH)


def gated_rms_norm_forward(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, options: GatedNormOptions
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.gated_rms_norm_forward`."""
    x, gate = aligned(x), with_aligned_rows(gate)
    out = torch.empty_like(x)
    width = x.shape[1] // options.groups
    rows, padded, warps = row_tile(width)
    each = weight if len(weight) == x.shape[1] else weight.repeat(options.groups)
    if len(x):
        _gated_rows[(ceil_div(len(x), rows), options.groups)](
            x, gate, aligned(each), out, len(x), options.eps, gate.stride(0), options.groups, width,
            options.gate_first, options.sigmoid, rows, padded, num_warps=warps,
        )  # fmt: skip
    return out, (x, gate, weight)


def gated_rms_norm_backward(
    saved: Saved, grad: torch.Tensor, options: GatedNormOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement `Operations.gated_rms_norm_backward`."""
    x, gate, weight = saved
    grad = aligned(grad)
    grad_x, grad_gate = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[1] // options.groups
    rows, padded, warps = row_tile(width)
    parts = torch.empty(ceil_div(len(x), _GRADIENT_ROWS), x.shape[1], dtype=torch.float32, device=x.device)
    if len(x):
        _gated_gradients[(len(parts), options.groups)](
            x, gate, aligned(weight), grad, grad_x, grad_gate, parts, len(x), options.eps, gate.stride(0),
            options.groups, width, options.gate_first, options.sigmoid, rows, padded, _GRADIENT_ROWS,
            num_warps=warps,
        )  # fmt: skip
    return grad_x, grad_gate, parts.sum(0).to(weight.dtype)


@jit(do_not_specialize=["count", "eps"])
def _gated_rows(
    x: tensor, gate: tensor, weight: tensor, out: tensor, count: tensor, eps: tensor, GATE_STRIDE: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr, ROWS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    real = (row[:, None] < count) & (column[None, :] < WIDTH)
    inside = tl.program_id(1) * WIDTH + column
    place = row[:, None] * (GROUPS * WIDTH) + inside[None, :]
    opening = tl.load(gate + row[:, None] * GATE_STRIDE + inside[None, :], mask=real, other=0.0).to(tl.float32)
    times = sigmoid(opening) if SIGMOID else opening * sigmoid(opening)
    value = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    normed, _ = statistics(value * times if GATE_FIRST else value, real, eps, WIDTH, False)
    normed *= tl.load(weight + inside, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if not GATE_FIRST:
        normed *= times
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=real)


@jit(do_not_specialize=["count", "eps"])
def _gated_gradients(
    x: tensor, gate: tensor, weight: tensor, grad: tensor, grad_x: tensor, grad_gate: tensor, weight_parts: tensor,
    count: tensor, eps: tensor, GATE_STRIDE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.arange(0, PADDED)
    inside = tl.program_id(1) * WIDTH + column
    factor = tl.load(weight + inside, mask=column < WIDTH, other=0.0).to(tl.float32)
    of_weight = tl.zeros((PADDED,), tl.float32)
    for done in range(0, PART, ROWS):
        row = tl.program_id(0).to(tl.int64) * PART + done + tl.arange(0, ROWS)
        real = (row[:, None] < count) & (done + tl.arange(0, ROWS)[:, None] < PART) & (column[None, :] < WIDTH)
        place = row[:, None] * (GROUPS * WIDTH) + inside[None, :]
        opening = tl.load(gate + row[:, None] * GATE_STRIDE + inside[None, :], mask=real, other=0.0).to(tl.float32)
        share = sigmoid(opening)
        times = share if SIGMOID else opening * share
        value = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
        outer = tl.load(grad + place, mask=real, other=0.0).to(tl.float32)
        normed, scale = statistics(value * times if GATE_FIRST else value, real, eps, WIDTH, False)
        upstream = outer if GATE_FIRST else outer * times
        inner = upstream * factor[None, :]
        inward = (inner - normed * (tl.sum(inner * normed, axis=1) / WIDTH)[:, None]) * scale[:, None]
        to_times = inward * value if GATE_FIRST else outer * normed * factor[None, :]
        to_x = inward * times if GATE_FIRST else inward
        slope = share * (1.0 - share) if SIGMOID else share * (1.0 + opening * (1.0 - share))
        to_gate = to_times * slope
        tl.store(grad_x + place, to_x.to(grad_x.dtype.element_ty), mask=real)
        tl.store(grad_gate + place, to_gate.to(grad_gate.dtype.element_ty), mask=real)
        of_weight += tl.sum(upstream * normed, axis=0)
    at = tl.program_id(0).to(tl.int64) * (GROUPS * WIDTH) + inside
    tl.store(weight_parts + at, of_weight, mask=column < WIDTH)
