"""Compute the depthwise causal convolution with bias and silu on the CPU, one row at a time.

Invariant: an element is ``bias + sum over k of weight[k] * input[t - K + 1 + k]``, k ascending, wherever the inputs
come from: the rows of this call or the window of those before it. Inputs before position 0 are left out.

T tokens, S sequences, W channels, K taps.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import NO_END, elements, integers, kind_of, with_unit_stride
from samebit.kernels.cpu.base.numeric import fma, narrow, sigmoid, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.options import Saved

_PARTS = 16
"""Count of pieces that rows are cut into: scratch memory is allocated once a piece."""

_FEW_ROWS = 64
"""Up to so many rows threads take channels, not rows: as they do of the product before, so that what one has computed
is in its own cache, and windows are where it has moved them."""


class Inputs(NamedTuple):
    """Holds what is convolved, flat: x and its stride, taps of all channels, and biases."""

    x: Any
    stride: int
    weight: Any
    bias: Any


class Layout(NamedTuple):
    """Holds first row, length, start and slot, each of all sequences, in ``of``; rows of none are left as they are."""

    of: Any
    sequences: int


class Windows(NamedTuple):
    """Holds the last inputs of each slot, and those as of the last multiple of ``grid``; 0 for a call without."""

    grid: int
    now: Any
    of_block: Any


class Sizes(NamedTuple):
    """Holds T, W, K, and into how many pieces rows and channels are cut."""

    rows: int
    width: int
    taps: int
    parts: int
    shares: int


def _convolve(threads: int, tensors: Any, sizes: Any, layout: Any, memory: Any, captures: Any, kinds: Any) -> None:
    """Convolve all rows, then move the windows on; addresses and numbers come in plain tuples, which cost a call less
    than named ones.

    Args:
        threads: take shares of the rows, or of the channels.
        tensors: addresses of x and its stride, of weight, bias and out.
        sizes: T, W and K.
        layout: address of what `Layout` holds; number of sequences.
        memory: the grid of `Windows`, addresses of the windows now and of a block.
        captures: address of (sequence, position, checkpoint) of each, their number, address of the checkpoints.
        kinds: numbers of the types of x, weight and bias.
    """
    x_at, stride, weight_at, bias_at, out_at = tensors
    rows, width, taps = sizes
    kind, weight_kind, bias_kind = kinds
    layout_at, sequences = layout
    grid, now_at, of_block_at = memory
    captures_at, num_captures, captured_at = captures
    shares = threads if rows <= _FEW_ROWS else 1
    cut = Sizes(rows, width, taps, 1 if shares > 1 else min(_PARTS, rows), shares)
    inputs = Inputs(
        elements(x_at, NO_END, kind), stride, elements(weight_at, width * taps, weight_kind),
        elements(bias_at, width, bias_kind),
    )  # fmt: skip
    rows_of = Layout(integers(layout_at, 4 * sequences), sequences)
    windows = Windows(grid, elements(now_at, NO_END, kind), elements(of_block_at, NO_END, kind))
    share_out(
        _conv_rows, cut.parts * shares, threads,
        (cut, inputs, rows_of, windows.now, elements(out_at, rows * width, kind)),
    )  # fmt: skip
    share_out(
        _move_windows, sequences * shares if grid else 0, threads,
        (cut, inputs, rows_of, windows, integers(captures_at, 3 * num_captures), elements(captured_at, NO_END, kind)),
    )  # fmt: skip


convolve_rows = SharedKernel(_convolve)


@inlined_part
def _channels(sizes: Any, share: int) -> Any:
    """Return the channels of a share, from the first to before the last: whole vectors."""
    width, each = sizes.width, sizes.shares * LANES
    size = (width + each - 1) // each * LANES
    return min(share * size, width), min((share + 1) * size, width)


@inlined_part
def _spread(weight: Any, bias: Any, first: int, filters: Any) -> None:
    """Write ``filters[k, c] = weight[first + c, k]``, and the bias behind the taps."""
    taps, count = filters.shape[0] - 1, filters.shape[1]
    for k in range(taps):
        for c in range(count):
            filters[k, c] = widen(weight[(first + c) * taps + k])
    for c in range(count):
        filters[taps, c] = widen(bias[first + c])


@kernel_part
def _conv_rows(item: int, sizes: Any, inputs: Any, layout: Any, now: Any, out: Any) -> None:
    """Convolve a piece of the rows, in a share of the channels."""
    rows, width, parts = sizes.rows, sizes.width, sizes.parts
    first, last = _channels(sizes, item // parts)
    of, sequences = layout
    filters, acc = np.empty((sizes.taps + 1, last - first), np.float32), np.empty(last - first, np.float32)
    _spread(inputs.weight, inputs.bias, first, filters)
    part = item % parts
    above, below = rows * part // parts, rows * (part + 1) // parts
    for sequence in range(sequences):
        begin, start, slot = of[sequence], of[2 * sequences + sequence], of[3 * sequences + sequence]
        for row in range(max(above, begin), min(below, begin + of[sequences + sequence])):
            _conv_row(inputs, filters, row, row - begin, start, slot, now, width, first, acc)
            result = out[row * width + first : row * width + last]
            for c in range(len(result)):
                result[c] = narrow(acc[c] * sigmoid(acc[c]), result[c])


@inlined_part
def _conv_row(
    inputs: Any, filters: Any, row: int, within: int, start: int, slot: int, windows: Any, width: int, first: int,
    acc: Any,
) -> None:  # fmt: skip
    """Compute the row's channels from the ``first`` on before their activation, in ``acc``."""
    x, stride = inputs.x, inputs.stride
    taps, count = filters.shape[0] - 1, len(acc)
    for c in range(count):
        acc[c] = filters[taps, c]
    for k in range(taps):
        offset = within - (taps - 1) + k
        if offset >= 0:
            source = (row - (taps - 1) + k) * stride + first
            _add(filters[k], x[source : source + count], acc)
        elif start + offset >= 0:
            source = (slot * (taps - 1) + taps - 1 + offset) * width + first
            _add(filters[k], windows[source : source + count], acc)


