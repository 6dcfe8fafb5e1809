"""Paged causal attention on the CPU, forward: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* A query row walks its keys in chunks of `KV_CHUNK` tokens anchored at position 0 of its own sequence,
  through one online-softmax accumulator, in order. Nothing else enters its arithmetic: not the number
  of rows, not where a prefill chunk began, not the block size, not the number of threads.
* Rows are computed one, two or four at a time; each does the same operations in the same order on every
  element, so the choice is invisible in the bits.

A page holds ``block_size`` tokens of one layer: ``pages[block, kv_head, 0]`` is the keys as ``[D, B]``
(scores vectorise over tokens), ``pages[block, kv_head, 1]`` the values as ``[B, D]`` (the output
vectorises over the head). Online softmax: Milakov & Gimelshein 2018; tiling: Dao et al. 2022.

T tokens, S sequences, H heads, G query heads a KV head, D head size, B tokens a block, C tokens a chunk.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from samebit.kernels.cpu.attention.groups import Following, Pieces, Place, Running, Shape, Softmax
from samebit.kernels.cpu.attention.vectors import add_values, greatest, score_chunk
from samebit.kernels.cpu.base.jit import parallel_kernel
from samebit.kernels.cpu.base.memory import elements, floats, longs, scratch
from samebit.kernels.cpu.base.numeric import exp, fma, narrow, tanh, widen
from samebit.kernels.cpu.base.rows import Rows
from samebit.kernels.layout.grids import KV_CHUNK, LANES, QUERY_TILE

_VECTORS = KV_CHUNK // LANES
_ARRAYS = 8
"""Arrays in the room of a thread, each from the start of a cache line on."""

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOWEST = np.float32(-np.inf)


def _attend(
    q: Any, pages: Any, sequences: Any, block_tables: Any, tiles: Any, scales: Any, sinks: Any, out: Any, lse: Any,
    threads: int,
) -> None:  # fmt: skip
    """Attend, T rows of S sequences.

    Args:
        q: ``[T, H, D]``.
        pages: ``[blocks, KV heads, 2, D * B]``.
        sequences: ``[4, S]``, first row, length, start and row of the block tables of each.
        block_tables: ``[tables, W]``.
        tiles: ``[N, 2]``, sequence and first row in it of what a work item computes for one KV head.
        scales: factor on the scores, their softcap (0 for off), and how many tokens a token sees (0 for all).
        sinks: ``[H]``, the score that a head's softmax begins with; empty for none.
        out: ``[T, H, D]``.
        lse: ``[T, H]``, gets the log-sum-exp of the scores; empty to get none.
        threads: take the work items in turns: even loads.
    """
    head_dim = q.shape[2]
    longest = 0
    for sequence in range(sequences.shape[1]):
        longest = max(longest, min(QUERY_TILE, sequences[1, sequence]))
    rows = longest * (q.shape[1] // pages.shape[1])
    copied = 2 * head_dim * KV_CHUNK if pages.shape[3] < LANES * head_dim else 0
    size = rows * (2 * head_dim + LANES + 3) + 4 * KV_CHUNK + 8 * _VECTORS + copied + _ARRAYS * LANES
    for thread in prange(threads):
        room = scratch(size)
        _attend_items(
            np.int64(thread), threads, q, pages, sequences, block_tables, tiles, scales, sinks, out, lse, room
        )  # fmt: skip


attend = parallel_kernel(_attend)


@njit(nogil=True, error_model="numpy")
def _attend_items(
    thread: int, threads: int, q: Any, pages: Any, sequences: Any, block_tables: Any, tiles: Any, scales: Any,
    sinks: Any, out: Any, lse: Any, room: Any,
) -> None:  # fmt: skip
    """Attend for every ``threads``-th item from ``thread`` on.

    What is kept meanwhile lies in ``room``, as arrays over its address: reading arrays that count their references from
    a named tuple counts each time, which made a decode step a quarter slower. The caller holds ``room``.
    """
    kv_heads, head_dim = pages.shape[1], q.shape[2]
    shape = Shape(kv_heads, q.shape[1] // kv_heads, head_dim, pages.shape[3] // head_dim)
    softmax = Softmax(scales[0], scales[1], scales[2])
    row_start, lengths, starts, table_rows = sequences[0], sequences[1], sequences[2], sequences[3]
    longest = 0
    for sequence in range(len(lengths)):
        longest = max(longest, min(QUERY_TILE, lengths[sequence]))
    flat = pages.reshape(-1)
    kind = np.zeros(1, pages.dtype)[0]
    running, end = _place_running(room.ctypes.data, longest * shape.group, head_dim)
    pieces = _place_pieces(end, flat, kind, shape)
    items = tiles.shape[0] * kv_heads
    for item in range(thread, items, threads):
        tile, after = item // kv_heads, min(item + threads, items - 1)  # this, and what the thread does next
        sequence, first, coming = tiles[tile, 0], tiles[tile, 1], tiles[after // kv_heads, 0]
        last_table = -1
        if tile > 0:
            last_table = table_rows[tiles[tile - 1, 0]]
        place = Place(
            table_rows[sequence], row_start[sequence] + first, starts[sequence] + first,
            min(QUERY_TILE, lengths[sequence] - first), item % kv_heads,
        )  # fmt: skip
        following = Following(last_table, table_rows[coming], after % kv_heads, starts[coming])
        _begin_rows(q, sinks, shape, place, running)
        _attend_tile(flat, block_tables, shape, softmax, place, following, running, pieces)
        _write_rows(shape, place, running, out, lse)


@njit(inline="always")
def _behind(address: int, count: int) -> int:
    """Return the address of the first cache line behind ``count`` float32."""
    return address + (count + LANES - 1) // LANES * LANES * 4


@njit(inline="always")
def _place_running(query: int, rows: int, head_dim: int) -> Any:
    """Place the online softmax of up to ``rows`` rows from an address on; return the address behind it too."""
    acc = _behind(query, rows * head_dim)
    sums = _behind(acc, rows * head_dim)
    peaks = _behind(sums, rows * LANES)
    tokens = _behind(peaks, rows)
    s = _behind(tokens, 2 * rows)
    scores = floats(s, 4 * KV_CHUNK)
    scores[:] = _ZERO
    running = Running(
        floats(query, rows * head_dim), floats(acc, rows * head_dim), floats(sums, rows * LANES), floats(peaks, rows),
        longs(tokens, rows), scores,
    )  # fmt: skip
    return running, _behind(s, 4 * KV_CHUNK)


@njit(inline="always")
def _place_pieces(address: int, pages: Any, kind: Any, shape: Any) -> Any:
    """Place the beginnings of a chunk's pieces, and a copy of it if pages are smaller than a vector."""
    small = shape.block_size < LANES
    copied = elements(address + 32 * _VECTORS, 2 * shape.head_dim * KV_CHUNK, kind)
    source, stride = (copied, KV_CHUNK) if small else (pages, shape.block_size)
    places = longs(address, 4 * _VECTORS)
    places[:] = 0
    return Pieces(
        source, stride, places[:_VECTORS], places[_VECTORS : 2 * _VECTORS], places[2 * _VECTORS : 3 * _VECTORS],
        places[3 * _VECTORS :],
    )  # fmt: skip


