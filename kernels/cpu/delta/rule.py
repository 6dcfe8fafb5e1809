"""Compute the gated delta rule on the CPU: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* Chunks of `SCAN_CHUNK` tokens are anchored at position 0 of each sequence. With S the state at the chunk's first
  token and L the running sum of the decay in the chunk (float64), a token writes u and reads o:
  ``u_t = beta_t (v_t - exp(L_t) k_t S - sum over s < t of exp(L_t - L_s) (k_t . k_s) u_s)``,
  ``o_t = exp(L_t) q_t S + sum over s <= t of exp(L_t - L_s) (q_t . k_s) u_s``.
  Sums over the key's size and over s ascend; dot products and the squares of a norm are summed in sixteen lanes, then
  over them.
* What has decayed to less than e**-60 is 0 (`numeric.share_left`).
* u is found in the order of the rows, from those before it, which the tail keeps: there is no inverse of a matrix, and
  where a call begins or ends inside the chunk enters nothing.
* The state moves once a chunk, with the chunk's last token, from the chunk's whole tail.
* Tokens are computed one or two at a time, their keys and queries together: each does the same operations in the same
  order, and the state is read once for all of them.
* Where each channel of a key decays by itself, ``exp(L_t - L_s)`` stands inside the products: `tail`.

Why sixteen: a decode step waits for memory. It reads the state and the tail, where the plain recurrence reads and
writes the state; so the tail has to stay small beside the state.

One work item is a sequence and a key head with its value heads; it owns their state and tail. A thread takes the items
that begin within its share of the rows. State and u are padded to whole vectors of the value's size, keys and queries
to whole vectors of theirs; a state lies in panels (`panels`). "Gated Delta Networks", Yang et al. 2024.

T tokens, Hk and Hv heads of keys and values, K and V their sizes, C tokens a chunk; S is the state alone.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import NO_END, doubles, elements, floats, integers, longs
from samebit.kernels.cpu.base.memory import scratch as room_of
from samebit.kernels.cpu.base.numeric import fma, narrow, share_left, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.rows import Rows
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.base.small_tiles import FETCH_AHEAD, tile_multiply_add_wide, tile_read
from samebit.kernels.cpu.base.state_tiles import fetch_all, taken_at_once, tile_move
from samebit.kernels.cpu.delta.groups import Inputs, Item, Memory, Scratch, Sizes, Span
from samebit.kernels.cpu.delta.panels import COMING, PANEL, place_in_panel
from samebit.kernels.cpu.delta.tail import append, append_by_channel
from samebit.kernels.layout.grids import LANES, SCAN_CHUNK

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def _rule(threads: int, tensors: Any, sizes: Any, layout: Any, memory: Any, captures: Any, kind: Any) -> None:
    """Run the rule; addresses and numbers come in plain tuples, which cost a call less than named ones.

    Args:
        threads: take shares of the rows.
        tensors: addresses of qkv and its stride, of decay, beta and out.
        sizes: Hk, Hv, K, V; whether each channel of a key decays by itself.
        layout: address of the first row, length, start and slot, each of all sequences; number of sequences.
        memory: the state as of the last multiple of this count is kept in the block states, 0 for a call without
            memory; where the addresses of states, block states, and the tails' k, u and sums lie.
        captures: address of (sequence, position, checkpoint) of each, their number, address of the checkpoints.
        kind: a number of the elements' type.
    """
    parts = min(threads, layout[1] * sizes[0])
    share_out(_rule_part, parts, threads, (parts, tensors, sizes, layout, memory, captures, kind))


rule = SharedKernel(_rule)


@kernel_part
def _rule_part(
    part: int, parts: int, tensors: Any, sizes_given: Any, layout: Any, memory_given: Any, captures_given: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute the items that begin within the part's share of the rows."""
    key_heads, value_heads, key_dim, value_dim, by_channel = sizes_given
    deep = (key_dim + LANES - 1) // LANES * LANES
    wide = (value_dim + LANES - 1) // LANES * LANES
    share = value_heads // key_heads
    sizes = Sizes(key_heads, value_heads, key_dim, value_dim, deep, wide, share, by_channel)
    inputs = Inputs(
        elements(tensors[0], NO_END, kind), tensors[1], floats(tensors[2], NO_END), floats(tensors[3], NO_END)
    )
    out = elements(tensors[4], NO_END, kind)
    layout_at, sequences = layout
    row_start, lengths = integers(layout_at, sequences), integers(layout_at + 4 * sequences, sequences)
    starts, slots = integers(layout_at + 8 * sequences, sequences), integers(layout_at + 12 * sequences, sequences)
    captures_at, num_captures, captured_at = captures_given
    captures, captured = integers(captures_at, 3 * num_captures), floats(captured_at, NO_END)
    total = lengths.sum() * key_heads
    grid, memory_at = memory_given
    memory = _memory(memory_at, grid, sizes)
    room = room_of(SCAN_CHUNK * (2 * deep + 2 * SCAN_CHUNK + wide + 3) + 4 * wide + deep)
    before = 0  # rows of the items so far
    for number in range(sequences * key_heads):
        sequence, key_head = number // key_heads, number % key_heads
        mine = before * parts // total == part
        before += lengths[sequence]
        if not mine:
            continue
        slot = slots[sequence] if grid > 0 else 0
        item = Item(
            sequence, row_start[sequence], lengths[sequence], starts[sequence], key_head,
            slot * key_heads + key_head if grid > 0 else 0,
            slot * value_heads + key_head * share if grid > 0 else 0,
        )  # fmt: skip
        _rule_item(inputs, sizes, memory, item, captures, captured, room, out)


