"""Compute the depthwise causal convolution with bias, and silu or nothing behind it, on the CPU, one row at a time.

Invariant: an element is ``bias + sum over k of weight[k] * input[t - K + 1 + k]``, k ascending, wherever the inputs
come from: the rows of this call or the window of those before it. Inputs before position 0 are left out.

A window holds the input of a position p in its row ``p % R``: what a decode step keeps takes the place of what no later
step reads, and nothing moves. That of a block boundary holds it in row ``p % R - (R - K + 1)``.

T tokens, S sequences, W channels, K taps, R rows of a window: K - 1, or more (`samebit.kernels.layout.states.memory`).
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch.nn import functional as F

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import NO_END, elements, integers, kind_of, with_unit_stride
from samebit.kernels.cpu.base.numeric import fma, narrow, sigmoid, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.base.vectors import VECTOR, accumulate, exponential, load_vector, pointer_to, store_vector
from samebit.kernels.cpu.base.vectors import fma as fma_of_vectors
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.options import Saved

_PARTS = 16
"""Count of pieces that rows are cut into: scratch memory is allocated once a piece."""

_FEW_ROWS = 64
"""Up to so many rows threads take channels, not rows: as they do of the product before, so that what one has computed
is in its own cache, and it keeps the windows of a sequence while they are there."""


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
    """Holds R, the last inputs of each slot, and those as of the last multiple of ``grid``; 0 for a call without. And
    (sequence, position, checkpoint) of each capture, and the windows of checkpoints."""

    grid: int
    rows: int
    now: Any
    of_block: Any
    captures: Any
    captured: Any


class Sizes(NamedTuple):
    """Holds T, W, K, whether silu follows, and into how many pieces rows and channels are cut."""

    rows: int
    width: int
    taps: int
    silu: int
    parts: int
    shares: int


def _convolve(threads: int, tensors: Any, sizes: Any, layout: Any, memory: Any, captures: Any, kinds: Any) -> None:
    """Convolve all rows, and keep the windows of what follows; addresses and numbers come in plain tuples, which cost
    a call less than named ones.

    Args:
        threads: take shares of the rows, or of the channels.
        tensors: addresses of x and its stride, of weight, bias and out.
        sizes: T, W, K, and 1 where silu follows, otherwise 0.
        layout: address of what `Layout` holds; number of sequences.
        memory: the grid of `Windows`, R, addresses of the windows now and of a block.
        captures: address of (sequence, position, checkpoint) of each, their number, address of the checkpoints.
        kinds: numbers of the types of x, weight and bias.
    """
    x_at, stride, weight_at, bias_at, out_at = tensors
    rows, width, taps, silu = sizes
    kind, weight_kind, bias_kind = kinds
    layout_at, sequences = layout
    grid, kept, now_at, of_block_at = memory
    captures_at, num_captures, captured_at = captures
    few = rows <= _FEW_ROWS
    cut = Sizes(rows, width, taps, silu, 1 if few else _PARTS, threads if few else 1)
    inputs = Inputs(
        elements(x_at, NO_END, kind), stride, elements(weight_at, width * taps, weight_kind),
        elements(bias_at, width, bias_kind),
    )  # fmt: skip
    rows_of = Layout(integers(layout_at, 4 * sequences), sequences)
    windows = Windows(
        grid, kept, elements(now_at, NO_END, kind), elements(of_block_at, NO_END, kind),
        integers(captures_at, 3 * num_captures), elements(captured_at, NO_END, kind),
    )  # fmt: skip
    out = elements(out_at, rows * width, kind)
    share_out(_conv_rows, cut.parts * cut.shares, threads, (cut, inputs, rows_of, windows, out))
    share_out(_keep_windows, 0 if few or grid < 1 else sequences, threads, (cut, inputs, rows_of, windows))


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
def _conv_rows(item: int, sizes: Any, inputs: Any, layout: Any, windows: Any, out: Any) -> None:
    """Convolve a piece of the rows, in a share of the channels; of whole sequences the windows are then kept."""
    rows, width, parts = sizes.rows, sizes.width, sizes.parts
    first, last = _channels(sizes, item // parts)
    of, sequences = layout
    filters, sources = np.empty((sizes.taps + 1, last - first), np.float32), np.empty(sizes.taps, np.int64)
    _spread(inputs.weight, inputs.bias, first, filters)
    part = item % parts
    above, below = rows * part // parts, rows * (part + 1) // parts
    for sequence in range(sequences):
        begin, start, slot = of[sequence], of[2 * sequences + sequence], of[3 * sequences + sequence]
        for row in range(max(above, begin), min(below, begin + of[sequences + sequence])):
            missing = _find_inputs(inputs, windows, sizes, row, row - begin, start, slot, first, sources)
            _conv_row(filters, sources, missing, sizes.silu, out[row * width + first : row * width + last])
        if parts == 1 and windows.grid > 0:
            _keep_window(sequence, sizes, inputs, layout, windows, first, last)


@inlined_part
def _find_inputs(
    inputs: Any, windows: Any, sizes: Any, row: int, within: int, start: int, slot: int, first: int, sources: Any
) -> int:
    """Write where the inputs of a row's taps lie, from the channel ``first`` on; return how many taps have none."""
    size, kept, now, missing = sizes.taps - 1, windows.rows, windows.now, 0
    for k in range(sizes.taps):
        offset = within - size + k
        if offset >= 0:
            place = (row - size + k) * inputs.stride + first
            sources[k] = inputs.x.ctypes.data + place * inputs.x.itemsize
        elif start + offset >= 0:
            place = (slot * kept + (start + offset) % kept) * sizes.width + first
            sources[k] = now.ctypes.data + place * now.itemsize
        else:
            missing = k + 1
    return missing


