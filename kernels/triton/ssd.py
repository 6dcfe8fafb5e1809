"""The Mamba2 chunked scan: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* Chunks of `SCAN_CHUNK` tokens are anchored at position 0 of each sequence. A row reads the state at its chunk's
  boundary and the tokens of its chunk up to itself:
  ``y_t = exp(cum_t) C_t S + sum over s <= t of exp(cum_t - cum_s) dt_s (C_t . B_s) x_s``.
  The tile is the whole chunk, whichever of its tokens belong to the call: those before come from the tail, those to
  come are zeros, and neither changes what a row adds up.
* The state moves once a chunk, with the chunk's last token, from the chunk's whole tail.
* A program owns the state of one sequence and head. The tail is read by the scan and written by another launch after
  it: heads share B.

The memory is laid out as on the CPU (`samebit.kernels.states`) with two differences: ``tail_dt`` holds the time step
before bias and softplus, so that one code computes it, and sums are not kept, they are those of the tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable
from triton.language import tensor

from ..context import ForwardContext
from ..cpu.numeric import LANES
from ..cpu.ssd import HEAD_TILE, SCAN_CHUNK
from ..states import LayerStates, SSMOptions
from .numeric import aligned, blocks, dot, softplus
from .ssd_backward import gradients
from .tiles import power_of_two

_WARPS = 4


def scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    context: ForwardContext,
    options: SSMOptions,
) -> torch.Tensor:
    """As `samebit.kernels.ssd.scan`, of rows that are the context's."""
    if len(context.captures) and bool((context.captures[:, 1] % options.chunk).any()):
        raise ValueError(f"captures {context.captures.tolist()} must lie on chunk boundaries (chunk {options.chunk})")
    xbc, dt = aligned(xbc), aligned(dt)
    if context.states is None:
        out: torch.Tensor = _Scan.apply(xbc, dt, decay_rate, dt_bias, skip, context, options)
        return out
    layer = context.states.layers[options.layer]
    if layer.tail_x.dtype != xbc.dtype:
        raise TypeError(
            f"x is {xbc.dtype}, but the states are {layer.tail_x.dtype}: "
            "the model changed its dtype after the rollout worker was built"
        )
    out = _scan(xbc, dt, decay_rate, dt_bias, skip, context, options, layer)
    _append(xbc, dt, context, options, layer)
    return out


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        decay_rate: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor,
        context: ForwardContext,
        options: SSMOptions,
    ) -> torch.Tensor:
        ctx.save_for_backward(xbc, dt, decay_rate, dt_bias, skip)
        ctx.layout, ctx.options = context, options
        return _scan(xbc, dt, decay_rate, dt_bias, skip, context, options, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        xbc, dt, decay_rate, dt_bias, skip = ctx.saved_tensors
        found = gradients(xbc, dt, decay_rate, dt_bias, skip, grad, ctx.layout, ctx.options)
        return *found, None, None


def _scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    context: ForwardContext,
    options: SSMOptions,
    layer: LayerStates | None,
) -> torch.Tensor:
    heads, groups, size = len(decay_rate), options.groups, options.state_size
    inner = xbc.shape[1] - 2 * groups * size
    head_dim, layout = inner // heads, context.on_device
    empty = torch.empty if context.covers_all_rows else torch.zeros
    out = empty(len(xbc), inner, dtype=xbc.dtype, device=xbc.device)
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
        _scan_head[(len(context.lengths), heads)](
            xbc, dt, aligned(decay_rate), aligned(dt_bias), aligned(skip), low, high, layout.row_start, layout.lengths,
            layout.starts, layout.slots, *memory, layout.captures, layout.first_capture, grid, out, heads, head_dim,
            groups, size, blocks(head_dim, LANES) * LANES, blocks(size, LANES) * LANES,
            blocks(heads // groups, HEAD_TILE), SCAN_CHUNK, power_of_two(max(16, head_dim)),
            power_of_two(max(16, size)), num_warps=_WARPS,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["low", "high", "grid"])
def _scan_head(
    xbc: tensor, dt: tensor, decay_rate: tensor, dt_bias: tensor, skip: tensor, low: tensor, high: tensor,
    row_start: tensor, lengths: tensor, starts: tensor, slots: tensor, states: tensor, block_states: tensor,
    tail_x: tensor, tail_b: tensor, tail_dt: tensor, captured: tensor, captures: tensor, first_capture: tensor,
    grid: tensor, out: tensor, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, DEEP: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr, PADDED_DIM: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """One sequence's tokens of the call, for one head. ``grid``: of the block boundaries; 0 without memory."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    group = head // (HEADS // GROUPS)
    row, length = tl.load(row_start + sequence), tl.load(lengths + sequence)
    start, slot = tl.load(starts + sequence), tl.load(slots + sequence).to(tl.int64)
    end = start + length
    t, p, n = tl.arange(0, CHUNK), tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_SIZE)
    rate, bias, through = tl.load(decay_rate + head), tl.load(dt_bias + head), tl.load(skip + head)
    in_state = n[:, None] * WIDE + p[None, :]
    real_state = (n[:, None] < SIZE) & (p[None, :] < HEAD_DIM)
    own = (slot * HEADS + head) * (SIZE * WIDE)
    begun = tl.full((PADDED_SIZE, PADDED_DIM), start, tl.int32) >= CHUNK  # before, no state was ever written
    state = tl.load(states + own + in_state, mask=real_state & begun, other=0.0)
    shared = (slot * (GROUPS * TILES) + group * TILES) * CHUNK  # B of the group: the copy of its first tile of heads
    for base in range(start // CHUNK * CHUNK, end, CHUNK):
        position = base + t
        old, new = position < start, (position >= start) & (position < end)
        at = (row + position - start).to(tl.int64)
        inputs = xbc + at[:, None] * (HEADS * HEAD_DIM + 2 * GROUPS * SIZE)
        in_tail = (slot * HEADS + head) * CHUNK + t
        real = p[None, :] < HEAD_DIM
        x_new = tl.load(inputs + head * HEAD_DIM + p[None, :], mask=new[:, None] & real, other=0.0)
        x_old = tl.load(tail_x + in_tail[:, None] * WIDE + p[None, :], mask=old[:, None] & real, other=0.0)
        x = tl.where(old[:, None], x_old, x_new).to(tl.float32)
        real = n[None, :] < SIZE
        b_at = HEADS * HEAD_DIM + group * SIZE + n[None, :]
        b_new = tl.load(inputs + b_at, mask=new[:, None] & real, other=0.0).to(tl.float32)
        b_old = tl.load(tail_b + (shared + t)[:, None] * DEEP + n[None, :], mask=old[:, None] & real, other=0.0)
        b = tl.where(old[:, None], b_old, b_new)
        c = tl.load(inputs + b_at + GROUPS * SIZE, mask=new[:, None] & real, other=0.0).to(tl.float32)
        raw_new = tl.load(dt + at * HEADS + head, mask=new, other=0.0).to(tl.float32)
        raw = tl.where(old, tl.load(tail_dt + in_tail, mask=old, other=0.0), raw_new)
        step = tl.minimum(tl.maximum(softplus(raw + bias), low), high)
        step = tl.where(position < end, step, 0.0)
        sums = tl.cumsum(step * rate, axis=0)
        scores = dot(c, tl.trans(b), tl.zeros((CHUNK, CHUNK), tl.float32))
        before = t[None, :] <= t[:, None]
        kept = tl.exp(tl.where(before, sums[:, None] - sums[None, :], float("-inf")))
        y = dot(c, state, tl.zeros((CHUNK, PADDED_DIM), tl.float32)) * tl.exp(sums)[:, None]
        y = dot(scores * kept * step[None, :], x, y) + x * through
        place = out + at[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + p[None, :]
        tl.store(place, y.to(out.dtype.element_ty), mask=new[:, None] & (p[None, :] < HEAD_DIM))
        if base + CHUNK <= end:
            last = tl.sum(tl.where(t == CHUNK - 1, sums, 0.0), axis=0)
            fed = x * (tl.exp(last - sums) * step)[:, None]
            state = dot(tl.trans(b), fed, state * tl.exp(last))
            if grid > 0:
                if base + 2 * CHUNK > end:
                    tl.store(states + own + in_state, state, mask=real_state)
                if base + CHUNK == end // grid * grid:
                    tl.store(block_states + own + in_state, state, mask=real_state)
                for capture in range(tl.load(first_capture + sequence), tl.load(first_capture + sequence + 1)):
                    if tl.load(captures + 3 * capture + 1) == base + CHUNK:
                        target = (tl.load(captures + 3 * capture + 2).to(tl.int64) * HEADS + head) * (SIZE * WIDE)
                        tl.store(captured + target + in_state, state, mask=real_state)


def _append(
    xbc: torch.Tensor, dt: torch.Tensor, context: ForwardContext, options: SSMOptions, layer: LayerStates
) -> None:
    """Put the call's tokens of the unfinished chunks into the tails."""
    heads, groups, size = dt.shape[1], options.groups, options.state_size
    head_dim, layout = (xbc.shape[1] - 2 * groups * size) // heads, context.on_device
    if len(context.lengths):
        _append_head[(len(context.lengths), heads)](
            xbc, dt, layout.row_start, layout.lengths, layout.starts, layout.slots, layer.tail_x, layer.tail_b,
            layer.tail_dt, heads, head_dim, groups, size, blocks(head_dim, LANES) * LANES, blocks(size, LANES) * LANES,
            blocks(heads // groups, HEAD_TILE), SCAN_CHUNK, power_of_two(head_dim), power_of_two(size),
            num_warps=_WARPS,
        )  # fmt: skip


@triton.jit
def _append_head(
    xbc: tensor, dt: tensor, row_start: tensor, lengths: tensor, starts: tensor, slots: tensor, tail_x: tensor,
    tail_b: tensor, tail_dt: tensor, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr,
    PADDED_DIM: tl.constexpr, PADDED_SIZE: tl.constexpr,
) -> None:  # fmt: skip
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
