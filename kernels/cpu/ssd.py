"""The Mamba2 chunked scan on the CPU: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* Chunks of `SCAN_CHUNK` tokens are anchored at position 0 of each sequence. A row reads the state at its chunk's
  boundary and the tokens of its chunk up to itself:
  ``y_t = exp(cum_t) C_t S + sum over s <= t of exp(cum_t - cum_s) dt_s (C_t . B_s) x_s``.
  Sums over the state size and over s ascend; ``C_t . B_s`` is summed in sixteen lanes, then over them.
* The state moves once a chunk, with the chunk's last token, from the chunk's whole tail. Where a call begins or ends
  inside the chunk enters nothing.
* Rows are computed one, two or four at a time: each does the same operations in the same order.

Why sixteen: a decode step waits for memory. It reads the state and the tail, where the plain recurrence reads and
writes the state; so the tail has to stay small beside the state. The chunk is one vector of scores.

One work item is a sequence and a tile of up to `HEAD_TILE` heads of one group; it owns their state and tail. A thread
takes the items that begin within its share of the rows: neighbours in memory, and loads that are even. State
and x are padded to whole vectors of the head size, B and C to whole vectors of the state size.
"Transformers are SSMs", Dao & Gu 2024.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from .jit import RowKernel
from .memory import NO_END, doubles, elements, floats, integers, longs
from .numeric import LANES, exp, fma, narrow, softplus, widen
from .simd import tile_multiply, tile_multiply_add
from .simd_ssd import dots, fetch_all, tile_move

SCAN_CHUNK = LANES
"""Tokens between two moves of the state; a constant of the arithmetic."""

HEAD_TILE = 8
"""Heads of one group that share a copy of the group's B and its scores; only a matter of speed."""

_ZERO = np.float32(0.0)


