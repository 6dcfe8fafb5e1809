"""The Mamba2 chunked scan on the CPU: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* Chunks are anchored at position 0 of each sequence. A row reads the state at its chunk's boundary and the tokens
  of its chunk up to itself: ``y_t = exp(cum_t) C_t S + sum over s <= t of exp(cum_t - cum_s) dt_s (C_t . B_s) x_s``.
  Sums run over the state size, then over s, ascending; the lanes of a vector never mix.
* The state moves once a chunk, with the chunk's last token, from the chunk's whole tail. Where a call begins or ends
  inside the chunk enters nothing.
* Rows are computed one, two or four at a time: each does the same operations in the same order.

One work item is a sequence and a tile of up to `HEAD_TILE` heads of one group; it owns their state and tail. State
and x are padded to whole vectors of the head size; B is kept as ``[chunk / 16, N, 16]`` (scores vectorise over tokens).
"Transformers are SSMs", Dao & Gu 2024.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from .jit import parallel_kernel
from .numeric import LANES, exp, fma, narrow, softplus, widen
from .simd import multiply, tile_multiply, tile_multiply_add

HEAD_TILE = 8
"""Heads of one group that share a copy of the group's B and its scores; only a matter of speed."""

_ZERO = np.float32(0.0)


def _scan(
    xbc: Any, dt: Any, dt_stride: int, decay_rate: Any, dt_bias: Any, skip: Any, dt_low: Any, dt_high: Any,
    row_start: Any, lengths: Any, starts: Any, slots: Any, head_dim: int, groups: int, state_size: int, chunk: int,
    keeps: bool, states: Any, tail_x: Any, tail_b: Any, tail_dt: Any, tail_sums: Any, captures: Any, captured: Any,
    out: Any, threads: int,
) -> None:  # fmt: skip
    heads = len(decay_rate)
    group_heads = heads // groups
    tiles = (group_heads + HEAD_TILE - 1) // HEAD_TILE
    items = len(lengths) * groups * tiles
    share = (items + threads - 1) // threads
    for place in prange(share * threads):
        item = (place % share) * threads + place // share  # a thread takes every threads-th item: even loads
        if item < items:
            sequence = item // (groups * tiles)
            tile = item % (groups * tiles)
            first = tile // tiles * group_heads + tile % tiles * HEAD_TILE
            after = min(item + threads, items - 1)  # what this thread does next
            tile_after = after % (groups * tiles)
            coming = tile_after // tiles * group_heads + tile_after % tiles * HEAD_TILE
            _scan_tile(
                xbc, dt, dt_stride, decay_rate, dt_bias, skip, dt_low, dt_high, row_start[sequence], lengths[sequence],
                starts[sequence], slots[sequence], slots[after // (groups * tiles)] * heads + coming, sequence, tile,
                tile // tiles, first,
                min(HEAD_TILE, (tile // tiles + 1) * group_heads - first), heads, head_dim, groups, groups * tiles,
                state_size, chunk, keeps, states, tail_x, tail_b, tail_dt, tail_sums, captures, captured, out,
            )  # fmt: skip


scan = parallel_kernel(_scan)


@njit(nogil=True, error_model="numpy")
def _scan_tile(
    xbc: Any, dt: Any, dt_stride: int, decay_rate: Any, dt_bias: Any, skip: Any, dt_low: Any, dt_high: Any,
    row: int, length: int, start: int, slot: int, coming: int, sequence: int, tile: int, group: int, first: int,
    count: int, heads: int, head_dim: int, groups: int, tiles: int, state_size: int, chunk: int, keeps: bool,
    states: Any, tail_x: Any, tail_b: Any, tail_dt: Any, tail_sums: Any, captures: Any, captured: Any, out: Any,
) -> None:  # fmt: skip
    """One sequence's tokens of the call, for ``count`` heads from ``first`` on."""
    wide = (head_dim + LANES - 1) // LANES * LANES
    state_step = state_size * wide
    tail_step = chunk * wide
    at = slot * heads + first if keeps else 0
    state = states if keeps else np.empty(count * state_step, np.float32)
    x = tail_x if keeps else np.empty(count * tail_step, tail_x.dtype)
    b = tail_b if keeps else np.empty(state_size * chunk, tail_b.dtype)
    steps = tail_dt if keeps else np.empty(count * chunk, np.float32)
    sums = tail_sums if keeps else np.empty(count * chunk, np.float64)
    state_at, x_at, steps_at = at * state_step, at * tail_step, at * chunk
    b_at = (slot * tiles + tile) * state_size * chunk if keeps else 0
    if start == 0:
        state[state_at : state_at + count * state_step] = _ZERO
    rows = min(chunk, length)
    queries = np.empty(rows * state_size, np.float32)
    scores = np.empty(rows * chunk, np.float32)
    weights = np.empty(max(4, state_size if start % chunk + length >= chunk else 0) * chunk, np.float32)
    acc = np.empty(4 * wide, np.float32)
    done = 0
    while done < length:
        inside = (start + done) % chunk
        many = min(chunk - inside, length - done)
        _append(
            xbc, dt, dt_stride, decay_rate, dt_bias, dt_low, dt_high, row + done, inside, many, group, first, count,
            heads, head_dim, wide, groups, state_size, chunk, x, x_at, b, b_at, steps, steps_at, sums, queries,
        )  # fmt: skip
        _scores(queries, inside, many, state_size, chunk, b, b_at, scores)
        for h in range(count):
            ahead = h + 1 if h + 1 < count or not keeps else coming - at
            _head_rows(
                queries, scores, row + done, inside, many, first + h, head_dim, wide, state_size, chunk, state,
                state_at + h * state_step, state_at + ahead * state_step, x, x_at + h * tail_step,
                x_at + ahead * tail_step, steps, sums, steps_at + h * chunk, skip[first + h], weights, acc, out,
            )  # fmt: skip
        done += many
        if inside + many == chunk:
            for h in range(count):
                _advance(
                    state_size, wide, chunk, state, state_at + h * state_step, x, x_at + h * tail_step, b, b_at,
                    steps, sums, steps_at + h * chunk, weights,
                )  # fmt: skip
            for c in range(len(captures)):
                if captures[c, 0] == sequence and captures[c, 1] == start + done:
                    target = (captures[c, 2] * heads + first) * state_step
                    for i in range(count * state_step):
                        captured[target + i] = state[state_at + i]


@njit(nogil=True, error_model="numpy")
def _append(
    xbc: Any, dt: Any, dt_stride: int, decay_rate: Any, dt_bias: Any, dt_low: Any, dt_high: Any, row: int,
    inside: int, many: int, group: int, first: int, count: int, heads: int, head_dim: int, wide: int, groups: int,
    state_size: int, chunk: int, x: Any, x_at: int, b: Any, b_at: int, steps: Any, steps_at: int, sums: Any,
    queries: Any,
) -> None:  # fmt: skip
    """Put ``many`` tokens into the tail from ``inside`` on; their C go to ``queries`` [many, N]."""
    inner = heads * head_dim
    for j in range(many):
        token = inside + j
        inputs = xbc[row + j]
        for h in range(count):
            target = x[x_at + (h * chunk + token) * wide : x_at + (h * chunk + token + 1) * wide]
            source = inputs[(first + h) * head_dim : (first + h + 1) * head_dim]
            for p in range(head_dim):
                target[p] = source[p]
            for p in range(head_dim, wide):
                target[p] = 0
            step = softplus(widen(dt[(row + j) * dt_stride + first + h]) + dt_bias[first + h])
            step = dt_low if step < dt_low else step
            step = dt_high if step > dt_high else step
            before = sums[steps_at + h * chunk + token - 1] if token > 0 else 0.0
            steps[steps_at + h * chunk + token] = step
            sums[steps_at + h * chunk + token] = before + np.float64(step) * np.float64(decay_rate[first + h])
        keys = inputs[inner + group * state_size : inner + (group + 1) * state_size]
        reads = inputs[inner + (groups + group) * state_size : inner + (groups + group + 1) * state_size]
        query = queries[j * state_size : (j + 1) * state_size]
        block = b[b_at + token // LANES * state_size * LANES : b_at + (token // LANES + 1) * state_size * LANES]
        for n in range(state_size):
            block[n * LANES + token % LANES] = keys[n]
            query[n] = widen(reads[n])


@njit(inline="always")
def _block(left: int) -> int:
    """How many of the rows or columns that are left to take at once: 4, 2 or 1."""
    return 4 if left >= 4 else (2 if left >= 2 else 1)


@njit(nogil=True, error_model="numpy")
def _scores(queries: Any, inside: int, many: int, state_size: int, chunk: int, b: Any, b_at: int, scores: Any) -> None:
    """scores[j, s] = C_j . B_s for s up to token j of the chunk (rounded up to whole vectors)."""
    blocks = np.array([0, state_size * LANES])
    j = 0
    while j < many:
        rows = _block(many - j)
        vectors = (inside + j + rows + LANES - 1) // LANES
        v = 0
        while v < vectors:
            columns = min(2, vectors - v)
            multiply(
                rows, columns, False, queries, j * state_size, state_size, b, b_at + v * state_size * LANES, blocks, 0,
                blocks, LANES, state_size, scores, j * chunk + v * LANES, chunk,
            )  # fmt: skip
            v += columns
        j += rows


@njit(nogil=True, error_model="numpy")
def _head_rows(
    queries: Any, scores: Any, row: int, inside: int, many: int, head: int, head_dim: int, wide: int, state_size: int,
    chunk: int, state: Any, state_at: int, state_ahead: int, x: Any, x_at: int, x_ahead: int, steps: Any, sums: Any,
    steps_at: int, skip: Any, weights: Any, acc: Any, out: Any,
) -> None:  # fmt: skip
    """The rows of one head; a single row also asks for what the next head will read."""
    j = 0
    while j < many:
        rows = _block(many - j)
        for i in range(rows):
            token = inside + j + i
            _weigh(
                scores[(j + i) * chunk : (j + i + 1) * chunk], steps[steps_at : steps_at + chunk],
                sums[steps_at : steps_at + chunk], token, weights[i * chunk : (i + 1) * chunk],
            )  # fmt: skip
        v = 0
        while v < wide:
            columns = _block((wide - v) // LANES)
            tile_multiply(
                rows, columns, queries, j * state_size, state_size, state, state_at + v, state_ahead + v, wide,
                state_size, acc, v, wide,
            )  # fmt: skip
            for i in range(rows):
                factor = exp(np.float32(sums[steps_at + inside + j + i]))
                part = acc[i * wide + v : i * wide + v + columns * LANES]
                for lane in range(columns * LANES):
                    part[lane] = part[lane] * factor
            seen = inside + j + 1  # by all of these rows
            tile_multiply_add(rows, columns, weights, 0, chunk, x, x_at + v, x_ahead + v, wide, seen, acc, v, wide)
            for i in range(1, rows):
                tile_multiply_add(
                    1, columns, weights, i * chunk + seen, chunk, x, x_at + seen * wide + v, x_ahead + v, wide, i,
                    acc, i * wide + v, wide,
                )  # fmt: skip
            v += columns * LANES
        for i in range(rows):
            source = x[x_at + (inside + j + i) * wide : x_at + (inside + j + i + 1) * wide]
            total = acc[i * wide : (i + 1) * wide]
            result = out[row + j + i, head * head_dim : (head + 1) * head_dim]
            for p in range(head_dim):
                result[p] = narrow(fma(skip, widen(source[p]), total[p]), result[p])
        j += rows


@njit(inline="always")
def _weigh(scores: Any, steps: Any, sums: Any, token: int, weights: Any) -> None:
    """weights[s] = exp(cum_token - cum_s) dt_s scores[s]; whole vectors, what lies beyond the token is not read."""
    now = sums[token]
    for s in range((token + LANES) // LANES * LANES):
        weights[s] = exp(np.float32(now - sums[s])) * steps[s] * scores[s]


@njit(nogil=True, error_model="numpy")
def _advance(
    state_size: int, wide: int, chunk: int, state: Any, state_at: int, x: Any, x_at: int, b: Any, b_at: int,
    steps: Any, sums: Any, steps_at: int, weights: Any,
) -> None:  # fmt: skip
    """The state at the end of a full chunk: S = exp(cum) S + sum over s of exp(cum - cum_s) dt_s B_s x_s."""
    last = sums[steps_at + chunk - 1]
    decays = np.empty(chunk, np.float32)
    for s in range(chunk):
        decays[s] = exp(np.float32(last - sums[steps_at + s])) * steps[steps_at + s]
    for v in range(0, chunk, LANES):
        for n in range(state_size):
            keys = b[b_at + v * state_size + n * LANES : b_at + v * state_size + (n + 1) * LANES]
            scaled = weights[n * chunk + v : n * chunk + v + LANES]
            for lane in range(LANES):
                scaled[lane] = widen(keys[lane]) * decays[v + lane]
    factor = exp(np.float32(last))
    whole = state[state_at : state_at + state_size * wide]
    for i in range(state_size * wide):
        whole[i] = whole[i] * factor
    n = 0
    while n < state_size:
        rows = _block(state_size - n)
        v = 0
        while v < wide:
            columns = _block((wide - v) // LANES)
            tile_multiply_add(
                rows, columns, weights, n * chunk, chunk, x, x_at + v, x_at + v, wide, chunk, state,
                state_at + n * wide + v, wide,
            )  # fmt: skip
            v += columns * LANES
        n += rows