@inlined_part
def _conv_row(filters: Any, sources: Any, missing: int, silu: int, out: Any) -> None:
    """Compute a row's channels of what `_find_inputs` has found."""
    taps, count = len(sources), len(out)
    whole = count // LANES * LANES
    if silu > 0:
        activated_vectors(filters.reshape(-1), sources, missing, taps, count, out)
    else:
        conv_vectors(filters.reshape(-1), sources, missing, taps, count, out)
    for c in range(whole, count):
        total = filters[taps, c]
        for k in range(missing, taps):
            total = fma(filters[k, c], widen(elements(sources[k], count, out[0])[c]), total)
        out[c] = narrow(total * sigmoid(total) if silu > 0 else total, out[c])


@intrinsic
def conv_vectors(typingctx: Any, filters: Any, sources: Any, missing: Any, taps: Any, count: Any, out: Any) -> Any:
    """Compute ``filters[taps] + sum over missing <= k < taps of filters[k] * source k``, ascending, of all whole
    vectors of ``count`` channels."""
    return _vectors(filters, sources, out, activated=False)


@intrinsic
def activated_vectors(typingctx: Any, filters: Any, sources: Any, missing: Any, taps: Any, count: Any, out: Any) -> Any:
    """Compute silu of what `conv_vectors` computes."""
    return _vectors(filters, sources, out, activated=True)


def _vectors(filters: Any, sources: Any, out: Any, activated: bool) -> Any:
    """Return signature and code of the two.

    A vector is read, summed and written at once: products wait for windows, which come from memory, while exponentials
    of others are computed.
    """
    i64 = types.int64
    signature = types.void(filters, sources, i64, i64, i64, out)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        filters_array, sources_array, first, last, many, out_array = args
        index, one = many.type, ir.Constant(VECTOR, [1.0] * LANES)
        factors = pointer_to(context, builder, filters, filters_array, index(0))
        addresses = pointer_to(context, builder, sources, sources_array, index(0))
        results = pointer_to(context, builder, out, out_array, index(0))
        source_type = results.type

        def of_filter(k: Any, lane: Any) -> Any:
            place = builder.gep(factors, [builder.add(builder.mul(k, many), lane)])
            return load_vector(builder, place, types.float32)

        def vector(number: Any, nothing: list[Any]) -> list[Any]:
            lane = builder.mul(number, index(LANES))

            def tap(i: Any, sums: list[Any]) -> list[Any]:
                k = builder.add(first, i)
                source = builder.inttoptr(builder.load(builder.gep(addresses, [k])), source_type)
                read = load_vector(builder, builder.gep(source, [lane]), out.dtype)
                return [fma_of_vectors(builder, of_filter(k, lane), read, sums[0])]

            (total,) = accumulate(builder, builder.sub(last, first), [of_filter(last, lane)], tap)
            if activated:
                share = builder.fdiv(one, builder.fadd(one, exponential(builder, builder.fneg(total))))
                total = builder.fmul(total, share)
            store_vector(builder, total, builder.gep(results, [lane]), out.dtype)
            return nothing

        accumulate(builder, builder.sdiv(many, index(LANES)), [], vector)
        return context.get_dummy_value()

    return signature, generate


@kernel_part
def _keep_windows(sequence: int, sizes: Any, inputs: Any, layout: Any, windows: Any) -> None:
    """Keep a sequence's inputs, in all channels."""
    _keep_window(sequence, sizes, inputs, layout, windows, 0, sizes.width)


