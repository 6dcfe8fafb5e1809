"""Compute the Mamba2 chunked scan: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* Chunks of `SCAN_CHUNK` tokens are anchored at position 0 of each sequence. A row reads the state at its chunk's
  boundary and the tokens of its chunk up to itself:
  ``y_t = exp(cum_t) C_t S + sum over s <= t of exp(cum_t - cum_s) dt_s (C_t . B_s) x_s``.
  cum is float64: what is exponentiated are its small differences.
* What tokens of a chunk do to each other is one tile of the whole chunk, whichever of them belong to the call: those
  before come from the tail, those to come are zeros or have weight zero, and neither changes what a row adds up. A
  token's place in the tile is its position's in the chunk, in every call.
* What a row reads of the state, nearly all of the work, is done for the rows of the call only, one after the other by
  one piece of code: a decode does it once.
* The state moves once a chunk, with the chunk's last token, from the chunk's tokens in order.
* A program owns a slice of the head size of the state of one sequence and head: an output is a sum over the state
  size, so nothing is summed over programs. The tail is read by the scan and written by another launch after it: heads
  share B, slices share the time steps.

A program keeps its slice of the state in registers. A decode step reads state and tail once and writes the state once a
chunk, where the plain recurrence reads and writes it at each token.

The memory is laid out as on the CPU (`samebit.kernels.layout.states.mamba`) with two differences: ``tail_dt`` holds
the time step before bias and softplus, so that one code computes it, and sums are not kept, they are those of the tile.

T tokens, H heads of size P in groups, N state size, C tokens a chunk; S is the state alone.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import HEAD_TILE, LANES, SCAN_CHUNK, ceil_div
from samebit.kernels.layout.options import Saved, SSMOptions
from samebit.kernels.layout.states.mamba import SSMStates
from samebit.kernels.triton.numeric import aligned, clear_idle_parts, dot, jit, keep_state, softplus
from samebit.kernels.triton.tiles.table import power_of_two

_WARPS = 4

_HEAD_PART = 64
"""The most elements of a head that a program takes."""

_STATE_ELEMENTS = 8192
"""The most elements of the state that a program holds (more of N > 512): 64 registers of each thread."""

_REGISTERS = 168
"""Registers of a thread: three programs fit on an H100's multiprocessor; while one computes the others
load."""


def scan_forward(
    xbc: torch.Tensor, dt: torch.Tensor, decay_rate: torch.Tensor, dt_bias: torch.Tensor, skip: torch.Tensor,
    context: ForwardContext, options: SSMOptions,
) -> tuple[torch.Tensor, Saved]:  # fmt: skip
    """Implement `Operations.scan_forward`."""
    xbc, dt = aligned(xbc), aligned(dt)
    layer = None if context.states is None else context.states.layer(options.layer, SSMStates)
    out = _scan(xbc, dt, decay_rate, dt_bias, skip, context, options, layer)
    if layer is None:
        return out, (xbc, dt, decay_rate, dt_bias, skip)
    _append(xbc, dt, context, options, layer, out)
    return out, ()


def _scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    context: ForwardContext,
    options: SSMOptions,
    layer: SSMStates | None,
) -> torch.Tensor:
    heads, groups, size = len(decay_rate), options.groups, options.state_size
    inner = xbc.shape[1] - 2 * groups * size
    head_dim, layout = inner // heads, context.on_device
    filled = context.covers_all_rows or (layer is not None and len(context.lengths) > 0)  # by `_append`
    out = (torch.empty if filled else torch.zeros)(len(xbc), inner, dtype=xbc.dtype, device=xbc.device)
    if layer is None or context.states is None:  # nothing of the memory is touched; one compiled kernel serves both
        floats, grid = decay_rate, 0
        memory = floats, floats, xbc, floats, floats, floats
    else:
        kept = context.states.checkpoints[options.layer].state
        memory, grid = (
            (layer.state, layer.block_state, layer.tail_x, layer.tail_b, layer.tail_dt, kept),
            context.block_size,
        )
    low, high = options.dt_limits
    if len(context.lengths):
        padded_size, padded_dim = power_of_two(max(16, size)), power_of_two(max(16, head_dim))
        part = min(padded_dim, _HEAD_PART, max(16, _STATE_ELEMENTS // padded_size))
        _scan_head[(len(context.lengths), heads, ceil_div(head_dim, part))](
            xbc, dt, aligned(decay_rate), aligned(dt_bias), aligned(skip), low, high, layout.row_start, layout.lengths,
            layout.starts, layout.slots, *memory, layout.captures, layout.first_capture, grid, out, heads, head_dim,
            groups, size, ceil_div(head_dim, LANES) * LANES, ceil_div(size, LANES) * LANES,
            ceil_div(heads // groups, HEAD_TILE), SCAN_CHUNK, part, padded_size,
            "ieee" if xbc.dtype == torch.float32 else "tf32x3", num_warps=_WARPS, num_stages=1, maxnreg=_REGISTERS,
        )  # fmt: skip
    return out


@jit(do_not_specialize=["low", "high", "grid"])
def _scan_head(
    xbc: tensor, dt: tensor, decay_rate: tensor, dt_bias: tensor, skip: tensor, low: tensor, high: tensor,
    row_start: tensor, lengths: tensor, starts: tensor, slots: tensor, states: tensor, block_states: tensor,
    tail_x: tensor, tail_b: tensor, tail_dt: tensor, captured: tensor, captures: tensor, first_capture: tensor,
    grid: tensor, out: tensor, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, DEEP: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
    PADDED_SIZE: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Run one sequence's tokens of the call, for ``PART`` elements of one head.

    ``grid``: of the block boundaries; 0 without memory. ``PRECISION``: of weights times x; TF32 holds an x of 16 bits
    exactly, and a weight in its two parts.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    group = head // (HEADS // GROUPS)
    start, slot = tl.load(starts + sequence), tl.load(slots + sequence).to(tl.int64)
    end = start + tl.load(lengths + sequence)
    origin = (tl.load(row_start + sequence) - start).to(tl.int64)  # the row that position 0 would be
    u, n = tl.arange(0, CHUNK), tl.arange(0, PADDED_SIZE)
    p = tl.program_id(2) * PART + tl.arange(0, PART)
    real_n, real_p = n < SIZE, p < HEAD_DIM
    rate, bias, through = tl.load(decay_rate + head), tl.load(dt_bias + head), tl.load(skip + head)
    in_state = n[:, None] * WIDE + p[None, :]
    real_state = real_n[:, None] & real_p[None, :]
    own = (slot * HEADS + head) * (SIZE * WIDE)
    begun = tl.full((PADDED_SIZE, PART), start, tl.int32) >= CHUNK  # before, no state was ever written
    state = tl.load(states + own + in_state, mask=real_state & begun, other=0.0)
    WIDTH: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * SIZE
    in_x, in_b = head * HEAD_DIM, HEADS * HEAD_DIM + group * SIZE
    in_c = in_b + GROUPS * SIZE
    old_dt = tail_dt + (slot * HEADS + head) * CHUNK
    old_x = tail_x + (slot * HEADS + head) * (CHUNK * WIDE)
    old_b = tail_b + (slot * (GROUPS * TILES) + group * TILES) * (CHUNK * DEEP)  # the copy of its first tile of heads
    for base in range(start // CHUNK * CHUNK, end, CHUNK):
        position = base + u
        old, new = position < start, (position >= start) & (position < end)
        rows = origin + position
        inputs = xbc + rows[:, None] * WIDTH
        raw_new = tl.load(dt + rows * HEADS + head, mask=new, other=0.0).to(tl.float32)
        raw = tl.where(old, tl.load(old_dt + u, mask=old, other=0.0), raw_new)
        from_x = tl.where(old[:, None], old_x + u[:, None] * WIDE, inputs + in_x) + p[None, :]
        x = tl.load(from_x, mask=(old | new)[:, None] & real_p[None, :], other=0.0).to(tl.float32)
        new_n = new[:, None] & real_n[None, :]
        b_new = tl.load(inputs + in_b + n[None, :], mask=new_n, other=0.0)
        from_b = old_b + u[:, None] * DEEP + n[None, :]
        b_old = tl.load(from_b, mask=old[:, None] & real_n[None, :], other=0.0).to(b_new.dtype)  # it was one of these
        c = tl.load(inputs + in_c + n[None, :], mask=new_n, other=0.0)
        step = tl.minimum(tl.maximum(softplus(raw + bias), low), high)
        sums = tl.cumsum(step.to(tl.float64) * rate.to(tl.float64), axis=0)
        scores = dot(c, tl.trans(tl.where(old[:, None], b_old, b_new)), tl.zeros((CHUNK, CHUNK), tl.float32))
        seen = u[None, :] <= u[:, None]
        kept = tl.exp(tl.where(seen, (sums[:, None] - sums[None, :]).to(tl.float32), 0.0)) * step[None, :]
        weights = tl.where(seen, scores * kept, 0.0)
        y = tl.dot(weights, x, x * through, input_precision=PRECISION)
        first = tl.maximum(start - base, 0)
        read = tl.zeros((CHUNK, PART), tl.float32)
        for t in range(first, tl.minimum(end - base, CHUNK)):
            from_c = xbc + (origin + base + t) * WIDTH + in_c + n
            c_t = tl.load(from_c, mask=real_n, other=0.0).to(tl.float32)
            read = tl.where(u[:, None] == t, tl.sum(state * c_t[:, None], axis=0)[None, :], read)
        y += read * tl.exp(sums.to(tl.float32))[:, None]
        place = out + rows[:, None] * (HEADS * HEAD_DIM) + in_x + p[None, :]
        tl.store(place, y.to(out.dtype.element_ty), mask=new[:, None] & real_p[None, :])
        if base + CHUNK <= end:
            last = tl.sum(tl.where(u == CHUNK - 1, sums, 0.0), axis=0)
            left = tl.exp((last - sums).to(tl.float32)) * step
            state *= tl.exp(last.to(tl.float32))
            for s in range(first):
                state = _fed(state, s, left, old_x + s * WIDE, old_b + s * DEEP, real_n, real_p)
            for s in range(first, CHUNK):
                token = xbc + (origin + base + s) * WIDTH
                state = _fed(state, s, left, token + in_x, token + in_b, real_n, real_p)
            if grid > 0:
                keep_state(
                    state, in_state, real_state, own, states, block_states, captured, captures, first_capture, grid,
                    sequence, head, base + CHUNK, end, HEADS, SIZE * WIDE, CHUNK,
                )  # fmt: skip


@jit()
def _fed(state: tensor, s: tensor, left: tensor, from_x: tensor, from_b: tensor, real_n: tensor, real_p: tensor) -> Any:
    """Feed token ``s`` of the chunk, of which ``left[s]`` is left, to the state ``[N, P]``; x, B: at these addresses.

    A product and then a fused addition: the compiler has no choice in it, wherever it stands.
    """
    u, n, p = tl.arange(0, left.shape[0]), tl.arange(0, state.shape[0]), tl.arange(0, state.shape[1])
    x = tl.load(from_x + tl.program_id(2) * state.shape[1] + p, mask=real_p, other=0.0).to(tl.float32)
    b = tl.load(from_b + n, mask=real_n, other=0.0).to(tl.float32)
    x *= tl.sum(tl.where(u == s, left, 0.0), axis=0)
    return tl.fma(b[:, None], x[None, :], state)


def _append(
    xbc: torch.Tensor, dt: torch.Tensor, context: ForwardContext, options: SSMOptions, layer: SSMStates,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Put the call's tokens of the unfinished chunks into the tails, and zeros into padding rows of ``out``."""
    heads, groups, size = dt.shape[1], options.groups, options.state_size
    head_dim, layout = (xbc.shape[1] - 2 * groups * size) // heads, context.on_device
    if len(context.lengths):
        _append_head[(len(context.lengths), heads)](
            xbc, dt, layout.row_start, layout.lengths, layout.starts, layout.slots, layer.tail_x, layer.tail_b,
            layer.tail_dt, out, layout.sequences, 0 if context.covers_all_rows else len(xbc), heads, head_dim, groups,
            size, ceil_div(head_dim, LANES) * LANES, ceil_div(size, LANES) * LANES,
            ceil_div(heads // groups, HEAD_TILE), SCAN_CHUNK, power_of_two(head_dim), power_of_two(size),
            num_warps=_WARPS,
        )  # fmt: skip


@jit(do_not_specialize=["rows"])
def _append_head(
    xbc: tensor, dt: tensor, row_start: tensor, lengths: tensor, starts: tensor, slots: tensor, tail_x: tensor,
    tail_b: tensor, tail_dt: tensor, out: tensor, sequences: tensor, rows: tensor, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
    TILES: tl.constexpr, CHUNK: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    clear_idle_parts(out, sequences, rows, tl.program_id(1), HEADS, HEAD_DIM, PADDED_DIM)
    sequence, head = tl.program_id(0), tl.program_id(1)
    row, slot = tl.load(row_start + sequence), tl.load(slots + sequence).to(tl.int64)
    start = tl.load(starts + sequence)
    end = start + tl.load(lengths + sequence)
    t, p, n = tl.arange(0, CHUNK), tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_SIZE)
    position = end // CHUNK * CHUNK + t
    new = (position >= start) & (position < end)
    at = (row + position - start).to(tl.int64)
    inputs = xbc + at[:, None] * (HEADS * HEAD_DIM + 2 * GROUPS * SIZE)
    in_tail = (slot * HEADS + head) * CHUNK + t
    mask = new[:, None] & (p[None, :] < HEAD_DIM)
    x = tl.load(inputs + head * HEAD_DIM + p[None, :], mask=mask)
    tl.store(tail_x + in_tail[:, None] * WIDE + p[None, :], x, mask=mask)
    tl.store(tail_dt + in_tail, tl.load(dt + at * HEADS + head, mask=new).to(tl.float32), mask=new)
    if head % (HEADS // GROUPS) == 0:
        group = head // (HEADS // GROUPS)
        real = new[:, None] & (n[None, :] < SIZE)
        b = tl.load(inputs + HEADS * HEAD_DIM + group * SIZE + n[None, :], mask=real).to(tl.float32)
        shared = (slot * (GROUPS * TILES) + group * TILES) * CHUNK + t
        tl.store(tail_b + shared[:, None] * DEEP + n[None, :], b, mask=real)