@inlined_part
def _memory(at: int, grid: int, sizes: Any) -> Any:
    """Take the memory whose addresses lie at ``at``, or make that of an item for a call without."""
    keeps = grid > 0
    places = longs(at, 5)
    heads = 0 if keeps else sizes.share
    deep, wide = sizes.deep, sizes.wide
    block_state = floats(places[1] if keeps else 0, NO_END)
    state = floats(places[0], NO_END) if keeps else np.empty(heads * sizes.key_dim * wide, np.float32)
    k = floats(places[2], NO_END) if keeps else np.empty(SCAN_CHUNK * deep, np.float32)
    u = floats(places[3], NO_END) if keeps else np.empty(heads * SCAN_CHUNK * wide, np.float32)
    sums = doubles(places[4], NO_END) if keeps else np.empty(heads * SCAN_CHUNK, np.float64)
    left = floats(places[4], NO_END) if keeps else np.empty(heads * SCAN_CHUNK * deep * sizes.by_channel, np.float32)
    return Memory(state, block_state, k, u, sums, left, grid)


@inlined_part
def _scratch(room: Any, deep: int, wide: int) -> Any:
    """Cut the room of a thread, over its address: the caller holds it, and no part counts references."""
    pairs = room.ctypes.data
    scores = pairs + 8 * SCAN_CHUNK * deep
    acc = scores + 8 * SCAN_CHUNK * SCAN_CHUNK
    fed = acc + 16 * wide
    decays = fed + 4 * SCAN_CHUNK * wide
    kept = decays + 4 * deep
    weights = kept + 4 * SCAN_CHUNK
    return Scratch(
        floats(pairs, 2 * SCAN_CHUNK * deep), floats(scores, 2 * SCAN_CHUNK * SCAN_CHUNK), floats(acc, 4 * wide),
        floats(fed, SCAN_CHUNK * wide), floats(decays, deep), floats(kept, SCAN_CHUNK), floats(weights, 2 * SCAN_CHUNK),
    )  # fmt: skip