@inlined_part
def _keep_window(sequence: int, sizes: Any, inputs: Any, layout: Any, windows: Any, first: int, last: int) -> None:
    """Keep a sequence's inputs where captures want them, before its last block boundary, and before the call's end, in
    the channels from the ``first`` to before the ``last``."""
    of, sequences = layout
    grid, rows, now, of_block, captures, captured = windows
    size = sizes.taps - 1
    row, start, slot = of[sequence], of[2 * sequences + sequence], of[3 * sequences + sequence]
    end, held = start + of[sequences + sequence], size * sizes.width
    window = now[slot * rows * sizes.width : (slot + 1) * rows * sizes.width]
    call = row, start, window, sizes.width, rows, first, last
    for c in range(0, len(captures), 3):
        if captures[c] == sequence:
            kept = captured[captures[c + 2] * held : (captures[c + 2] + 1) * held]
            _copy_inputs(inputs, call, max(captures[c + 1] - size, 0), captures[c + 1], kept, rows - size)
    boundary = end // grid * grid
    if boundary > start:
        kept = of_block[slot * held : (slot + 1) * held]
        _copy_inputs(inputs, call, max(boundary - size, 0), boundary, kept, rows - size)
    _copy_inputs(inputs, call, max(end - rows, start), end, window, 0)


@inlined_part
def _copy_inputs(inputs: Any, call: Any, begin: int, end: int, target: Any, missing: int) -> None:
    """Copy the inputs of the positions from ``begin`` to before ``end`` to where a window holds them, or what is that
    without its first ``missing`` rows."""
    row, start, window, width, rows, first, last = call
    for position in range(begin, end):
        at = position % rows * width
        kept = target[at - missing * width + first : at - missing * width + last]
        if position >= start:
            at = (row + position - start) * inputs.stride
            _copy(inputs.x[at + first : at + last], kept)
        else:
            _copy(window[at + first : at + last], kept)


@inlined_part
def _copy(source: Any, target: Any) -> None:
    for c in range(len(target)):
        target[c] = source[c]


def conv_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, context: ForwardContext, layer: int, silu: bool
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.conv_forward`."""
    saved = x, weight, bias
    (rows, width), taps = x.shape, weight.shape[2]
    x, stride = with_unit_stride(x)
    weight, bias = weight.contiguous(), bias.contiguous()
    out = (x.new_empty if context.covers_all_rows else x.new_zeros)(rows, width)
    windows, block_windows, captures, kept, grid, held = 0, 0, context.captured_at, 0, 0, 0
    if context.states is not None:
        memory = context.states.layers[layer]
        windows, block_windows = memory.window.data_ptr(), memory.block_window.data_ptr()
        grid, held = context.block_size, memory.windows[1]
        if captures[1]:
            kept = context.states.checkpoints[layer].window.data_ptr()
    convolve_rows(
        rows * width * taps, (x.data_ptr(), stride, weight.data_ptr(), bias.data_ptr(), out.data_ptr()),
        (rows, width, taps, int(silu)), context.layout_at, (grid, held, windows, block_windows),
        (*captures, kept), (kind_of(x.dtype), kind_of(weight.dtype), kind_of(bias.dtype)),
    )  # fmt: skip
    return out, saved


def conv_backward(
    saved: Saved, grad: torch.Tensor, context: ForwardContext, silu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement `Operations.conv_backward`."""
    x, weight, bias = saved
    sequence, within = (torch.from_numpy(part) for part in context.tokens_of_rows)
    taps = weight[:, 0, :].float().t()
    inputs = x.float()
    shifted = [_back(inputs, sequence, within, len(taps) - 1 - k) for k in range(len(taps))]
    upstream = grad.float() * (sequence >= 0)[:, None]
    if silu:
        before = bias.float() + sum(part * tap for part, tap in zip(shifted, taps, strict=True))
        gate = torch.sigmoid(before)
        upstream = upstream * gate * (1 + before * (1 - gate))
    grad_x = torch.zeros_like(inputs)
    for k, tap in enumerate(taps):
        distance = len(taps) - 1 - k
        seen = upstream * (within >= distance)[:, None]
        grad_x[: max(len(x) - distance, 0)] += seen[distance:] * tap
    grad_weight = torch.stack([(upstream * part).sum(0) for part in shifted], dim=-1)[:, None]
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype), upstream.sum(0).to(bias.dtype)


def _back(x: torch.Tensor, sequence: torch.Tensor, within: torch.Tensor, distance: int) -> torch.Tensor:
    """Return each row's input ``distance`` rows earlier in its sequence, 0 before the first row."""
    moved = F.pad(x, (0, 0, distance, 0))[: len(x)]
    return moved * ((sequence >= 0) & (within >= distance))[:, None]
