"""Compute the depthwise causal convolution with bias, and silu or nothing behind it, over ragged sequences, one row at
a time.

An element is ``bias + sum over k of weight[k] * input[t - K + 1 + k]``, k ascending, wherever the inputs come from: the
rows of this call or the window of those before it. Inputs before position 0 are left out.
A window holds the input of a position p in its row ``p % R``, that of a block boundary in row ``p % R - (R - K + 1)``.

T tokens, S sequences, W channels, K taps, R rows of a window: K - 1, or more (`samebit.kernels.layout.states.memory`).
"""

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.options import Saved
from samebit.kernels.triton.numeric import aligned, jit, sigmoid, with_aligned_rows
from samebit.kernels.triton.tiles.table import ELEMENTS


def conv_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, context: ForwardContext, layer: int, silu: bool
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.conv_forward`."""
    rows = with_aligned_rows(x)
    if context.states is None:
        return _convolve(rows, weight, bias, context, rows, 1, silu), (x, weight, bias)
    memory = context.states.layers[layer]
    out = _convolve(rows, weight, bias, context, memory.window, max(1, memory.windows[1]), silu)
    _move_windows(rows, context, layer)
    return out, ()


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, context: ForwardContext, windows: torch.Tensor,
    kept: int, silu: bool,
) -> torch.Tensor:  # fmt: skip
    """Convolve; ``windows``, of ``kept`` rows each, are read where a sequence began before this call, so not in a
    training call."""
    rows, width = x.shape
    layout = context.on_device
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    taps = weight[:, 0, :].detach().t().to(torch.float32).contiguous()
    if rows:
        _convolve_row[(rows, ceil_div(width, ELEMENTS))](
            x, taps, aligned(bias.float()), layout.sequences, layout.within, layout.starts, layout.slots, windows, out,
            kept, x.stride(0), width, len(taps), ELEMENTS, silu,
        )  # fmt: skip
    return out


@jit(do_not_specialize=["kept"])  # one compiled kernel serves training and windows of any size
def _convolve_row(
    x: tensor, taps: tensor, bias: tensor, sequences: tensor, within: tensor, starts: tensor, slots: tensor,
    windows: tensor, out: tensor, kept: tensor, STRIDE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    SIZE: tl.constexpr, SILU: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    real = channel < WIDTH
    sequence = tl.load(sequences + row)
    acc = tl.zeros((SIZE,), tl.float32)
    if sequence >= 0:
        place, start = tl.load(within + row), tl.load(starts + sequence)
        window = windows + tl.load(slots + sequence).to(tl.int64) * (kept * WIDTH)
        oldest = (start + place - (TAPS - 1)) % kept
        acc += tl.load(bias + channel, mask=real, other=0.0)
        for k in tl.static_range(TAPS):
            offset = tl.full((SIZE,), place - (TAPS - 1) + k, tl.int32)
            here = tl.load(x + (row - (TAPS - 1) + k) * STRIDE + channel, mask=real & (offset >= 0), other=0.0)
            held = real & (offset < 0) & (start + offset >= 0)
            at = tl.where(oldest + k < kept, oldest + k, oldest + k - kept)
            before = tl.load(window + at * WIDTH + channel, mask=held, other=0.0)
            value = tl.where(offset >= 0, here, before).to(tl.float32)
            acc += tl.load(taps + k * WIDTH + channel, mask=real, other=0.0) * value
    if SILU:
        acc = acc * sigmoid(acc)
    tl.store(out + row * WIDTH + channel, acc.to(out.dtype.element_ty), mask=real)


def _move_windows(x: torch.Tensor, context: ForwardContext, layer: int) -> None:
    """Keep the inputs before a call's end, before its last block boundary, and where captures want them."""
    if context.states is None or not len(context.lengths):
        return
    layout, memory = context.on_device, context.states.layers[layer]
    _, kept, (size, width) = memory.windows
    _move_window[(len(context.lengths), ceil_div(width, ELEMENTS))](
        x, layout.row_start, layout.lengths, layout.starts, layout.slots, memory.window, memory.block_window,
        layout.captures, layout.first_capture, context.states.checkpoints[layer].window, context.block_size,
        x.stride(0), width, size, kept, ELEMENTS,
    )  # fmt: skip


@jit(do_not_specialize=["grid"])
def _move_window(
    x: tensor, row_start: tensor, lengths: tensor, starts: tensor, slots: tensor, windows: tensor,
    block_windows: tensor, captures: tensor, first_capture: tensor, captured: tensor, grid: tensor,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    sequence = tl.program_id(0)
    row, length = tl.load(row_start + sequence).to(tl.int64), tl.load(lengths + sequence)
    start, slot = tl.load(starts + sequence), tl.load(slots + sequence).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    rows, window, end = x + row * STRIDE, windows + slot * (KEPT * WIDTH), start + length
    for c in range(tl.load(first_capture + sequence), tl.load(first_capture + sequence + 1)):
        target = captured + tl.load(captures + 3 * c + 2).to(tl.int64) * (SIZE * WIDTH)
        _window_at(rows, start, tl.load(captures + 3 * c + 1), window, target, channel, STRIDE, WIDTH, SIZE, KEPT)
    boundary = end // grid * grid
    if boundary > start:
        target = block_windows + slot * (SIZE * WIDTH)
        _window_at(rows, start, boundary, window, target, channel, STRIDE, WIDTH, SIZE, KEPT)
    for j in tl.static_range(KEPT):  # of a sequence that pads a graph, whose slot is not its own, nothing
        position = tl.full(channel.shape, end - KEPT + j, tl.int64)
        new = (channel < WIDTH) & (position >= start)
        here = tl.load(rows + (position - start) * STRIDE + channel, mask=new, other=0.0)
        tl.store(window + position % KEPT * WIDTH + channel, here, mask=new)


@jit()
def _window_at(
    rows: tensor, start: tensor, end: tensor, before: tensor, target: tensor, channel: tensor, STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the last inputs before position ``end`` from a sequence's rows, the first of which is at ``start``, and from
    its window as it was before."""
    for j in tl.static_range(SIZE):
        position = tl.full(channel.shape, end - SIZE + j, tl.int64)
        real = (channel < WIDTH) & (position >= 0)
        here = tl.load(rows + (position - start) * STRIDE + channel, mask=real & (position >= start), other=0.0)
        at = position % KEPT
        old = tl.load(before + at * WIDTH + channel, mask=real & (position < start), other=0.0)
        tl.store(target + (at - (KEPT - SIZE)) * WIDTH + channel, tl.where(position >= start, here, old), mask=real)