def _scan(
    xbc_at: int, xbc_stride: int, dt_at: int, dt_stride: int, rate_at: int, bias_at: int, skip_at: int, dt_low: float,
    dt_high: float, layout_at: int, sequences: int, heads: int, head_dim: int, groups: int, state_size: int, grid: int,
    memory_at: int, captures_at: int, num_captures: int, captured_at: int, out_at: int, threads: int, kind: Any,
) -> None:  # fmt: skip
    """Addresses, sizes and strides. ``layout``: first row, length, start and slot, each of all sequences.

    ``grid``: the state as of the last multiple of so many tokens is kept in the block states; 0 for a call without
    memory. ``memory``: the addresses of states, block states, and the tails' x, B, time steps and sums.
    ``captures``: (sequence, position, checkpoint).
    """
    tiles = (heads // groups + HEAD_TILE - 1) // HEAD_TILE
    parts = min(threads, sequences * groups * tiles)
    for part in prange(parts):  # it counts unsigned, and Numba would compile all below once more for that
        _scan_part(
            np.int64(part), parts, xbc_at, xbc_stride, dt_at, dt_stride, rate_at, bias_at, skip_at, dt_low, dt_high,
            layout_at, sequences, heads, head_dim, groups, state_size, grid, memory_at, captures_at, num_captures,
            captured_at, out_at, kind,
        )  # fmt: skip


scan = RowKernel(_scan)


@njit(nogil=True, error_model="numpy")
def _scan_part(
    part: int, parts: int, xbc_at: int, xbc_stride: int, dt_at: int, dt_stride: int, rate_at: int, bias_at: int,
    skip_at: int, dt_low: float, dt_high: float, layout_at: int, sequences: int, heads: int, head_dim: int,
    groups: int, state_size: int, grid: int, memory_at: int, captures_at: int, num_captures: int, captured_at: int,
    out_at: int, kind: Any,
) -> None:  # fmt: skip
    """The items that begin within the part's share of the rows."""
    xbc, dt, out = elements(xbc_at, NO_END, kind), elements(dt_at, NO_END, kind), elements(out_at, NO_END, kind)
    decay_rate, dt_bias, skip = floats(rate_at, heads), floats(bias_at, heads), floats(skip_at, heads)
    low, high = np.float32(dt_low), np.float32(dt_high)
    row_start, lengths = integers(layout_at, sequences), integers(layout_at + 4 * sequences, sequences)
    starts, slots = integers(layout_at + 8 * sequences, sequences), integers(layout_at + 12 * sequences, sequences)
    captures, captured = integers(captures_at, 3 * num_captures), floats(captured_at, NO_END)
    group_heads = heads // groups
    tiles = (group_heads + HEAD_TILE - 1) // HEAD_TILE
    items = sequences * groups * tiles
    total = lengths.sum() * groups * tiles
    wide = (head_dim + LANES - 1) // LANES * LANES
    deep = (state_size + LANES - 1) // LANES * LANES
    keeps = grid > 0
    places = longs(memory_at, 6)
    own = 0 if keeps else min(HEAD_TILE, group_heads)
    state = floats(places[0], NO_END) if keeps else np.empty(own * state_size * wide, np.float32)
    block_state = floats(places[1] if keeps else 0, NO_END)
    x = elements(places[2], NO_END, kind) if keeps else np.empty(own * SCAN_CHUNK * wide, xbc.dtype)
    b = floats(places[3], NO_END) if keeps else np.empty(SCAN_CHUNK * deep, np.float32)
    steps = floats(places[4], NO_END) if keeps else np.empty(own * SCAN_CHUNK, np.float32)
    sums = doubles(places[5], NO_END) if keeps else np.empty(own * SCAN_CHUNK, np.float64)
    scratch = np.empty(SCAN_CHUNK * (deep + wide) + 4 * wide + (SCAN_CHUNK + 4) * SCAN_CHUNK, np.float32)
    before = 0  # rows of the items so far
    for item in range(items):
        sequence = item // (groups * tiles)
        tile = item % (groups * tiles)
        mine = before * parts // total == part
        before += lengths[sequence]
        if not mine:
            continue
        group = tile // tiles
        first = group * group_heads + tile % tiles * HEAD_TILE
        count = min(HEAD_TILE, (group + 1) * group_heads - first)
        at = slots[sequence] * heads + first if keeps else 0
        tile_at = slots[sequence] * groups * tiles + tile if keeps else 0
        _scan_tile(
            xbc, xbc_stride, dt, dt_stride, decay_rate, dt_bias, skip, low, high, row_start[sequence],
            lengths[sequence], starts[sequence], sequence, group, first, count, heads, head_dim, wide, groups,
            state_size, deep, at, tile_at, grid, state, block_state, x, b, steps, sums, captures, captured, scratch,
            out,
        )  # fmt: skip


@njit(nogil=True, error_model="numpy")
def _scan_tile(
    xbc: Any, xbc_stride: int, dt: Any, dt_stride: int, decay_rate: Any, dt_bias: Any, skip: Any, dt_low: Any,
    dt_high: Any, row: int, length: int, start: int, sequence: int, group: int, first: int, count: int, heads: int,
    head_dim: int, wide: int, groups: int, state_size: int, deep: int, at: int, tile_at: int, grid: int, state: Any,
    block_state: Any, x: Any, b: Any, steps: Any, sums: Any, captures: Any, captured: Any, scratch: Any, out: Any,
) -> None:  # fmt: skip
    """One sequence's tokens of the call, for ``count`` heads from ``first`` on (head ``at`` of the memory)."""
    queries, rest = scratch[: SCAN_CHUNK * deep], scratch[SCAN_CHUNK * deep :]
    fed, rest = rest[: SCAN_CHUNK * wide], rest[SCAN_CHUNK * wide :]
    acc, rest = rest[: 4 * wide], rest[4 * wide :]
    scores, weights = rest[: SCAN_CHUNK * SCAN_CHUNK], rest[SCAN_CHUNK * SCAN_CHUNK :]
    size = state_size * wide
    b_at = tile_at * SCAN_CHUNK * deep
    if start == 0:
        state[at * size : (at + count) * size] = _ZERO
    fetch_all(b, b_at, start % SCAN_CHUNK * deep)
    fetch_all(steps, at * SCAN_CHUNK, count * SCAN_CHUNK)
    fetch_all(sums, at * SCAN_CHUNK, count * SCAN_CHUNK)
    done = 0
    while done < length:
        inside = (start + done) % SCAN_CHUNK
        many = min(SCAN_CHUNK - inside, length - done)
        moves = inside + many == SCAN_CHUNK
        ends_block = moves and grid > 0 and (start + length) // grid * grid == start + done + many
        _append(
            xbc, xbc_stride, dt, dt_stride, decay_rate, dt_bias, dt_low, dt_high, row + done, inside, many, group,
            first, count, heads, head_dim, wide, groups, state_size, deep, x, b, b_at, steps, sums, at, queries,
        )  # fmt: skip
        for j in range(many):
            dots(queries, j * deep, b, b_at, deep, inside + j + 1, deep, scores, j * SCAN_CHUNK)
        done += many
        for h in range(count):
            fetch_all(x, (at + h) * SCAN_CHUNK * wide, inside * wide)
            _head_rows(
                queries, scores, row + done - many, inside, many, first + h, heads, head_dim, wide, state_size, deep,
                state, (at + h) * size, x, (at + h) * SCAN_CHUNK * wide, steps, sums, (at + h) * SCAN_CHUNK,
                skip[first + h], weights, acc, out,
            )  # fmt: skip
            if moves:
                _move(
                    state_size, wide, deep, state, (at + h) * size, x, (at + h) * SCAN_CHUNK * wide, b, b_at, steps,
                    sums, (at + h) * SCAN_CHUNK, fed, block_state, (at + h) * size if ends_block else -1,
                )  # fmt: skip
        if moves and grid > 0:
            for c in range(0, len(captures), 3):
                if captures[c] == sequence and captures[c + 1] == start + done:
                    target = (captures[c + 2] * heads + first) * size
                    for i in range(count * size):
                        captured[target + i] = state[at * size + i]


@njit(nogil=True, error_model="numpy")
def _append(
    xbc: Any, xbc_stride: int, dt: Any, dt_stride: int, decay_rate: Any, dt_bias: Any, dt_low: Any, dt_high: Any,
    row: int, inside: int, many: int, group: int, first: int, count: int, heads: int, head_dim: int, wide: int,
    groups: int, state_size: int, deep: int, x: Any, b: Any, b_at: int, steps: Any, sums: Any, at: int, queries: Any,
) -> None:  # fmt: skip
    """Put ``many`` tokens into the tail from ``inside`` on; their C go to ``queries`` [many, N]."""
    inner = heads * head_dim
    for j in range(many):
        token = inside + j
        inputs = xbc[(row + j) * xbc_stride : (row + j) * xbc_stride + inner + 2 * groups * state_size]
        for h in range(count):
            place = (at + h) * SCAN_CHUNK + token
            target = x[place * wide : (place + 1) * wide]
            source = inputs[(first + h) * head_dim : (first + h + 1) * head_dim]
            for p in range(head_dim):
                target[p] = source[p]
            for p in range(head_dim, wide):
                target[p] = 0
            step = softplus(widen(dt[(row + j) * dt_stride + first + h]) + dt_bias[first + h])
            step = dt_low if step < dt_low else step
            step = dt_high if step > dt_high else step
            before = sums[place - 1] if token > 0 else 0.0
            steps[place] = step
            sums[place] = before + np.float64(step) * np.float64(decay_rate[first + h])
        _widen_padded(
            inputs[inner + group * state_size : inner + (group + 1) * state_size],
            b[b_at + token * deep : b_at + (token + 1) * deep],
        )
        _widen_padded(
            inputs[inner + (groups + group) * state_size : inner + (groups + group + 1) * state_size],
            queries[j * deep : (j + 1) * deep],
        )


@njit(inline="always")
def _widen_padded(source: Any, target: Any) -> None:
    for n in range(len(source)):
        target[n] = widen(source[n])
    for n in range(len(source), len(target)):
        target[n] = _ZERO


@njit(inline="always")
def _block(left: int) -> int:
    """How many of the rows or columns that are left to take at once: 4, 2 or 1."""
    return 4 if left >= 4 else (2 if left >= 2 else 1)


@njit(nogil=True, error_model="numpy")
def _head_rows(
    queries: Any, scores: Any, row: int, inside: int, many: int, head: int, heads: int, head_dim: int, wide: int,
    state_size: int, deep: int, state: Any, state_at: int, x: Any, x_at: int, steps: Any, sums: Any, steps_at: int,
    skip: Any, weights: Any, acc: Any, out: Any,
) -> None:  # fmt: skip
    """The rows of one head."""
    j = 0
    while j < many:
        rows = _block(many - j)
        for i in range(rows):
            _weigh(
                scores[(j + i) * SCAN_CHUNK : (j + i + 1) * SCAN_CHUNK], steps[steps_at : steps_at + SCAN_CHUNK],
                sums[steps_at : steps_at + SCAN_CHUNK], inside + j + i,
                weights[i * SCAN_CHUNK : (i + 1) * SCAN_CHUNK],
            )  # fmt: skip
        v = 0
        while v < wide:
            columns = _block((wide - v) // LANES)
            tile_multiply(
                rows, columns, queries, j * deep, deep, state, state_at + v, wide, state_size, acc, v, wide,
            )  # fmt: skip
            for i in range(rows):
                factor = exp(np.float32(sums[steps_at + inside + j + i]))
                part = acc[i * wide + v : i * wide + v + columns * LANES]
                for lane in range(columns * LANES):
                    part[lane] = part[lane] * factor
            seen = inside + j + 1  # by all of these rows
            tile_multiply_add(rows, columns, weights, 0, SCAN_CHUNK, x, x_at + v, wide, seen, acc, v, wide)
            for i in range(1, rows):
                tile_multiply_add(
                    1, columns, weights, i * SCAN_CHUNK + seen, SCAN_CHUNK, x, x_at + seen * wide + v, wide, i, acc,
                    i * wide + v, wide,
                )  # fmt: skip
            v += columns * LANES
        for i in range(rows):
            source = x[x_at + (inside + j + i) * wide : x_at + (inside + j + i + 1) * wide]
            total = acc[i * wide : (i + 1) * wide]
            place = ((row + j + i) * heads + head) * head_dim
            result = out[place : place + head_dim]
            for p in range(head_dim):
                result[p] = narrow(fma(skip, widen(source[p]), total[p]), result[p])
        j += rows


@njit(inline="always")
def _weigh(scores: Any, steps: Any, sums: Any, token: int, weights: Any) -> None:
    """weights[s] = exp(cum_token - cum_s) dt_s scores[s]; what lies beyond the token is not read."""
    now = sums[token]
    for s in range(SCAN_CHUNK):
        weights[s] = exp(np.float32(now - sums[s])) * steps[s] * scores[s]


@njit(nogil=True, error_model="numpy")
def _move(
    state_size: int, wide: int, deep: int, state: Any, state_at: int, x: Any, x_at: int, b: Any, b_at: int,
    steps: Any, sums: Any, steps_at: int, fed: Any, second: Any, second_at: int,
) -> None:  # fmt: skip
    """The state at the end of a full chunk: S = exp(cum) S + sum over s of B_s (exp(cum - cum_s) dt_s x_s).

    ``second`` gets a copy at ``second_at`` unless that is negative.
    """
    last = sums[steps_at + SCAN_CHUNK - 1]
    for s in range(SCAN_CHUNK):
        decay = exp(np.float32(last - sums[steps_at + s])) * steps[steps_at + s]
        source = x[x_at + s * wide : x_at + (s + 1) * wide]
        target = fed[s * wide : (s + 1) * wide]
        for p in range(wide):
            target[p] = widen(source[p]) * decay
    factor = exp(np.float32(last))
    n = 0
    while n < state_size:  # meanwhile the next head's state is asked for
        rows = _block(state_size - n)
        v = 0
        while v < wide:
            columns = _block((wide - v) // LANES)
            place = n * wide + v
            tile_move(
                rows, columns, factor, b, b_at + n, deep, fed, v, wide, SCAN_CHUNK, state, state_at + place, wide,
                state_size * wide, second, second_at + place if second_at >= 0 else -1,
            )  # fmt: skip
            v += columns * LANES
        n += rows
