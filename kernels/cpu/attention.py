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
"""

from typing import Any

import numpy as np
from numba import njit, prange

from .jit import parallel_kernel
from .memory import scratch
from .numeric import LANES, exp, fma, narrow, tanh, widen
from .simd_attention import add_values, greatest, score_chunk

KV_CHUNK = 64
"""Tokens a softmax accumulator takes in at once. A constant of the arithmetic: changing it changes bits."""

_VECTORS = KV_CHUNK // LANES

QUERY_TILE = 64
"""Query tokens one work item covers; only a matter of speed."""

_ZERO = np.float32(0.0)
_LOWEST = np.float32(-np.inf)


def _attend(
    q: Any, pages: Any, table_rows: Any, block_tables: Any, row_start: Any, lengths: Any, starts: Any, tiles: Any,
    kv_heads: int, block_size: int, scale: Any, window: int, softcap: Any, out: Any, lse: Any, keep_lse: bool,
    threads: int,
) -> None:  # fmt: skip
    head_dim = q.shape[2]
    group = q.shape[1] // kv_heads
    items = tiles.shape[0] * kv_heads
    longest = 0
    for sequence in range(len(lengths)):
        longest = max(longest, min(QUERY_TILE, lengths[sequence]))
    rows = longest * group
    for thread in prange(threads):  # a thread takes every threads-th item: even loads
        query, acc, sums = scratch(rows * head_dim), scratch(rows * head_dim), scratch(rows * LANES)
        peaks, tokens = np.empty(rows, np.float32), np.empty(rows, np.int64)
        s = scratch(4 * KV_CHUNK)
        s[:] = _ZERO
        places = np.zeros(4 * _VECTORS, np.int64)
        keys, values, coming_keys, coming_values = (
            places[:_VECTORS],
            places[_VECTORS : 2 * _VECTORS],
            places[2 * _VECTORS : 3 * _VECTORS],
            places[3 * _VECTORS :],
        )
        copied = np.empty(2 * head_dim * KV_CHUNK if block_size < LANES else 0, pages.dtype)
        for item in range(thread, items, threads):
            tile, after = item // kv_heads, min(item + threads, items - 1)  # this, and what the thread does next
            sequence, first = tiles[tile, 0], tiles[tile, 1]
            coming = tiles[after // kv_heads, 0]
            last_table = -1
            if tile > 0:
                last_table = table_rows[tiles[tile - 1, 0]]
            _attend_tile(
                q, pages, block_tables, table_rows[sequence], row_start[sequence] + first, starts[sequence] + first,
                last_table, table_rows[coming], after % kv_heads, starts[coming],
                min(QUERY_TILE, lengths[sequence] - first), item % kv_heads, kv_heads, group, head_dim,
                block_size, scale, window, softcap, out, lse, keep_lse,
                query, acc, sums, peaks, tokens, s, keys, values, coming_keys, coming_values, copied,
            )  # fmt: skip


attend = parallel_kernel(_attend)


@njit(nogil=True, error_model="numpy")
def _attend_tile(
    q: Any, pages: Any, block_tables: Any, table: int, row: int, position: int, last_table: int, next_table: int,
    next_head: int, next_newest: int, count: int, kv_head: int,
    kv_heads: int, group: int, head_dim: int, block_size: int, scale: Any, window: int, softcap: Any, out: Any,
    lse: Any, keep_lse: bool, query: Any, acc: Any, sums: Any, peaks: Any, tokens: Any, s: Any, keys: Any, values: Any,
    coming_keys: Any, coming_values: Any, copied: Any,
) -> None:  # fmt: skip
    """Attention of ``count`` tokens from ``row`` on, for the query heads of one KV head.

    Blocks that the sequence before has too (``last_table``, -1 for none) are cached: they are not fetched.
    """
    rows = count * group
    for r in range(rows):
        tokens[r] = position + r // group
        peaks[r] = _LOWEST
        for d in range(head_dim):
            query[r * head_dim + d] = widen(q[row + r // group, kv_head * group + r % group, d])
    acc[: rows * head_dim] = _ZERO
    sums[: rows * LANES] = _ZERO
    small = block_size < LANES
    source, key_stride = (copied, KV_CHUNK) if small else (pages, block_size)
    newest = position + count - 1
    begin = max(0, position - window + 1) // KV_CHUNK if window > 0 else 0
    for chunk in range(begin, newest // KV_CHUNK + 1):
        base = chunk * KV_CHUNK
        cold = False
        if small:
            _copy_chunk(
                pages, block_tables, table, kv_head, kv_heads, head_dim, block_size, base, newest, copied, keys, values
            )
        else:
            _locate(block_tables, table, kv_head, kv_heads, head_dim, block_size, base, newest, keys, values)
            if base + KV_CHUNK <= newest:
                after, head, last, at, reference = table, kv_head, newest, base + KV_CHUNK, last_table
            else:
                after, head, last, at = next_table, next_head, next_newest, 0
                reference = last_table if next_table == table else table
            _locate(block_tables, after, head, kv_heads, head_dim, block_size, at, last, coming_keys, coming_values)
            block = at // block_size
            cold = reference < 0 or block_tables[after, block] != block_tables[reference, block]
        r = 0
        while r < rows:
            many = 4 if r + 4 <= rows else (2 if r + 2 <= rows else 1)
            lo, _ = _seen(tokens[r], base, window)
            _, hi = _seen(tokens[r + many - 1], base, window)
            if lo < hi:
                fetch = r == 0 and cold  # the first rows ask for what the next chunk will need
                score_chunk(
                    many, (hi + LANES - 1) // LANES, fetch, query, r * head_dim, head_dim, source, keys, coming_keys,
                    key_stride, s, KV_CHUNK,
                )  # fmt: skip
                for i in range(many):
                    lo, hi = _seen(tokens[r + i], base, window)
                    if lo < hi:
                        peaks[r + i] = _absorb(
                            s, i * KV_CHUNK, lo, hi, scale, softcap, peaks[r + i], sums, r + i, acc, head_dim
                        )
                _add_values(s, r, many, fetch, source, values, coming_values, head_dim, base, tokens, window, acc)
            r += many
    for r in range(rows):
        total = _ZERO
        for lane in range(LANES):
            total = total + sums[r * LANES + lane]
        token = row + r // group
        head = kv_head * group + r % group
        for d in range(head_dim):
            out[token, head, d] = narrow(acc[r * head_dim + d] / total, out[token, head, d])
        if keep_lse:
            lse[token, head] = peaks[r] + np.float32(np.log(np.float64(total)))


@njit(inline="always")
def _seen(token: int, base: int, window: int) -> Any:
    """The keys lo <= j < hi of the chunk at ``base`` that a token at this absolute position sees."""
    lo = max(0, token - window + 1 - base) if window > 0 else 0
    return lo, min(KV_CHUNK, token + 1 - base)


@njit(inline="always")
def _locate(
    block_tables: Any, table: int, kv_head: int, kv_heads: int, head_dim: int, block_size: int, base: int,
    newest: int, keys: Any, values: Any,
) -> None:  # fmt: skip
    """Offsets of the keys and values of each sixteen tokens from ``base`` on.

    Beyond the newest token they are those of the newest: nobody reads them, they are only fetched.
    """
    half = head_dim * block_size
    for c in range(_VECTORS):
        token = min(base + c * LANES, newest // LANES * LANES)
        inside = token % block_size
        page = (np.int64(block_tables[table, token // block_size]) * kv_heads + kv_head) * 2 * half
        keys[c] = page + inside
        values[c] = page + half + inside * head_dim


@njit(inline="always")
def _copy_chunk(
    pages: Any, block_tables: Any, table: int, kv_head: int, kv_heads: int, head_dim: int, block_size: int, base: int,
    newest: int, out: Any, keys: Any, values: Any,
) -> None:  # fmt: skip
    """A chunk from pages smaller than a vector, as keys [D, chunk] and values [chunk, D] in ``out``."""
    half = head_dim * block_size
    for j in range(min(KV_CHUNK, newest + 1 - base)):
        inside = (base + j) % block_size
        page = (np.int64(block_tables[table, (base + j) // block_size]) * kv_heads + kv_head) * 2 * half
        for d in range(head_dim):
            out[d * KV_CHUNK + j] = pages[page + d * block_size + inside]
            out[(KV_CHUNK + j) * head_dim + d] = pages[page + half + inside * head_dim + d]
    for c in range(_VECTORS):
        keys[c] = c * LANES
        values[c] = (KV_CHUNK + c * LANES) * head_dim


@njit(inline="always")
def _absorb(
    s: Any, at: int, lo: int, hi: int, scale: Any, softcap: Any, old: Any, sums: Any, row: int, acc: Any, head_dim: int
) -> Any:
    """Turn the scores s[at + lo : at + hi] of a row into weights against its maximum so far, ``old``; the new maximum.

    The rest of the chunk gets weight 0; the row's partial sums and accumulator are rescaled.
    """
    for j in range(KV_CHUNK):
        s[at + j] = s[at + j] * scale
    if softcap > _ZERO:
        for j in range(KV_CHUNK):
            s[at + j] = softcap * tanh(s[at + j] / softcap)
    for j in range(lo):
        s[at + j] = _LOWEST
    for j in range(hi, KV_CHUNK):
        s[at + j] = _LOWEST
    best = greatest(s, at)
    peak = best if best > old else old
    for j in range(KV_CHUNK):
        s[at + j] = exp(s[at + j] - peak)
    for j in range(lo):
        s[at + j] = _ZERO
    for j in range(hi, KV_CHUNK):
        s[at + j] = _ZERO
    if peak != old:
        shrink = exp(old - peak) if old > _LOWEST else _ZERO
        for lane in range(LANES):
            sums[row * LANES + lane] = sums[row * LANES + lane] * shrink
        for d in range(head_dim):
            acc[row * head_dim + d] = acc[row * head_dim + d] * shrink
    for lane in range(LANES):
        total = sums[row * LANES + lane]
        for j in range(0, KV_CHUNK, LANES):
            total = total + s[at + j + lane]
        sums[row * LANES + lane] = total
    return peak


@njit(inline="always")
def _add_values(
    s: Any, r: int, many: int, fetch: bool, source: Any, values: Any, coming: Any, head_dim: int, base: int,
    tokens: Any, window: int, acc: Any,
) -> None:  # fmt: skip
    """acc[r + i] += s[i] . values: the keys that all rows see together, those before and after row by row.

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
    """acc[r + i] += sum over lo <= j < hi of s[i, j] * value[j], ascending; also for the rows i + 1 to i + many - 1."""
    d = 0
    while d + LANES <= head_dim:
        columns = 4 if d + 4 * LANES <= head_dim else (2 if d + 2 * LANES <= head_dim else 1)
        add_values(
            many, columns, fetch, s, i * KV_CHUNK, KV_CHUNK, lo, hi, source, values, coming, d, head_dim,
            acc, (r + i) * head_dim + d,
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