@inlined_part
def _add(weight: Any, source: Any, acc: Any) -> None:
    for c in range(len(acc)):
        acc[c] = fma(weight[c], widen(source[c]), acc[c])


@kernel_part
def _move_windows(item: int, sizes: Any, inputs: Any, layout: Any, memory: Any, captures: Any, captured: Any) -> None:
    """Keep a sequence's inputs before a call's end, before its last block boundary, and where captures want them, in a
    share of the channels."""
    of, sequences = layout
    sequence, channels = item % sequences, _channels(sizes, item // sequences)
    grid, windows, block_windows = memory
    width, size = sizes.width, sizes.taps - 1
    row, length = of[sequence], of[sequences + sequence]
    start, slot = of[2 * sequences + sequence], of[3 * sequences + sequence]
    held = size * width
    window = windows[slot * held : (slot + 1) * held]
    for c in range(0, len(captures), 3):
        if captures[c] == sequence:
            kept = captured[captures[c + 2] * held : (captures[c + 2] + 1) * held]
            _window_at(inputs, row, captures[c + 1] - start, width, size, channels, window, kept)
    boundary = (start + length) // grid * grid
    if boundary > start:
        kept = block_windows[slot * held : (slot + 1) * held]
        _window_at(inputs, row, boundary - start, width, size, channels, window, kept)
    _window_at(inputs, row, length, width, size, channels, window, window)


@inlined_part
def _window_at(
    inputs: Any, row: int, offset: int, width: int, size: int, channels: Any, before: Any, target: Any
) -> None:
    """Copy the last inputs before row ``row + offset``; ascending, so that ``target`` may be ``before``."""
    first, last = channels
    for j in range(size):
        place, kept = offset - size + j, target[j * width + first : j * width + last]
        if place >= 0:
            at = (row + place) * inputs.stride
            _copy(inputs.x[at + first : at + last], kept)
        else:
            at = (size + place) * width
            _copy(before[at + first : at + last], kept)


@inlined_part
def _copy(source: Any, target: Any) -> None:
    for c in range(len(target)):
        target[c] = source[c]


def conv_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, context: ForwardContext, layer: int
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.conv_forward`."""
    saved = x, weight, bias
    (rows, width), taps = x.shape, weight.shape[2]
    x, stride = with_unit_stride(x)
    weight, bias = weight.contiguous(), bias.contiguous()
    out = (x.new_empty if context.covers_all_rows else x.new_zeros)(rows, width)
    windows, block_windows, captures, kept, grid = 0, 0, context.captured_at, 0, 0
    if context.states is not None:
        memory = context.states.layers[layer]
        windows, block_windows = memory.window.data_ptr(), memory.block_window.data_ptr()
        grid = context.block_size
        if captures[1]:
            kept = context.states.checkpoints[layer].window.data_ptr()
    convolve_rows(
        rows * width * taps, (x.data_ptr(), stride, weight.data_ptr(), bias.data_ptr(), out.data_ptr()),
        (rows, width, taps), context.layout_at, (grid, windows, block_windows),
        (*captures, kept), (kind_of(x.dtype), kind_of(weight.dtype), kind_of(bias.dtype)),
    )  # fmt: skip
    return out, saved


def conv_backward(
    saved: Saved, grad: torch.Tensor, context: ForwardContext
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement `Operations.conv_backward`."""
    x, weight, bias = saved
    sequence, within = (torch.from_numpy(part) for part in context.tokens_of_rows)
    taps = weight[:, 0, :].float().t()
    inputs = x.float()
    shifted = [_back(inputs, sequence, within, len(taps) - 1 - k) for k in range(len(taps))]
    before = bias.float() + sum(part * tap for part, tap in zip(shifted, taps, strict=True))
    gate = torch.sigmoid(before)
    upstream = grad.float() * gate * (1 + before * (1 - gate)) * (sequence >= 0)[:, None]
    grad_x = torch.zeros_like(inputs)
    for k, tap in enumerate(taps):
        distance = len(taps) - 1 - k
        seen = upstream * (within >= distance)[:, None]
        grad_x[: len(x) - distance] += seen[distance:] * tap
    grad_weight = torch.stack([(upstream * part).sum(0) for part in shifted], dim=-1)[:, None]
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype), upstream.sum(0).to(bias.dtype)


def _back(x: torch.Tensor, sequence: torch.Tensor, within: torch.Tensor, distance: int) -> torch.Tensor:
    """Return each row's input ``distance`` rows earlier in its sequence, 0 before the first row."""
    moved = F.pad(x, (0, 0, distance, 0))[: len(x)]
    return moved * ((sequence >= 0) & (within >= distance))[:, None]
