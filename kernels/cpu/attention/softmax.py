"""Take chunks of tokens into the online softmax of rows, for attention over keys and values on the CPU.

Invariants:

* A row takes in each chunk by the same operations in the same order, whatever rows are beside it: one, two or four are
  computed at a time.
* A key that a row does not see is left out, never multiplied by 0: its page may hold anything.

Online softmax: Milakov & Gimelshein 2018; tiling: Dao et al. 2022. H heads, G query heads a KV head, D head size of
queries and keys, E that of values, C tokens a chunk.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.attention.groups import Running
from samebit.kernels.cpu.attention.softmax_vectors import absorb
from samebit.kernels.cpu.attention.vectors import add_values, copy_vectors, score_chunk
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, longs
from samebit.kernels.cpu.base.numeric import fma, narrow, tanh, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.rows import Rows
from samebit.kernels.cpu.gemm.many_rows_vectors import fetch
from samebit.kernels.layout.grids import CACHE_LINE, KV_CHUNK, LANES

ARRAYS = 7
"""Count of arrays that `place_running` places, each from the start of a cache line on."""

_AHEAD = 8
"""Each row of queries asks for the one that so many further on."""

_VECTORS = KV_CHUNK // LANES
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_BOUNDS = 8
"""Numbers of `Running.bounds`."""

_LOWEST = np.float32(-np.inf)


@inlined_part
def size_of_running(rows: int, head_dim: int, value_dim: int) -> int:
    """Return how many float32 `place_running` needs."""
    return rows * (head_dim + value_dim + LANES + 3) + 4 * KV_CHUNK + 2 * _BOUNDS + ARRAYS * LANES


@inlined_part
def behind(address: int, count: int) -> int:
    """Return the address of the first cache line behind ``count`` float32."""
    return address + (count + LANES - 1) // LANES * LANES * 4


@inlined_part
def place_running(query: int, rows: int, head_dim: int, value_dim: int) -> Any:
    """Place the online softmax of up to ``rows`` rows from an address on; return the address behind it too."""
    acc = behind(query, rows * head_dim)
    sums = behind(acc, rows * value_dim)
    peaks = behind(sums, rows * LANES)
    tokens = behind(peaks, rows)
    s = behind(tokens, 2 * rows)
    bounds = behind(s, 4 * KV_CHUNK)
    scores = floats(s, 4 * KV_CHUNK)
    scores[:] = _ZERO
    running = Running(
        floats(query, rows * head_dim), floats(acc, rows * value_dim), floats(sums, rows * LANES), floats(peaks, rows),
        longs(tokens, rows), scores, longs(bounds, _BOUNDS),
    )  # fmt: skip
    return running, behind(bounds, 2 * _BOUNDS)


@inlined_part
def rows_from(running: Any, first: int, shape: Any) -> Any:
    """Return the softmax of the rows from the ``first`` on."""
    query, acc, sums, peaks, tokens, s, bounds = running
    return Running(
        query[first * shape.head_dim :], acc[first * shape.value_dim :], sums[first * LANES :], peaks[first:],
        tokens[first:], s, bounds,
    )  # fmt: skip


@inlined_part
def begin_rows(q: Any, sinks: Any, shape: Any, place: Any, running: Any) -> None:
    """Load the queries of an item, and begin its softmax with nothing, or with the sinks, whose values are 0."""
    group, head_dim, query = shape.group, shape.head_dim, running.query
    rows, heads = place.count * group, shape.kv_heads * group
    flat = elements(q.ctypes.data, NO_END, q.dtype.type(0))
    for r in range(rows):
        running.tokens[r] = place.position + r // group
        running.peaks[r] = _LOWEST
        at = ((place.row + r // group) * heads + place.kv_head * group + r % group) * head_dim
        if r + _AHEAD < rows:  # rows lie apart in memory
            for d in range(0, head_dim, CACHE_LINE // q.itemsize):
                fetch(flat, at + _AHEAD // group * heads * head_dim + d)
        copy_vectors(flat, at, query, r * head_dim, head_dim)
        for d in range(head_dim // LANES * LANES, head_dim):
            query[r * head_dim + d] = widen(flat[at + d])
    running.acc[: rows * shape.value_dim] = _ZERO
    running.sums[: rows * LANES] = _ZERO
    if len(sinks) > 0:
        for r in range(rows):
            running.peaks[r] = sinks[place.kv_head * group + r % group]
            running.sums[r * LANES] = _ONE


@inlined_part
def take_in(shape: Any, softmax: Any, rows: int, base: int, asked: Any, running: Any, pieces: Any) -> None:
    """Take the chunk at ``base`` into the softmax of all rows.

    asked: whether the first four rows ask for the coming chunk meanwhile, and the numbers, from the first to before the
    last, of those behind it that the next fours ask for, one each.
    """
    head_dim, value_dim, window = shape.head_dim, shape.value_dim, softmax.window
    query, acc, sums, peaks, tokens, s, bounds = running
    source, stride, keys, values, coming_keys, coming_values = pieces
    cold, behind, last = asked
    r = 0
    while r < rows:
        many = 4 if r + 4 <= rows else (2 if r + 2 <= rows else 1)
        lo, _ = _seen(tokens[r], base, window)
        _, hi = _seen(tokens[r + many - 1], base, window)
        if lo < hi:
            first, fetch = 0, cold  # the first rows ask for what the next chunk will need
            if r > 0:
                fetch = behind < last
                behind += fetch
                first = behind * _VECTORS
            score_chunk(
                many, (hi + LANES - 1) // LANES, fetch, Rows(query, r * head_dim, head_dim), source,
                keys, coming_keys[first:], stride, Rows(s, 0, KV_CHUNK),
            )  # fmt: skip
            whole = True
            for i in range(many):
                lo, end = _seen(tokens[r + i], base, window)
                bounds[i], bounds[4 + i] = lo - 1, end - 1
                whole = whole and lo == 0 and end == KV_CHUNK
            scale = softmax.scale
            if softmax.softcap > _ZERO:
                _cap_scores(s, many, softmax)
                scale = _ONE
            absorb(many, whole, (hi + LANES - 1) // LANES, s, scale, bounds, peaks, sums, acc, r, value_dim)
            _add_values(
                s.ctypes.data, many, whole, fetch, source.ctypes.data, source.dtype.type(0), values.ctypes.data,
                coming_values.ctypes.data + 8 * first, value_dim, bounds, acc.ctypes.data + 4 * r * value_dim,
            )  # fmt: skip
        r += many


@inlined_part
def write_rows(shape: Any, place: Any, running: Any, out: Any, lse: Any) -> None:
    """Divide the sums of weighted values by the sums of weights."""
    group, value_dim, sums, acc = shape.group, shape.value_dim, running.sums, running.acc
    for r in range(place.count * group):
        total = _ZERO
        for lane in range(LANES):
            total = total + sums[r * LANES + lane]
        token = place.row + r // group
        head = place.kv_head * group + r % group
        for d in range(value_dim):
            out[token, head, d] = narrow(acc[r * value_dim + d] / total, out[token, head, d])
        if len(lse) > 0:
            lse[token, head] = running.peaks[r] + np.float32(np.log(np.float64(total)))


@inlined_part
def _seen(token: int, base: int, window: int) -> Any:
    """Return the keys lo <= j < hi of the chunk at ``base`` that a token at this absolute position sees."""
    lo = max(0, token - window + 1 - base) if window > 0 else 0
    return lo, min(KV_CHUNK, token + 1 - base)


@inlined_part
def _cap_scores(s: Any, rows: int, softmax: Any) -> None:
    """Scale and cap the scores of some rows."""
    for j in range(rows * KV_CHUNK):
        s[j] = softmax.softcap * tanh(s[j] * softmax.scale / softmax.softcap)


@inlined_part
def _add_values(
    s: int, many: int, whole: bool, fetch: bool, source: int, kind: Any, values: int, coming: int, value_dim: int,
    bounds: Any, acc: int,
) -> None:  # fmt: skip
    """Add ``s[i] . values`` to ``acc[i]``: keys that all rows see together, those before and after for fewer rows.

    A key that a row does not see is left out, never multiplied by 0: its page may hold anything.
    """
    if whole:
        _values_of(s, many, fetch, source, kind, values, coming, value_dim, 0, KV_CHUNK, acc)
        return
    lo, hi = bounds[many - 1] + 1, bounds[4] + 1
    hi = max(lo, hi)
    for i in range(many):
        first, last = bounds[i] + 1, min(lo, bounds[4 + i] + 1)
        if first < last:
            _values_of_row(s, i, source, kind, values, coming, value_dim, first, last, acc)
    if lo < hi:
        _values_of(s, many, fetch, source, kind, values, coming, value_dim, lo, hi, acc)
    for i in range(many):
        last = bounds[4 + i] + 1
        if last > hi:
            _values_of_row(s, i, source, kind, values, coming, value_dim, hi, last, acc)


@inlined_part
def _values_of_row(
    s: int, i: int, source: int, kind: Any, values: int, coming: int, value_dim: int, lo: int, hi: int, acc: int
) -> None:
    """Do as `_values_of` for row i of those at hand."""
    _values_of(
        s + 4 * i * KV_CHUNK, 1, False, source, kind, values, coming, value_dim, lo, hi, acc + 4 * i * value_dim
    )  # fmt: skip


@kernel_part
def _values_of(
    s: int, many: int, fetch: bool, source: int, kind: Any, values: int, coming: int, value_dim: int, lo: int, hi: int,
    acc: int,
) -> None:  # fmt: skip
    """Add to ``acc[i]`` the sum over lo <= j < hi of ``s[i, j] * value[j]``, ascending, for ``many`` rows.

    Arrays are addresses, which cost less to hand over; ``kind`` is a number of the elements' type.
    """
    weights, sums, pages = floats(s, NO_END), floats(acc, NO_END), elements(source, NO_END, kind)
    places, next_places = longs(values, KV_CHUNK // LANES), longs(coming, KV_CHUNK // LANES)
    d = 0
    while d + LANES <= value_dim:
        columns = 4 if d + 4 * LANES <= value_dim else (2 if d + 2 * LANES <= value_dim else 1)
        add_values(
            many, columns, fetch, Rows(weights, 0, KV_CHUNK), lo, hi, pages, places, next_places, d,
            Rows(sums, d, value_dim),
        )  # fmt: skip
        d += columns * LANES
    while d < value_dim:
        for row in range(many):
            total = sums[row * value_dim + d]
            for j in range(lo, hi):
                value = pages[places[j // LANES] + j % LANES * value_dim + d]
                total = fma(weights[row * KV_CHUNK + j], widen(value), total)
            sums[row * value_dim + d] = total
        d += 1
