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
from samebit.kernels.layout.options import Saved

_PARTS = 16
"""Count of pieces that rows are cut into: scratch memory is allocated once a piece."""


class Inputs(NamedTuple):
    """Holds what is convolved, flat: x and its stride; ``filters [K + 1, W]``, the taps and the bias behind them."""

    x: Any
    stride: int
    filters: Any


class Layout(NamedTuple):
    """Holds first row, length, start and slot, each of all sequences, in ``of``; rows of none are left as they are."""

    of: Any
    sequences: int


class Windows(NamedTuple):
    """Holds the last inputs of each slot, and those as of the last multiple of ``grid``; 0 for a call without."""

    grid: int
    now: Any
    of_block: Any


def _convolve(threads: int, tensors: Any, sizes: Any, layout: Any, memory: Any, captures: Any, kinds: Any) -> None:
    """Convolve all rows, then move the windows on; addresses and numbers come in plain tuples, which cost a call less
    than named ones.

    Args:
        threads: take shares of the rows.
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
    filters = np.empty((taps + 1, width), np.float32)
    _spread(elements(weight_at, width * taps, weight_kind), filters)
    _spread(elements(bias_at, width, bias_kind), filters[taps:])
    inputs = Inputs(elements(x_at, NO_END, kind), stride, filters)
    rows_of = Layout(integers(layout_at, 4 * sequences), sequences)
    windows = Windows(grid, elements(now_at, NO_END, kind), elements(of_block_at, NO_END, kind))
    parts = min(_PARTS, rows)
    share_out(
        _conv_rows, parts, threads,
        (parts, inputs, rows, rows_of, windows.now, elements(out_at, rows * width, kind)),
    )  # fmt: skip
    share_out(
        _move_windows, sequences if grid else 0, threads,
        (inputs, rows_of, windows, integers(captures_at, 3 * num_captures), elements(captured_at, NO_END, kind)),
    )  # fmt: skip


convolve_rows = SharedKernel(_convolve)


@kernel_part
def _spread(weight: Any, filters: Any) -> None:
    """Write ``filters[k, c] = weight[c, k]``."""
    width = filters.shape[1]
    taps = len(weight) // width
    for k in range(taps):
        for c in range(width):
            filters[k, c] = widen(weight[c * taps + k])


@kernel_part
def _conv_rows(part: int, parts: int, inputs: Any, rows: int, layout: Any, now: Any, out: Any) -> None:
    width = inputs.filters.shape[1]
    of, sequences = layout
    acc = np.empty(width, np.float32)
    first, last = rows * part // parts, rows * (part + 1) // parts
    for sequence in range(sequences):
        begin, start, slot = of[sequence], of[2 * sequences + sequence], of[3 * sequences + sequence]
        for row in range(max(first, begin), min(last, begin + of[sequences + sequence])):
            _conv_row(inputs, row, row - begin, start, slot, now, acc)
            result = out[row * width : (row + 1) * width]
            for c in range(width):
                result[c] = narrow(acc[c] * sigmoid(acc[c]), result[c])


@inlined_part
def _conv_row(inputs: Any, row: int, within: int, start: int, slot: int, windows: Any, acc: Any) -> None:
    """Compute the row before its activation, in ``acc``."""
    x, stride, filters = inputs
    taps, width = filters.shape[0] - 1, len(acc)
    for c in range(width):
        acc[c] = filters[taps, c]
    for k in range(taps):
        offset = within - (taps - 1) + k
        if offset >= 0:
            source = (row - (taps - 1) + k) * stride
            _add(filters[k], x[source : source + width], acc)
        elif start + offset >= 0:
            source = (slot * (taps - 1) + taps - 1 + offset) * width
            _add(filters[k], windows[source : source + width], acc)


@inlined_part
def _add(weight: Any, source: Any, acc: Any) -> None:
    for c in range(len(acc)):
        acc[c] = fma(weight[c], widen(source[c]), acc[c])


@kernel_part
def _move_windows(sequence: int, inputs: Any, layout: Any, memory: Any, captures: Any, captured: Any) -> None:
    """Keep the inputs before a call's end, before its last block boundary, and where captures want them."""
    x, stride, filters = inputs
    of, sequences = layout
    grid, windows, block_windows = memory
    width, size = filters.shape[1], filters.shape[0] - 2
    row, length = of[sequence], of[sequences + sequence]
    start, slot = of[2 * sequences + sequence], of[3 * sequences + sequence]
    held = size * width
    window = windows[slot * held : (slot + 1) * held]
    for c in range(0, len(captures), 3):
        if captures[c] == sequence:
            kept = captured[captures[c + 2] * held : (captures[c + 2] + 1) * held]
            _window_at(x, stride, row, captures[c + 1] - start, width, size, window, kept)
    boundary = (start + length) // grid * grid
    if boundary > start:
        _window_at(
            x, stride, row, boundary - start, width, size, window, block_windows[slot * held : (slot + 1) * held]
        )
    _window_at(x, stride, row, length, width, size, window, window)


@inlined_part
def _window_at(x: Any, stride: int, row: int, offset: int, width: int, size: int, before: Any, target: Any) -> None:
    """Copy the last inputs before row ``row + offset``; ascending, so that ``target`` may be ``before``."""
    for j in range(size):
        place, kept = offset - size + j, target[j * width : (j + 1) * width]
        if place >= 0:
            _copy(x[(row + place) * stride : (row + place) * stride + width], kept)
        else:
            _copy(before[(size + place) * width : (size + place + 1) * width], kept)


@inlined_part
def _copy(source: Any, target: Any) -> None:
    for c in range(len(target)):
        target[c] = source[c]


def conv_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, context: ForwardContext, layer: int
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.conv_forward`."""
    saved = x, weight, bias
    rows, width = x.shape
    x = with_unit_stride(x)
    weight, bias = weight.contiguous(), bias.contiguous()
    taps = weight.shape[-1]
    out = (torch.empty if context.covers_all_rows else torch.zeros)(rows, width, dtype=x.dtype)
    windows, block_windows, captured, captures, kept, grid = 0, 0, 0, 0, 0, 0
    if context.states is not None:
        memory = context.states.layers[layer]
        windows, block_windows = memory.window.data_ptr(), memory.block_window.data_ptr()
        captures, grid = len(context.captures), context.block_size
        if captures:
            captured = context.captured.data_ptr()
            kept = context.states.checkpoints[layer].window.data_ptr()
    convolve_rows(
        x.numel() * taps, (x.data_ptr(), x.stride(0), weight.data_ptr(), bias.data_ptr(), out.data_ptr()),
        (rows, width, taps), (context.layout.data_ptr(), len(context.lengths)), (grid, windows, block_windows),
        (captured, captures, kept), (kind_of(x.dtype), kind_of(weight.dtype), kind_of(bias.dtype)),
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