@njit(inline="always")
def _begin_rows(q: Any, sinks: Any, shape: Any, place: Any, running: Any) -> None:
    """Load the queries of an item, and begin its softmax with nothing, or with the sinks, whose values are 0."""
    group, head_dim, query = shape.group, shape.head_dim, running.query
    rows = place.count * group
    for r in range(rows):
        running.tokens[r] = place.position + r // group
        running.peaks[r] = _LOWEST
        for d in range(head_dim):
            query[r * head_dim + d] = widen(q[place.row + r // group, place.kv_head * group + r % group, d])
    running.acc[: rows * head_dim] = _ZERO
    running.sums[: rows * LANES] = _ZERO
    if len(sinks) > 0:
        for r in range(rows):
            running.peaks[r] = sinks[place.kv_head * group + r % group]
            running.sums[r * LANES] = _ONE


@njit(nogil=True, error_model="numpy")
def _attend_tile(
    pages: Any, block_tables: Any, shape: Any, softmax: Any, place: Any, following: Any, running: Any, pieces: Any
) -> None:
    """Take in all chunks that the item's rows see, in order."""
    window, newest = softmax.window, place.position + place.count - 1
    begin = max(0, place.position - window + 1) // KV_CHUNK if window > 0 else 0
    for chunk in range(begin, newest // KV_CHUNK + 1):
        base = chunk * KV_CHUNK
        cold = False
        if shape.block_size < LANES:
            _copy_chunk(pages, block_tables, shape, place, base, newest, pieces)
        else:
            _locate(block_tables[place.table], place.kv_head, shape, base, newest, pieces.keys, pieces.values)
            cold = _locate_coming(block_tables, shape, place, following, base + KV_CHUNK, newest, pieces)
        _take_in(shape, softmax, place.count * shape.group, base, cold, running, pieces)


@njit(inline="always")
def _locate_coming(
    block_tables: Any, shape: Any, place: Any, following: Any, base: int, newest: int, pieces: Any
) -> Any:
    """Locate the chunk that comes next, the one at ``base`` or the next item's first; return whether to ask for it.

    Blocks that were read shortly before are cached: those of the sequence before, or of this one, if both have them.
    """
    if base <= newest:
        table, head, last, at, reference = place.table, place.kv_head, newest, base, following.last_table
    else:
        table, head, last, at = following.table, following.kv_head, following.newest, 0
        reference = following.last_table if following.table == place.table else place.table
    _locate(block_tables[table], head, shape, at, last, pieces.coming_keys, pieces.coming_values)
    block = at // shape.block_size
    return reference < 0 or block_tables[table, block] != block_tables[reference, block]


@njit(inline="always")
def _take_in(shape: Any, softmax: Any, rows: int, base: int, cold: bool, running: Any, pieces: Any) -> None:
    """Take the chunk at ``base`` into the softmax of all rows; if ``cold``, ask for the coming one meanwhile."""
    head_dim, window = shape.head_dim, softmax.window
    query, acc, sums, peaks, tokens, s = running
    source, stride, keys, values, coming_keys, coming_values = pieces
    r = 0
    while r < rows:
        many = 4 if r + 4 <= rows else (2 if r + 2 <= rows else 1)
        lo, _ = _seen(tokens[r], base, window)
        _, hi = _seen(tokens[r + many - 1], base, window)
        if lo < hi:
            fetch = r == 0 and cold  # the first rows ask for what the next chunk will need
            score_chunk(
                many, (hi + LANES - 1) // LANES, fetch, Rows(query, r * head_dim, head_dim), source,
                keys, coming_keys, stride, Rows(s, 0, KV_CHUNK),
            )  # fmt: skip
            for i in range(many):
                lo, hi = _seen(tokens[r + i], base, window)
                if lo < hi:
                    peaks[r + i] = _absorb(
                        s, i * KV_CHUNK, lo, hi, softmax, peaks[r + i], sums, r + i, acc, head_dim
                    )  # fmt: skip
            _add_values(s, r, many, fetch, source, values, coming_values, head_dim, base, tokens, window, acc)
        r += many


@njit(inline="always")
def _write_rows(shape: Any, place: Any, running: Any, out: Any, lse: Any) -> None:
    """Divide the sums of weighted values by the sums of weights."""
    group, head_dim, sums, acc = shape.group, shape.head_dim, running.sums, running.acc
    for r in range(place.count * group):
        total = _ZERO
        for lane in range(LANES):
            total = total + sums[r * LANES + lane]
        token = place.row + r // group
        head = place.kv_head * group + r % group
        for d in range(head_dim):
            out[token, head, d] = narrow(acc[r * head_dim + d] / total, out[token, head, d])
        if len(lse) > 0:
            lse[token, head] = running.peaks[r] + np.float32(np.log(np.float64(total)))


@njit(inline="always")
def _seen(token: int, base: int, window: int) -> Any:
    """Return the keys lo <= j < hi of the chunk at ``base`` that a token at this absolute position sees."""
    lo = max(0, token - window + 1 - base) if window > 0 else 0
    return lo, min(KV_CHUNK, token + 1 - base)


@njit(inline="always")
def _locate(blocks: Any, kv_head: int, shape: Any, base: int, newest: int, keys: Any, values: Any) -> None:
    """Find where the keys and values of each sixteen tokens from ``base`` on begin.

    Beyond the newest token they are those of the newest: nobody reads them, they are only fetched.
    """
    block_size, head_dim = shape.block_size, shape.head_dim
    half = head_dim * block_size
    for c in range(_VECTORS):
        token = min(base + c * LANES, newest // LANES * LANES)
        inside = token % block_size
        page = (np.int64(blocks[token // block_size]) * shape.kv_heads + kv_head) * 2 * half
        keys[c] = page + inside
        values[c] = page + half + inside * head_dim


@njit(inline="always")
def _copy_chunk(pages: Any, block_tables: Any, shape: Any, place: Any, base: int, newest: int, pieces: Any) -> None:
    """Copy a chunk from pages smaller than a vector, as keys ``[D, C]`` and values ``[C, D]``."""
    block_size, head_dim, copied = shape.block_size, shape.head_dim, pieces.source
    half = head_dim * block_size
    for j in range(min(KV_CHUNK, newest + 1 - base)):
        inside = (base + j) % block_size
        block = np.int64(block_tables[place.table, (base + j) // block_size])
        page = (block * shape.kv_heads + place.kv_head) * 2 * half
        for d in range(head_dim):
            copied[d * KV_CHUNK + j] = pages[page + d * block_size + inside]
            copied[(KV_CHUNK + j) * head_dim + d] = pages[page + half + inside * head_dim + d]
    for c in range(_VECTORS):
        pieces.keys[c] = c * LANES
        pieces.values[c] = (KV_CHUNK + c * LANES) * head_dim


@njit(inline="always")
def _absorb(
    s: Any, at: int, lo: int, hi: int, softmax: Any, old: Any, sums: Any, row: int, acc: Any, head_dim: int
) -> Any:
    """Turn a row's scores ``s[at + lo : at + hi]`` into weights against its maximum so far, ``old``; return the new
    maximum.

    The rest of the chunk gets weight 0; the row's partial sums and accumulator are rescaled.
    """
    for j in range(KV_CHUNK):
        s[at + j] = s[at + j] * softmax.scale
    if softmax.softcap > _ZERO:
        for j in range(KV_CHUNK):
            s[at + j] = softmax.softcap * tanh(s[at + j] / softmax.softcap)
    _fill_unseen(s, at, lo, hi, _LOWEST)
    best = greatest(s, at)
    peak = best if best > old else old
    for j in range(KV_CHUNK):
        s[at + j] = exp(s[at + j] - peak)
    _fill_unseen(s, at, lo, hi, _ZERO)
    if peak != old:
        shrink = exp(old - peak) if old > _LOWEST else _ZERO
        _rescale(sums, row, acc, head_dim, shrink)
    for lane in range(LANES):
        total = sums[row * LANES + lane]
        for j in range(0, KV_CHUNK, LANES):
            total = total + s[at + j + lane]
        sums[row * LANES + lane] = total
    return peak


@njit(inline="always")
def _fill_unseen(s: Any, at: int, lo: int, hi: int, value: Any) -> None:
    """Set what a row does not see of a chunk."""
    for j in range(lo):
        s[at + j] = value
    for j in range(hi, KV_CHUNK):
        s[at + j] = value


@njit(inline="always")
def _rescale(sums: Any, row: int, acc: Any, head_dim: int, factor: Any) -> None:
    """Multiply the partial sums and the accumulator of a row."""
    for lane in range(LANES):
        sums[row * LANES + lane] = sums[row * LANES + lane] * factor
    for d in range(head_dim):
        acc[row * head_dim + d] = acc[row * head_dim + d] * factor


@njit(inline="always")
def _add_values(
    s: Any, r: int, many: int, fetch: bool, source: Any, values: Any, coming: Any, head_dim: int, base: int,
    tokens: Any, window: int, acc: Any,
) -> None:  # fmt: skip
    """Add ``s[i] . values`` to ``acc[r + i]``: keys that all rows see together, those before and after row by row.

    A key that a row does not see is left out, never multiplied by 0: its page may hold anything.
    """
    lo, _ = _seen(tokens[r + many - 1], base, window)
    _, hi = _seen(tokens[r], base, window)
    hi = max(lo, hi)
    if window > 0:
        for i in range(many):
            first, last = _seen(tokens[r + i], base, window)
            _values_of(s, i, r, 1, False, source, values, coming, head_dim, first, min(lo, last), acc)
    _values_of(s, 0, r, many, fetch, source, values, coming, head_dim, lo, hi, acc)
    for i in range(many):
        _, last = _seen(tokens[r + i], base, window)
        if last > hi:
            _values_of(s, i, r, 1, False, source, values, coming, head_dim, hi, last, acc)


@njit(nogil=True, error_model="numpy")
def _values_of(
    s: Any, i: int, r: int, many: int, fetch: bool, source: Any, values: Any, coming: Any, head_dim: int, lo: int,
    hi: int, acc: Any,
) -> None:  # fmt: skip
    """Add to ``acc[r + i]`` the sum over lo <= j < hi of ``s[i, j] * value[j]``, ascending, for ``many`` rows."""
    d = 0
    while d + LANES <= head_dim:
        columns = 4 if d + 4 * LANES <= head_dim else (2 if d + 2 * LANES <= head_dim else 1)
        add_values(
            many, columns, fetch, Rows(s, i * KV_CHUNK, KV_CHUNK), lo, hi, source, values, coming, d,
            Rows(acc, (r + i) * head_dim + d, head_dim),
        )  # fmt: skip
        d += columns * LANES
    while d < head_dim:
        for row in range(i, i + many):
            total = acc[(r + row) * head_dim + d]
            for j in range(lo, hi):
                value = source[values[j // LANES] + j % LANES * head_dim + d]
                total = fma(s[row * KV_CHUNK + j], widen(value), total)
            acc[(r + row) * head_dim + d] = total
        d += 1