@inlined_part
def _rule_item(
    inputs: Any, sizes: Any, memory: Any, item: Any, captures: Any, captured: Any, room: Any, out: Any
) -> None:
    """Compute one sequence's tokens of the call, for the heads of an item."""
    deep, wide, share = sizes.deep, sizes.wide, sizes.share
    state, _, k, u, sums, left, grid = memory
    scratch = _scratch(room, deep, wide)
    start, length, at = item.start, item.length, item.value_at
    size, k_at = sizes.key_dim * wide, item.key_at * SCAN_CHUNK * deep
    if start == 0:
        state[at * size : (at + share) * size] = _ZERO
    fetch_all(k, k_at + SCAN_CHUNK * deep, (start % SCAN_CHUNK + 1) * deep)  # of the next item, most likely
    if sizes.by_channel:
        fetch_all(left, (at * SCAN_CHUNK + SCAN_CHUNK + (start - 1) % SCAN_CHUNK) * deep, 2 * deep)
    else:
        fetch_all(sums, (at + share) * SCAN_CHUNK, share * SCAN_CHUNK)
    done = 0
    while done < length:
        inside = (start + done) % SCAN_CHUNK
        many = min(SCAN_CHUNK - inside, length - done)
        span = Span(item.row + done, inside, many)
        moves = inside + many == SCAN_CHUNK
        ends_block = moves and grid > 0 and (start + length) // grid * grid == start + done + many
        if sizes.by_channel:
            append_by_channel(inputs, sizes, memory, item, span, scratch)
        else:
            append(inputs, sizes, memory, item, span, scratch)
        done += many
        for h in range(share):
            fetch_all(u, (at + h + 1) * SCAN_CHUNK * wide, (inside + 1) * wide)
            _head_rows(inputs, sizes, memory, span, scratch, at + h, item.key_head * share + h, out)
            if moves:
                _move(sizes, memory, scratch, at + h, k_at, ends_block)
        if moves and grid > 0:
            for c in range(0, len(captures), 3):
                if captures[c] == item.sequence and captures[c + 1] == start + done:
                    target = (captures[c + 2] * sizes.value_heads + item.key_head * share) * size
                    for i in range(share * size):
                        captured[target + i] = state[at * size + i]


@inlined_part
def _head_rows(inputs: Any, sizes: Any, memory: Any, span: Any, scratch: Any, at: int, head: int, out: Any) -> None:
    """Compute u and o of one value head, which is head ``at`` of the memory."""
    deep, wide = sizes.deep, sizes.wide
    state_at = at * sizes.key_dim * wide
    row, inside, many = span
    j = 0
    while j < many:
        tokens = 2 if many - j >= 2 else 1
        v = 0
        while v < wide:
            place, stride, left = place_in_panel(v, sizes.key_dim, wide, PANEL)
            columns = 8 if tokens == 1 and left >= 8 else taken_at_once(left)
            tile_read(
                2 * tokens, columns, Rows(scratch.pairs, 2 * j * deep, deep),
                Rows(memory.state, state_at + place, stride), sizes.key_dim, Rows(scratch.acc, v, wide), FETCH_AHEAD,
            )  # fmt: skip
            v += columns * LANES
        for i in range(tokens):
            _token(inputs, sizes, memory, scratch, at, head, row + j + i, inside + j + i, j + i, i, out)
        j += tokens


@inlined_part
def _token(
    inputs: Any, sizes: Any, memory: Any, scratch: Any, at: int, head: int, row: int, token: int, place: int, i: int,
    out: Any,
) -> None:  # fmt: skip
    """Compute u and o of a token, number ``place`` of the span, from what its key and query read of the state.

    These are the pair ``i`` of ``acc``.
    """
    qkv, stride, _, beta = inputs
    key_heads, value_heads, key_dim, value_dim, _, wide, _, by_channel = sizes
    u, sums = memory.u, memory.sums
    _, scores, acc, _, _, kept, weights = scratch
    u_at, sums_at, scores_at = at * SCAN_CHUNK * wide, at * SCAN_CHUNK, 2 * place * SCAN_CHUNK
    coming = (at + 1) * key_dim * wide
    fetch_all(memory.state, coming, COMING)
    decayed = _ONE
    if by_channel:  # keys of the tail, and what read the state, have decayed
        for s in range(SCAN_CHUNK):
            weights[s] = -scores[scores_at + s]
            weights[SCAN_CHUNK + s] = scores[scores_at + SCAN_CHUNK + s]
    else:
        now = sums[sums_at + token]
        for s in range(SCAN_CHUNK):  # what lies beyond the token is not read
            kept[s] = share_left(np.float32(now - sums[sums_at + s]))
        for s in range(SCAN_CHUNK):
            weights[s] = -(scores[scores_at + s] * kept[s])
            weights[SCAN_CHUNK + s] = scores[scores_at + SCAN_CHUNK + s] * kept[s]
        decayed = share_left(np.float32(now))
    read = acc[2 * i * wide : (2 * i + 1) * wide]
    result = acc[(2 * i + 1) * wide : (2 * i + 2) * wide]
    first = row * stride + 2 * key_heads * key_dim + head * value_dim
    value = qkv[first : first + value_dim]
    for p in range(value_dim):
        read[p] = fma(-decayed, read[p], widen(value[p]))
    for p in range(value_dim, wide):
        read[p] = _ZERO
    for p in range(wide):
        result[p] = result[p] * decayed
    fetch_all(memory.state, coming + COMING, COMING)
    _add_tail(weights, u, u_at, token, wide, acc, 2 * i * wide)
    fetch_all(memory.state, coming + 2 * COMING, COMING)
    written = u[u_at + token * wide : u_at + (token + 1) * wide]
    strength, own = beta[row * value_heads + head], weights[SCAN_CHUNK + token]
    for p in range(wide):
        write = read[p] * strength
        written[p] = write
        result[p] = fma(own, write, result[p])
    fetch_all(memory.state, coming + 3 * COMING, COMING)
    first = (row * value_heads + head) * value_dim
    target = out[first : first + value_dim]
    for p in range(value_dim):
        target[p] = narrow(result[p], target[p])


