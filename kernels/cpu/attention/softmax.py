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
from samebit.kernels.cpu.attention.vectors import add_values, scale_scores, score_chunk, weigh_scores
from samebit.kernels.cpu.base.memory import floats, longs
from samebit.kernels.cpu.base.numeric import exp, fma, narrow, tanh, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.rows import Rows
from samebit.kernels.layout.grids import KV_CHUNK, LANES

ARRAYS = 6
"""Count of arrays that `place_running` places, each from the start of a cache line on."""

_VECTORS = KV_CHUNK // LANES
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOWEST = np.float32(-np.inf)


@inlined_part
def size_of_running(rows: int, head_dim: int, value_dim: int) -> int:
    """Return how many float32 `place_running` needs."""
    return rows * (head_dim + value_dim + LANES + 3) + 4 * KV_CHUNK + ARRAYS * LANES


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
    scores = floats(s, 4 * KV_CHUNK)
    scores[:] = _ZERO
    running = Running(
        floats(query, rows * head_dim), floats(acc, rows * value_dim), floats(sums, rows * LANES), floats(peaks, rows),
        longs(tokens, rows), scores,
    )  # fmt: skip
    return running, behind(s, 4 * KV_CHUNK)


@inlined_part
def rows_from(running: Any, first: int, shape: Any) -> Any:
    """Return the softmax of the rows from the ``first`` on."""
    query, acc, sums, peaks, tokens, s = running
    return Running(
        query[first * shape.head_dim :], acc[first * shape.value_dim :], sums[first * LANES :], peaks[first:],
        tokens[first:], s,
    )  # fmt: skip


@inlined_part
def begin_rows(q: Any, sinks: Any, shape: Any, place: Any, running: Any) -> None:
    """Load the queries of an item, and begin its softmax with nothing, or with the sinks, whose values are 0."""
    group, head_dim, query = shape.group, shape.head_dim, running.query
    rows = place.count * group
    for r in range(rows):
        running.tokens[r] = place.position + r // group
        running.peaks[r] = _LOWEST
        for d in range(head_dim):
            query[r * head_dim + d] = widen(q[place.row + r // group, place.kv_head * group + r % group, d])
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
    query, acc, sums, peaks, tokens, s = running
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
            for i in range(many):
                lo, hi = _seen(tokens[r + i], base, window)
                if lo < hi:
                    peaks[r + i] = _absorb(
                        s, i * KV_CHUNK, lo, hi, softmax, peaks[r + i], sums, r + i, acc, value_dim
                    )  # fmt: skip
            _add_values(
                s, r, many, fetch, source, values, coming_values[first:], value_dim, base, tokens, window, acc
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
def _absorb(
    s: Any, at: int, lo: int, hi: int, softmax: Any, old: Any, sums: Any, row: int, acc: Any, value_dim: int
) -> Any:
    """Turn a row's scores ``s[at + lo : at + hi]`` into weights against its maximum so far, ``old``; return the new
    maximum.

    The rest of the chunk gets weight 0; the row's partial sums and accumulator are rescaled.
    """
    scale = softmax.scale
    if softmax.softcap > _ZERO:
        for j in range(KV_CHUNK):
            s[at + j] = softmax.softcap * tanh(s[at + j] * scale / softmax.softcap)
        scale = _ONE
    best = scale_scores(s, at, scale, lo, hi)
    peak = best if best > old else old
    if peak != old:
        shrink = exp(old - peak) if old > _LOWEST else _ZERO
        _rescale(sums, row, acc, value_dim, shrink)
    weigh_scores(s, at, peak, lo, hi, sums, row * LANES)
    return peak


@inlined_part
def _rescale(sums: Any, row: int, acc: Any, value_dim: int, factor: Any) -> None:
    """Multiply the partial sums and the accumulator of a row."""
    for lane in range(LANES):
        sums[row * LANES + lane] = sums[row * LANES + lane] * factor
    for d in range(value_dim):
        acc[row * value_dim + d] = acc[row * value_dim + d] * factor


@inlined_part
def _add_values(
    s: Any, r: int, many: int, fetch: bool, source: Any, values: Any, coming: Any, value_dim: int, base: int,
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
            _values_of(s, i, r, 1, False, source, values, coming, value_dim, first, min(lo, last), acc)
    _values_of(s, 0, r, many, fetch, source, values, coming, value_dim, lo, hi, acc)
    for i in range(many):
        _, last = _seen(tokens[r + i], base, window)
        if last > hi:
            _values_of(s, i, r, 1, False, source, values, coming, value_dim, hi, last, acc)


@kernel_part
def _values_of(
    s: Any, i: int, r: int, many: int, fetch: bool, source: Any, values: Any, coming: Any, value_dim: int, lo: int,
    hi: int, acc: Any,
) -> None:  # fmt: skip
    """Add to ``acc[r + i]`` the sum over lo <= j < hi of ``s[i, j] * value[j]``, ascending, for ``many`` rows."""
    d = 0
    while d + LANES <= value_dim:
        columns = 4 if d + 4 * LANES <= value_dim else (2 if d + 2 * LANES <= value_dim else 1)
        add_values(
            many, columns, fetch, Rows(s, i * KV_CHUNK, KV_CHUNK), lo, hi, source, values, coming, d,
            Rows(acc, (r + i) * value_dim + d, value_dim),
        )  # fmt: skip
        d += columns * LANES
    while d < value_dim:
        for row in range(i, i + many):
            total = acc[(r + row) * value_dim + d]
            for j in range(lo, hi):
                value = source[values[j // LANES] + j % LANES * value_dim + d]
                total = fma(s[row * KV_CHUNK + j], widen(value), total)
            acc[(r + row) * value_dim + d] = total
        d += 1
