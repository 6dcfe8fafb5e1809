"""Compute the Mamba2 chunked scan on the CPU: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* Chunks of `SCAN_CHUNK` tokens are anchored at position 0 of each sequence. A row reads the state at its chunk's
  boundary and the tokens of its chunk up to itself:
  ``y_t = exp(cum_t) C_t S + sum over s <= t of exp(cum_t - cum_s) dt_s (C_t . B_s) x_s``.
  Sums over the state size and over s ascend; ``C_t . B_s`` is summed in sixteen lanes, then over them.
* The state moves once a chunk, with the chunk's last token, from the chunk's whole tail. Where a call begins or ends
  inside the chunk enters nothing.
* What has decayed to less than e**-60 is 0 (`numeric.share_left`).
* Rows are computed one, two or four at a time: each does the same operations in the same order.

Why sixteen: a decode step waits for memory. It reads the state and the tail, where the plain recurrence reads and
writes the state; so the tail has to stay small beside the state. The chunk is one vector of scores.

One work item is a sequence and a tile of up to `HEAD_TILE` heads of one group; it owns their state and tail. A thread
takes the items that begin within its share of the rows: neighbours in memory, and loads that are even. State
and x are padded to whole vectors of the head size, B and C to whole vectors of the state size.
"Transformers are SSMs", Dao & Gu 2024.

T tokens, H heads of size P in groups, N state size, C tokens a chunk; S is the state alone.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import NO_END, doubles, elements, floats, integers, longs
from samebit.kernels.cpu.base.numeric import fma, narrow, share_left, softplus, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.rows import Rows
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.base.small_tiles import tile_multiply, tile_multiply_add
from samebit.kernels.cpu.base.state_tiles import dots, fetch_all, taken_at_once, tile_move
from samebit.kernels.cpu.ssd.groups import Inputs, Item, Memory, Scratch, Sizes, Span
from samebit.kernels.layout.grids import HEAD_TILE, LANES, SCAN_CHUNK

_ZERO = np.float32(0.0)


def _scan(
    threads: int, tensors: Any, dt_low: float, dt_high: float, sizes: Any, layout: Any, memory: Any, captures: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Scan; addresses and numbers come in plain tuples, which cost a call less than named ones.

    Args:
        threads: take shares of the rows.
        tensors: addresses of xbc and its stride, of dt and its stride, of the decay rates, biases, skips and of out.
        dt_low: lower bound of the time step.
        dt_high: upper bound.
        sizes: H, P, groups, N.
        layout: address of the first row, length, start and slot, each of all sequences; number of sequences.
        memory: the state as of the last multiple of this count is kept in the block states, 0 for a call without
            memory; where the addresses of states, block states, and the tails' x, B, time steps and sums lie.
        captures: address of (sequence, position, checkpoint) of each, their number, address of the checkpoints.
        kind: a number of the elements' type.
    """
    heads, groups = sizes[0], sizes[2]
    tiles = (heads // groups + HEAD_TILE - 1) // HEAD_TILE
    parts = min(threads, layout[1] * groups * tiles)
    share_out(
        _scan_part, parts, threads, (parts, tensors, dt_low, dt_high, sizes, layout, memory, captures, kind)
    )  # fmt: skip


scan = SharedKernel(_scan)


@kernel_part
def _scan_part(
    part: int, parts: int, tensors: Any, dt_low: float, dt_high: float, sizes_given: Any, layout: Any,
    memory_given: Any, captures_given: Any, kind: Any,
) -> None:  # fmt: skip
    """Compute the items that begin within the part's share of the rows."""
    heads, head_dim, groups, state_size = sizes_given
    wide = (head_dim + LANES - 1) // LANES * LANES
    deep = (state_size + LANES - 1) // LANES * LANES
    sizes = Sizes(heads, head_dim, groups, state_size, wide, deep)
    inputs = _inputs(tensors, dt_low, dt_high, heads, kind)
    out = elements(tensors[7], NO_END, kind)
    layout_at, sequences = layout
    row_start, lengths = integers(layout_at, sequences), integers(layout_at + 4 * sequences, sequences)
    starts, slots = integers(layout_at + 8 * sequences, sequences), integers(layout_at + 12 * sequences, sequences)
    captures_at, num_captures, captured_at = captures_given
    captures, captured = integers(captures_at, 3 * num_captures), floats(captured_at, NO_END)
    group_heads = heads // groups
    tiles = (group_heads + HEAD_TILE - 1) // HEAD_TILE
    items = sequences * groups * tiles
    total = lengths.sum() * groups * tiles
    grid, memory_at = memory_given
    memory = _memory(memory_at, grid, min(HEAD_TILE, group_heads), sizes, kind, inputs.xbc.dtype)
    room = np.empty(SCAN_CHUNK * (deep + wide) + 4 * wide + (SCAN_CHUNK + 4) * SCAN_CHUNK, np.float32)
    before = 0  # rows of the items so far
    for number in range(items):
        sequence = number // (groups * tiles)
        tile = number % (groups * tiles)
        mine = before * parts // total == part
        before += lengths[sequence]
        if not mine:
            continue
        group = tile // tiles
        first = group * group_heads + tile % tiles * HEAD_TILE
        slot = slots[sequence] if grid > 0 else 0
        tile_at = slots[sequence] * groups * tiles + tile if grid > 0 else 0
        item = Item(
            sequence, row_start[sequence], lengths[sequence], starts[sequence], group, first,
            min(HEAD_TILE, (group + 1) * group_heads - first), slot * heads + first if grid > 0 else 0,
            tile_at * SCAN_CHUNK * deep,
        )  # fmt: skip
        _scan_item(inputs, sizes, memory, item, captures, captured, room, out)


@inlined_part
def _inputs(tensors: Any, dt_low: float, dt_high: float, heads: int, kind: Any) -> Any:
    """Take the inputs whose addresses and strides are given."""
    return Inputs(
        elements(tensors[0], NO_END, kind), tensors[1], elements(tensors[2], NO_END, kind), tensors[3],
        floats(tensors[4], heads), floats(tensors[5], heads), np.float32(dt_low), np.float32(dt_high),
        floats(tensors[6], heads),
    )  # fmt: skip


@inlined_part
def _memory(at: int, grid: int, own: int, sizes: Any, kind: Any, dtype: Any) -> Any:
    """Take the memory whose addresses lie at ``at``, or make that of ``own`` heads for a call without."""
    keeps = grid > 0
    places = longs(at, 6)
    heads = 0 if keeps else own
    wide, deep = sizes.wide, sizes.deep
    block_state = floats(places[1] if keeps else 0, NO_END)
    state = floats(places[0], NO_END) if keeps else np.empty(heads * sizes.state_size * wide, np.float32)
    x = elements(places[2], NO_END, kind) if keeps else np.empty(heads * SCAN_CHUNK * wide, dtype)
    b = floats(places[3], NO_END) if keeps else np.empty(SCAN_CHUNK * deep, np.float32)
    steps = floats(places[4], NO_END) if keeps else np.empty(heads * SCAN_CHUNK, np.float32)
    sums = doubles(places[5], NO_END) if keeps else np.empty(heads * SCAN_CHUNK, np.float64)
    return Memory(state, block_state, x, b, steps, sums, grid)


@inlined_part
def _scratch(room: Any, wide: int, deep: int) -> Any:
    """Cut the room of a thread, over its address: the caller holds it, and no part counts references."""
    queries = room.ctypes.data
    fed = queries + 4 * SCAN_CHUNK * deep
    acc = fed + 4 * SCAN_CHUNK * wide
    scores = acc + 16 * wide
    weights = scores + 4 * SCAN_CHUNK * SCAN_CHUNK
    return Scratch(
        floats(queries, SCAN_CHUNK * deep), floats(fed, SCAN_CHUNK * wide), floats(acc, 4 * wide),
        floats(scores, SCAN_CHUNK * SCAN_CHUNK), floats(weights, 4 * SCAN_CHUNK),
    )  # fmt: skip


@kernel_part
def _scan_item(
    inputs: Any, sizes: Any, memory: Any, item: Any, captures: Any, captured: Any, room: Any, out: Any
) -> None:
    """Compute one sequence's tokens of the call, for the heads of an item."""
    wide, deep = sizes.wide, sizes.deep
    state, _, x, b, steps, sums, grid = memory
    scratch = _scratch(room, wide, deep)
    start, length, at, count, b_at = item.start, item.length, item.at, item.count, item.b_at
    size = sizes.state_size * wide
    if start == 0:
        state[at * size : (at + count) * size] = _ZERO
    fetch_all(b, b_at, start % SCAN_CHUNK * deep)
    fetch_all(steps, at * SCAN_CHUNK, count * SCAN_CHUNK)
    fetch_all(sums, at * SCAN_CHUNK, count * SCAN_CHUNK)
    done = 0
    while done < length:
        inside = (start + done) % SCAN_CHUNK
        many = min(SCAN_CHUNK - inside, length - done)
        span = Span(item.row + done, inside, many)
        moves = inside + many == SCAN_CHUNK
        ends_block = moves and grid > 0 and (start + length) // grid * grid == start + done + many
        _append(inputs, sizes, memory, item, span, scratch.queries)
        for j in range(many):
            dots(
                1, Rows(scratch.queries, j * deep, deep), Rows(b, b_at, deep), inside + j + 1, deep,
                Rows(scratch.scores, j * SCAN_CHUNK, SCAN_CHUNK),
            )  # fmt: skip
        done += many
        for h in range(count):
            fetch_all(x, (at + h) * SCAN_CHUNK * wide, inside * wide)
            _head_rows(sizes, memory, span, scratch, at + h, item.first + h, inputs.skip[item.first + h], out)
            if moves:
                _move(sizes, memory, scratch, at + h, b_at, ends_block)
        if moves and grid > 0:
            for c in range(0, len(captures), 3):
                if captures[c] == item.sequence and captures[c + 1] == start + done:
                    target = (captures[c + 2] * sizes.heads + item.first) * size
                    for i in range(count * size):
                        captured[target + i] = state[at * size + i]


@kernel_part
def _append(inputs_given: Any, sizes: Any, memory: Any, item: Any, span: Any, queries: Any) -> None:
    """Put the tokens of a span into the tail; their C go to ``queries`` ``[many, N]``."""
    xbc, xbc_stride, dt, dt_stride, decay_rate, dt_bias, dt_low, dt_high, _ = inputs_given
    heads, head_dim, groups, state_size, wide, deep = sizes
    _, _, x, b, steps, sums, _ = memory
    group, first, at, b_at = item.group, item.first, item.at, item.b_at
    row, inside, many = span
    inner = heads * head_dim
    for j in range(many):
        token = inside + j
        inputs = xbc[(row + j) * xbc_stride : (row + j) * xbc_stride + inner + 2 * groups * state_size]
        for h in range(item.count):
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


@inlined_part
def _widen_padded(source: Any, target: Any) -> None:
    """Copy in float32, with zeros behind."""
    for n in range(len(source)):
        target[n] = widen(source[n])
    for n in range(len(source), len(target)):
        target[n] = _ZERO


@kernel_part
def _head_rows(sizes: Any, memory: Any, span: Any, scratch: Any, at: int, head: int, skip: Any, out: Any) -> None:
    """Compute the rows of one head, which is head ``at`` of the memory."""
    heads, head_dim, _, state_size, wide, deep = sizes
    state, _, x, _, steps, sums, _ = memory
    queries, _, acc, scores, weights = scratch
    row, inside, many = span
    state_at, x_at, steps_at = at * state_size * wide, at * SCAN_CHUNK * wide, at * SCAN_CHUNK
    j = 0
    while j < many:
        rows = taken_at_once(many - j)
        for i in range(rows):
            _weigh(
                scores[(j + i) * SCAN_CHUNK : (j + i + 1) * SCAN_CHUNK], steps[steps_at : steps_at + SCAN_CHUNK],
                sums[steps_at : steps_at + SCAN_CHUNK], inside + j + i,
                weights[i * SCAN_CHUNK : (i + 1) * SCAN_CHUNK],
            )  # fmt: skip
        v = 0
        while v < wide:
            columns = taken_at_once((wide - v) // LANES)
            tile_multiply(
                rows, columns, Rows(queries, j * deep, deep), Rows(state, state_at + v, wide), state_size,
                Rows(acc, v, wide),
            )  # fmt: skip
            for i in range(rows):
                factor = share_left(np.float32(sums[steps_at + inside + j + i]))
                part = acc[i * wide + v : i * wide + v + columns * LANES]
                for lane in range(columns * LANES):
                    part[lane] = part[lane] * factor
            seen = inside + j + 1  # by all of these rows
            tile_multiply_add(
                rows, columns, Rows(weights, 0, SCAN_CHUNK), Rows(x, x_at + v, wide), seen, Rows(acc, v, wide)
            )
            for i in range(1, rows):
                tile_multiply_add(
                    1, columns, Rows(weights, i * SCAN_CHUNK + seen, SCAN_CHUNK), Rows(x, x_at + seen * wide + v, wide),
                    i, Rows(acc, i * wide + v, wide),
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


@inlined_part
def _weigh(scores: Any, steps: Any, sums: Any, token: int, weights: Any) -> None:
    """Compute ``weights[s] = exp(cum_token - cum_s) dt_s scores[s]``; what lies beyond the token is not read."""
    now = sums[token]
    for s in range(SCAN_CHUNK):
        weights[s] = share_left(np.float32(now - sums[s])) * steps[s] * scores[s]


@kernel_part
def _move(sizes: Any, memory: Any, scratch: Any, at: int, b_at: int, ends_block: bool) -> None:
    """Compute the state at the end of a full chunk: S = exp(cum) S + sum over s of B_s (exp(cum - cum_s) dt_s x_s).

    Where a block ends too, the block state gets a copy.
    """
    _, _, _, state_size, wide, deep = sizes
    state, block_state, x, b, steps, sums, _ = memory
    fed, kept = scratch.fed, scratch.weights
    size = state_size * wide
    state_at, x_at, steps_at = at * size, at * SCAN_CHUNK * wide, at * SCAN_CHUNK
    last = sums[steps_at + SCAN_CHUNK - 1]
    for s in range(SCAN_CHUNK):
        decay = share_left(np.float32(last - sums[steps_at + s])) * steps[steps_at + s]
        source = x[x_at + s * wide : x_at + (s + 1) * wide]
        target = fed[s * wide : (s + 1) * wide]
        for p in range(wide):
            target[p] = widen(source[p]) * decay
    kept[0] = share_left(np.float32(last))
    n = 0
    while n < state_size:  # meanwhile the next head's state is asked for
        rows = taken_at_once(state_size - n)
        v = 0
        while v < wide:
            columns = taken_at_once((wide - v) // LANES)
            place = state_at + n * wide + v
            tile_move(
                rows, columns, Rows(kept, 0, 0), Rows(b, b_at + n, deep), Rows(fed, v, wide), SCAN_CHUNK,
                Rows(state, place, wide), size, block_state, place if ends_block else -1,
            )  # fmt: skip
            v += columns * LANES
        n += rows
