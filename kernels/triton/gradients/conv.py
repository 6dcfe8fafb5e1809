"""Compute the gradients of the causal convolution of a training call: no sequence has inputs before its first row.

With u_t the gradient of the sum of row t (of what goes into its silu, where there is one), the gradient of an input is
``sum over d < K of weight[K - 1 - d] * u[t + d]``, d ascending, inside its sequence. A program owns a tile of rows and
channels and computes the u of the K - 1 rows after it again, so nothing is added to from two programs and no u is kept.
Gradients of weight and bias are summed over the rows of a tile, then over the tiles. T tokens, S
sequences, W channels, K taps.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.options import Saved
from samebit.kernels.triton.numeric import aligned, jit, sigmoid, with_aligned_rows

_ROWS, _CHANNELS, _WARPS = 64, 64, 8
"""Rows and channels that a program takes, and its warps; its rows are one part of the sums."""


def conv_backward(
    saved: Saved, grad: torch.Tensor, context: ForwardContext, silu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement `Operations.conv_backward`: the gradient of x ``[T, W]`` is zero for padding rows."""
    x, weight, bias = saved
    x, grad = with_aligned_rows(x), aligned(grad)
    (rows, width), layout = x.shape, context.on_device
    taps = weight[:, 0, :].t().to(torch.float32).contiguous()
    grad_x = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(ceil_div(rows, _ROWS), len(taps) + 1, width, dtype=torch.float32, device=x.device)
    if rows:
        _conv_gradients[(len(parts), ceil_div(width, _CHANNELS))](
            x, taps, aligned(bias.float()), grad, layout.sequences, layout.within, layout.lengths, grad_x, parts, rows,
            x.stride(0), width, len(taps), _ROWS, _CHANNELS, silu, num_warps=_WARPS,
        )  # fmt: skip
    sums = parts.sum(0)
    return grad_x, sums[:-1].t()[:, None].to(weight.dtype), sums[-1].to(bias.dtype)


@jit()
def _of_sums(
    x: tensor, taps: tensor, bias: tensor, grad: tensor, row: tensor, place: tensor, channel: tensor, real: tensor,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
) -> Any:  # fmt: skip
    """Return gradients of the sums of rows at these places of sequences, 0 where not ``real``."""
    upstream = tl.load(grad + row * WIDTH + channel, mask=real, other=0.0).to(tl.float32)
    if SILU:
        acc = tl.load(bias + channel, mask=channel < WIDTH, other=0.0)
        for k in tl.static_range(TAPS):
            seen = real & (place >= TAPS - 1 - k)
            value = tl.load(x + (row - (TAPS - 1) + k) * STRIDE + channel, mask=seen, other=0.0).to(tl.float32)
            acc += tl.load(taps + k * WIDTH + channel, mask=channel < WIDTH, other=0.0) * value
        gate = sigmoid(acc)
        upstream = upstream * gate * (1.0 + acc * (1.0 - gate))
    return upstream


@jit(do_not_specialize=["count"])
def _conv_gradients(
    x: tensor, taps: tensor, bias: tensor, grad: tensor, sequences: tensor, within: tensor, lengths: tensor,
    grad_x: tensor, parts: tensor, count: tensor, STRIDE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, SILU: tl.constexpr,
) -> None:  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    row = part * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    sequence = tl.load(sequences + row, mask=row < count, other=-1)
    place = tl.load(within + row, mask=row < count, other=0)
    length = tl.load(lengths + sequence, mask=sequence >= 0, other=0)  # no place is in a sequence of none
    real = (place < length) & (channel < WIDTH)
    own = _of_sums(x, taps, bias, grad, row, place, channel, real, STRIDE, WIDTH, TAPS, SILU)
    acc = tl.load(taps + (TAPS - 1) * WIDTH + channel, mask=channel < WIDTH, other=0.0) * own
    for d in tl.static_range(1, TAPS):
        there = (place + d < length) & (channel < WIDTH)
        later = _of_sums(x, taps, bias, grad, row + d, place + d, channel, there, STRIDE, WIDTH, TAPS, SILU)
        acc += tl.load(taps + (TAPS - 1 - d) * WIDTH + channel, mask=channel < WIDTH, other=0.0) * later
    tl.store(grad_x + row * WIDTH + channel, acc.to(grad_x.dtype.element_ty), mask=(row < count) & (channel < WIDTH))
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    target = parts + part * ((TAPS + 1) * WIDTH) + column
    for k in tl.static_range(TAPS):
        seen = real & (place >= TAPS - 1 - k)
        value = tl.load(x + (row - (TAPS - 1) + k) * STRIDE + channel, mask=seen, other=0.0).to(tl.float32)
        tl.store(target + k * WIDTH, tl.sum(own * value, axis=0), mask=column < WIDTH)
    tl.store(target + TAPS * WIDTH, tl.sum(own, axis=0), mask=column < WIDTH)
