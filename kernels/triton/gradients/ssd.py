"""Compute the gradients of the Mamba2 chunked scan of a training call: every sequence starts at position 0 with no
state.

With S the state before a chunk, E the gradient of the state after it, g the gradient of y, cum the running sum of
``dt * A`` in the chunk, F what is left at the chunk's end (``exp(cum_end - cum)``), and
``M[t, u] = exp(cum_t - cum_u) C_t . B_u`` for u <= t, else 0:

    x_u     dt_u (sum over t of M[t, u] g_t + F_u B_u E) + D g_u
    B_u     sum over t of exp(cum_t - cum_u) dt_u (g_t . x_u) C_t + dt_u F_u E x_u
    C_t     sum over u of exp(cum_t - cum_u) dt_u (g_t . x_u) B_u + exp(cum_t) S g_t
    dt_u    x_u . (sum over t of M[t, u] g_t + F_u B_u E) + A a_u

where a_v, the gradient of ``dt_v * A``, adds up what decays over token v: from tokens before it (u < v) or the state
before the chunk, to tokens from it on (t >= v) or the state after the chunk. No term of it is subtracted from another.

Two walks over the chunks of each sequence and head find S and E, each ``[chunks, H, N, P]`` float32, the only things
kept between kernels. Then chunks are independent: one kernel has a program for each head (x, dt and the parameters),
one for each group of heads (B and C; the heads of a group in order). Decays are exponentials of numbers <= 0, of sums
in float64. Sums over rows are made in parts of a chunk, then over the parts. Sources: Dao & Gu 2024.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import GRADIENT_CHUNK, ceil_div
from samebit.kernels.layout.options import Saved, SSMOptions
from samebit.kernels.triton.gradients.decays import left_at_end, left_between
from samebit.kernels.triton.numeric import aligned, dot, jit, sigmoid, softplus
from samebit.kernels.triton.tiles.table import power_of_two

_DEPTH = 32
"""The most elements of N that a program takes at once: with 64, an H100 runs out of registers."""

_WALK_WARPS, _CHUNK_WARPS = 8, 16


def scan_backward(
    saved: Saved, grad: torch.Tensor, context: ForwardContext, options: SSMOptions
) -> tuple[torch.Tensor, ...]:
    """Implement `Operations.scan_backward`: those of padding rows are zero. The saved xbc and dt are contiguous."""
    xbc, dt, decay_rate, dt_bias, skip = saved
    heads, groups, size = dt.shape[1], options.groups, options.state_size
    head_dim = grad.shape[1] // heads
    grad, layout = aligned(grad), context.on_device
    empty = torch.empty if context.covers_all_rows else torch.zeros
    grad_xbc, grad_dt = (empty(part.shape, dtype=part.dtype, device=part.device) for part in (xbc, dt))
    tiles, first_tiles = layout.tiles(GRADIENT_CHUNK), layout.first_tiles(GRADIENT_CHUNK)
    states = len(tiles), heads, size, head_dim
    before, after = (torch.empty(states, dtype=torch.float32, device=xbc.device) for _ in range(2))
    parts = torch.empty(len(tiles), 3, heads, dtype=torch.float32, device=xbc.device)
    depth = min(_DEPTH, power_of_two(max(16, size)))
    shape = heads, head_dim, groups, size, GRADIENT_CHUNK, power_of_two(max(16, head_dim)), depth
    inputs = xbc, dt, aligned(decay_rate), aligned(dt_bias), *options.dt_limits
    slices = ceil_div(size, depth)
    if len(tiles):
        walks = len(context.lengths), heads, slices
        where = layout.row_start, layout.lengths
        _walk[walks](*inputs, xbc, *where, first_tiles, before, xbc.shape[1], False, *shape, num_warps=_WALK_WARPS)
        _walk[walks](*inputs, grad, *where, first_tiles, after, grad.shape[1], True, *shape, num_warps=_WALK_WARPS)
        _of_head[(len(tiles), heads)](
            *inputs, aligned(skip), grad, *where, tiles, before, after, grad_xbc, grad_dt, parts, slices, *shape,
            num_warps=_CHUNK_WARPS,
        )  # fmt: skip
        _of_group[(len(tiles), groups, slices)](
            *inputs, grad, *where, tiles, before, after, grad_xbc, *shape, num_warps=_CHUNK_WARPS
        )
    return grad_xbc, grad_dt, *parts.sum(0)


@jit()
def _steps(
    dt: tensor, decay_rate: tensor, dt_bias: tensor, low: tensor, high: tensor, at: tensor, real: tensor, head: tensor,
    HEADS: tl.constexpr,
) -> Any:  # fmt: skip
    """Return dt with its bias, the time step (0 after the end), and its running sum times A, float64, of a chunk."""
    raw = tl.load(dt + at * HEADS + head, mask=real, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    step = tl.where(real, tl.minimum(tl.maximum(softplus(raw), low), high), 0.0)
    return raw, step, tl.cumsum(step.to(tl.float64) * tl.load(decay_rate + head).to(tl.float64), axis=0)


@jit(do_not_specialize=["low", "high"])
def _walk(
    xbc: tensor, dt: tensor, decay_rate: tensor, dt_bias: tensor, low: tensor, high: tensor, values: tensor,
    row_start: tensor, lengths: tensor, first_tiles: tensor, found: tensor, STRIDE: tl.constexpr,
    BACKWARDS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    CHUNK: tl.constexpr, PADDED_DIM: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the state before each chunk, from B and ``values``, x; backwards the gradient after it, from C, g."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    length, count = tl.load(lengths + sequence), tl.cdiv(tl.load(lengths + sequence), CHUNK)
    row, tile = tl.load(row_start + sequence), tl.load(first_tiles + sequence).to(tl.int64)
    t, p = tl.arange(0, CHUNK), tl.arange(0, PADDED_DIM)
    n = tl.program_id(2) * DEPTH + tl.arange(0, DEPTH)
    in_state = n[:, None] * HEAD_DIM + p[None, :]
    real_state = (n[:, None] < SIZE) & (p[None, :] < HEAD_DIM)
    column = HEADS * HEAD_DIM + (head // (HEADS // GROUPS)) * SIZE
    if BACKWARDS:
        column += GROUPS * SIZE
    state = tl.zeros((DEPTH, PADDED_DIM), tl.float32)
    for done in range(count):
        chunk = done
        if BACKWARDS:
            chunk = count - 1 - done
        tl.store(found + ((tile + chunk) * HEADS + head) * (SIZE * HEAD_DIM) + in_state, state, mask=real_state)
        real = chunk * CHUNK + t < length
        at = (row + chunk * CHUNK + t).to(tl.int64)
        _, step, sums = _steps(dt, decay_rate, dt_bias, low, high, at, real, head, HEADS)
        whole, left = left_at_end(sums, CHUNK)
        weight = left * step
        if BACKWARDS:
            weight = tl.exp(sums.to(tl.float32))
        keys = xbc + at[:, None] * (HEADS * HEAD_DIM + 2 * GROUPS * SIZE) + column + n[None, :]
        key = tl.load(keys, mask=real[:, None] & (n[None, :] < SIZE), other=0.0).to(tl.float32)
        inside = real[:, None] & (p[None, :] < HEAD_DIM)
        value = tl.load(values + at[:, None] * STRIDE + head * HEAD_DIM + p[None, :], mask=inside, other=0.0)
        state = dot(tl.trans(key), value.to(tl.float32) * weight[:, None], state * whole)


@jit(do_not_specialize=["low", "high", "slices"])
def _of_head(
    xbc: tensor, dt: tensor, decay_rate: tensor, dt_bias: tensor, low: tensor, high: tensor, skip: tensor,
    grad: tensor, row_start: tensor, lengths: tensor, tiles: tensor, before: tensor, after: tensor, grad_xbc: tensor,
    grad_dt: tensor, parts: tensor, slices: tensor, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, PADDED_DIM: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Compute gradients of x and dt of one chunk and head, and its part of those of A, the bias of dt, and D."""
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    t, p = tl.arange(0, CHUNK), tl.arange(0, PADDED_DIM)
    real = first + t < tl.load(lengths + sequence)
    at = (tl.load(row_start + sequence) + first + t).to(tl.int64)
    WIDTH: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * SIZE
    raw, step, sums = _steps(dt, decay_rate, dt_bias, low, high, at, real, head, HEADS)
    whole, left = left_at_end(sums, CHUNK)
    inside = real[:, None] & (p[None, :] < HEAD_DIM)
    place = at[:, None] * WIDTH + head * HEAD_DIM + p[None, :]
    x_given = tl.load(xbc + place, mask=inside, other=0.0)
    g_given = tl.load(grad + at[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + p[None, :], mask=inside, other=0.0)
    x, g = x_given.to(tl.float32), g_given.to(tl.float32)
    match = dot(g_given, tl.trans(x_given), tl.zeros((CHUNK, CHUNK), tl.float32))

    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    read = tl.zeros((CHUNK, PADDED_DIM), tl.float32)  # C S
    wanted = tl.zeros((CHUNK, PADDED_DIM), tl.float32)  # B E
    through = tl.zeros((PADDED_DIM,), tl.float32)
    for part_of_state in range(slices):  # known at run time only: for one, without a loop, ptxas 12.8 lost a descriptor
        n = part_of_state * DEPTH + tl.arange(0, DEPTH)
        keys = xbc + at[:, None] * WIDTH + HEADS * HEAD_DIM + (head // (HEADS // GROUPS)) * SIZE + n[None, :]
        deep = real[:, None] & (n[None, :] < SIZE)
        b, c = tl.load(keys, mask=deep, other=0.0), tl.load(keys + GROUPS * SIZE, mask=deep, other=0.0)
        in_state = (tile * HEADS + head) * (SIZE * HEAD_DIM) + n[:, None] * HEAD_DIM + p[None, :]
        real_state = (n[:, None] < SIZE) & (p[None, :] < HEAD_DIM)
        state = tl.load(before + in_state, mask=real_state, other=0.0)
        of_state = tl.load(after + in_state, mask=real_state, other=0.0)
        scores = dot(c, tl.trans(b), scores)
        read = dot(c.to(tl.float32), state, read)
        wanted = dot(b.to(tl.float32), of_state, wanted)
        through += tl.sum(state * of_state, axis=0)

    mixed = scores * left_between(sums, CHUNK)
    to_x = dot(tl.trans(mixed), g, wanted * left[:, None])
    grad_x = to_x * step[:, None] + g * tl.load(skip + head)
    tl.store(grad_xbc + place, grad_x.to(grad_xbc.dtype.element_ty), mask=inside)

    earlier = t[None, :] < t[:, None]  # [v, u] or [t, u]
    weights = tl.where(earlier, mixed * match * step[None, :], 0.0)
    from_on = (t[None, :] >= t[:, None]).to(tl.float32)  # [v, t]
    over = dot(from_on, weights, tl.zeros((CHUNK, CHUNK), tl.float32))
    of_read = tl.sum(read * g, axis=1) * tl.exp(sums.to(tl.float32))
    of_fed = tl.sum(wanted * x, axis=1) * left * step
    into = tl.where(earlier, over + of_fed[None, :], 0.0)
    of_decay = tl.sum(into, axis=1) + tl.sum(from_on * of_read[None, :], axis=1) + whole * tl.sum(through, axis=0)
    of_step = tl.sum(to_x * x, axis=1) + of_decay * tl.load(decay_rate + head)
    unbounded = softplus(raw)
    of_raw = tl.where(real & (unbounded >= low) & (unbounded <= high), of_step * sigmoid(raw), 0.0)
    tl.store(grad_dt + at * HEADS + head, of_raw.to(grad_dt.dtype.element_ty), mask=real)
    part = parts + tile * (3 * HEADS) + head
    tl.store(part, tl.sum(of_decay * step, axis=0))
    tl.store(part + HEADS, tl.sum(of_raw, axis=0))
    tl.store(part + 2 * HEADS, tl.sum(tl.sum(g * x, axis=1), axis=0))


@jit(do_not_specialize=["low", "high"])
def _of_group(
    xbc: tensor, dt: tensor, decay_rate: tensor, dt_bias: tensor, low: tensor, high: tensor, grad: tensor,
    row_start: tensor, lengths: tensor, tiles: tensor, before: tensor, after: tensor, grad_xbc: tensor,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    PADDED_DIM: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Compute gradients of a slice of B and C of one chunk and group."""
    tile, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    t, p = tl.arange(0, CHUNK), tl.arange(0, PADDED_DIM)
    n = tl.program_id(2) * DEPTH + tl.arange(0, DEPTH)
    real = first + t < tl.load(lengths + sequence)
    at = (tl.load(row_start + sequence) + first + t).to(tl.int64)
    WIDTH: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * SIZE
    inside = real[:, None] & (p[None, :] < HEAD_DIM)
    of_scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_b = tl.zeros((CHUNK, DEPTH), tl.float32)
    of_c = tl.zeros((CHUNK, DEPTH), tl.float32)
    for head in range(group * (HEADS // GROUPS), (group + 1) * (HEADS // GROUPS)):
        _, step, sums = _steps(dt, decay_rate, dt_bias, low, high, at, real, head, HEADS)
        _, left = left_at_end(sums, CHUNK)
        column = head * HEAD_DIM + p[None, :]
        x = tl.load(xbc + at[:, None] * WIDTH + column, mask=inside, other=0.0)
        g = tl.load(grad + at[:, None] * (HEADS * HEAD_DIM) + column, mask=inside, other=0.0)
        match = dot(g, tl.trans(x), tl.zeros((CHUNK, CHUNK), tl.float32))
        of_scores += match * left_between(sums, CHUNK) * step[None, :]
        in_state = (tile * HEADS + head) * (SIZE * HEAD_DIM) + n[:, None] * HEAD_DIM + p[None, :]
        real_state = (n[:, None] < SIZE) & (p[None, :] < HEAD_DIM)
        state = tl.load(before + in_state, mask=real_state, other=0.0)
        of_state = tl.load(after + in_state, mask=real_state, other=0.0)
        of_c = dot(g.to(tl.float32) * tl.exp(sums.to(tl.float32))[:, None], tl.trans(state), of_c)
        of_b = dot(x.to(tl.float32) * (left * step)[:, None], tl.trans(of_state), of_b)
    place = at[:, None] * WIDTH + HEADS * HEAD_DIM + group * SIZE + n[None, :]
    deep = real[:, None] & (n[None, :] < SIZE)
    b = tl.load(xbc + place, mask=deep, other=0.0).to(tl.float32)
    c = tl.load(xbc + place + GROUPS * SIZE, mask=deep, other=0.0).to(tl.float32)
    of_c = dot(of_scores, b, of_c)
    of_b = dot(tl.trans(of_scores), c, of_b)
    tl.store(grad_xbc + place, of_b.to(grad_xbc.dtype.element_ty), mask=deep)
    tl.store(grad_xbc + place + GROUPS * SIZE, of_c.to(grad_xbc.dtype.element_ty), mask=deep)