@inlined_part
def _add_tail(weights: Any, u: Any, u_at: int, count: int, wide: int, target: Any, target_at: int) -> None:
    """Add ``weights[r, s] u[s]`` for s < count to two rows r."""
    v = 0
    while v < wide:
        left = (wide - v) // LANES
        columns = 8 if left >= 8 else taken_at_once(left)
        tile_multiply_add_wide(
            2, columns, Rows(weights, 0, SCAN_CHUNK), Rows(u, u_at + v, wide), count, Rows(target, target_at + v, wide)
        )
        v += columns * LANES


@kernel_part
def _move(sizes: Any, memory: Any, scratch: Any, at: int, k_at: int, ends_block: bool) -> None:
    """Compute the state at the end of a full chunk: S = exp(L) S + sum over s of k_s (exp(L - L_s) u_s).

    Where a block ends too, the block state gets a copy.
    """
    deep, wide, key_dim = sizes.deep, sizes.wide, sizes.key_dim
    state, block_state, k, u, sums, left, _ = memory
    size = key_dim * wide
    state_at, u_at, sums_at = at * size, at * SCAN_CHUNK * wide, at * SCAN_CHUNK
    if sizes.by_channel:  # keys of the tail have decayed
        kept, kept_at, each = left, (at * SCAN_CHUNK + SCAN_CHUNK - 1) * deep, 1
        fed, fed_at = u, u_at
    else:
        kept, kept_at, each = scratch.kept, 0, 0
        fed, fed_at = scratch.fed, 0
        last = sums[sums_at + SCAN_CHUNK - 1]
        for s in range(SCAN_CHUNK):
            decayed = share_left(np.float32(last - sums[sums_at + s]))
            source, target = u[u_at + s * wide : u_at + (s + 1) * wide], fed[s * wide : (s + 1) * wide]
            for p in range(wide):  # within slices, whose places need no wrapping around
                target[p] = source[p] * decayed
        kept[0] = share_left(np.float32(last))
    first = 0
    while first < wide:  # of each panel; meanwhile the next head's state is asked for
        begin, stride, vectors = place_in_panel(first, key_dim, wide, PANEL)
        n = 0
        while n < key_dim:
            rows = taken_at_once(key_dim - n)
            v = 0
            while v < vectors:
                columns = taken_at_once(vectors - v)
                place = state_at + begin + n * stride + v * LANES
                tile_move(
                    rows, columns, Rows(kept, kept_at + n * each, each), Rows(k, k_at + n, deep),
                    Rows(fed, fed_at + first + v * LANES, wide), SCAN_CHUNK, Rows(state, place, stride), size,
                    block_state, place if ends_block else -1,
                )  # fmt: skip
                v += columns
            n += rows
        first += vectors * LANES
