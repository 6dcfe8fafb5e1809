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

from .jit import RowKernel
from .numeric import LANES, exp, fma, narrow, tanh, widen
from .simd import (
    accumulate_1,
    accumulate_1_fetching,
    accumulate_2,
    accumulate_2_fetching,
    accumulate_4,
    accumulate_4_fetching,
    scores_1,
    scores_1_fetching,
    scores_2,
    scores_2_fetching,
    scores_4,
    scores_4_fetching,
)

KV_CHUNK = 64
"""Tokens a softmax accumulator takes in at once. A constant of the arithmetic: changing it changes bits."""

QUERY_TILE = 64
"""Query tokens one work item covers; only a matter of speed."""

_ZERO = np.float32(0.0)
_LOWEST = np.float32(-np.inf)


def _attend(
    q: Any, pages: Any, table_rows: Any, block_tables: Any, row_start: Any, lengths: Any, starts: Any, tiles: Any, kv_heads: int,
    block_size: int, scale: Any, window: int, softcap: Any, out: Any, lse: Any, keep_lse: bool, threads: int,
) -> None:  # fmt: skip
    head_dim = q.shape[2]
    group = q.shape[1] // kv_heads
    items = tiles.shape[0] * kv_heads
    share = (items + threads - 1) // threads
    for slot in prange(share * threads):
        item = (slot % share) * threads + slot // share  # a thread takes every threads-th item: even loads
        if item < items:
            sequence = tiles[item // kv_heads, 0]
            first = tiles[item // kv_heads, 1]
            _attend_tile(
                q, pages, block_tables, table_rows[sequence], row_start[sequence] + first, starts[sequence] + first,
                min(QUERY_TILE, lengths[sequence] - first), item % kv_heads, kv_heads, group, head_dim,
                block_size, scale, window, softcap, out, lse, keep_lse,
            )  # fmt: skip


attend = RowKernel(_attend)


@njit(nogil=True, error_model="numpy")
def _attend_tile(
    q: Any, pages: Any, block_tables: Any, table: int, row: int, position: int, count: int, kv_head: int,
    kv_heads: int, group: int, head_dim: int, block_size: int, scale: Any, window: int, softcap: Any, out: Any,
    lse: Any, keep_lse: bool,
) -> None:  # fmt: skip
    """Attention of ``count`` tokens from ``row`` on, for the query heads of one KV head."""
    rows = count * group
    query = np.empty(rows * head_dim, np.float32)
    acc = np.zeros(rows * head_dim, np.float32)
    sums = np.zeros(rows * LANES, np.float32)
    peaks = np.full(rows, _LOWEST, np.float32)
    s = np.zeros(4 * KV_CHUNK, np.float32)
    lanes = np.empty(LANES, np.float32)
    small = np.empty(head_dim * LANES, pages.dtype)
    for r in range(rows):
        for d in range(head_dim):
            query[r * head_dim + d] = widen(q[row + r // group, kv_head * group + r % group, d])
    newest = position + count - 1
    begin = max(0, position - window + 1) // KV_CHUNK if window > 0 else 0
    for chunk in range(begin, newest // KV_CHUNK + 1):
        base = chunk * KV_CHUNK
        r = 0
        while r < rows:
            many = 4 if r + 4 <= rows else (2 if r + 2 <= rows else 1)
            lo, _ = _seen(position + r // group, base, window)
            _, hi = _seen(position + (r + many - 1) // group, base, window)
            if lo < hi:
                _score(query, r, many, pages, block_tables, table, kv_head, kv_heads, head_dim, block_size, base, lo, hi, newest, s, small)  # fmt: skip
                for i in range(many):
                    lo, hi = _seen(position + (r + i) // group, base, window)
                    if lo < hi:
                        row_s = s[i * KV_CHUNK : (i + 1) * KV_CHUNK]
                        row_sums = sums[(r + i) * LANES : (r + i + 1) * LANES]
                        row_acc = acc[(r + i) * head_dim : (r + i + 1) * head_dim]
                        peaks[r + i] = _absorb(row_s, lanes, lo, hi, scale, softcap, peaks[r + i], row_sums, row_acc)
                _add_values(s, r, many, pages, block_tables, table, kv_head, kv_heads, head_dim, block_size, base, position, group, window, newest, acc)  # fmt: skip
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
def _page(block_tables: Any, table: int, token: int, newest: int, kv_head: int, kv_heads: int, block_size: int) -> int:
    """Offset of the page that holds ``token`` (or the last one, beyond it) for a KV head, in half pages."""
    return (block_tables[table, min(token, newest) // block_size] * kv_heads + kv_head) * 2


@njit(inline="always")
def _seen(token: int, base: int, window: int) -> Any:
    """The keys lo <= j < hi of the chunk at ``base`` that a token at this absolute position sees."""
    lo = max(0, token - window + 1 - base) if window > 0 else 0
    return lo, min(KV_CHUNK, token + 1 - base)


@njit(inline="always")
def _score(
    query: Any, r: int, many: int, pages: Any, block_tables: Any, table: int, kv_head: int, kv_heads: int,
    head_dim: int, block_size: int, base: int, lo: int, hi: int, newest: int, s: Any, small: Any,
) -> None:  # fmt: skip
    """s[i, lo:hi] = query[r + i] . keys of the chunk (rounded out to whole vectors), over the head in order."""
    half = head_dim * block_size
    for at in range(lo // LANES * LANES, hi, LANES):
        if block_size >= LANES:
            inside = (base + at) % block_size
            first = _page(block_tables, table, base + at, newest, kv_head, kv_heads, block_size) * half + inside
            ahead = _page(block_tables, table, base + at + KV_CHUNK, newest, kv_head, kv_heads, block_size) * half + inside
            _score_vector(query, r * head_dim, many, r == 0, head_dim, pages, first, block_size, ahead, s, at)
        else:
            _gather_keys(pages, block_tables, table, kv_head, kv_heads, head_dim, block_size, base + at, hi - at, small)  # fmt: skip
            _score_vector(query, r * head_dim, many, False, head_dim, small, 0, LANES, 0, s, at)


@njit(inline="always")
def _score_vector(
    query: Any, query_at: int, many: int, fetch: bool, head_dim: int, keys: Any, first: int, stride: int, ahead: int,
    s: Any, at: int,
) -> None:  # fmt: skip
    """Sixteen scores of each row; the first rows of a tile also fetch what the next chunk will need."""
    if fetch:
        if many == 4:
            scores_4_fetching(query, query_at, head_dim, keys, first, stride, ahead, head_dim, s, at, KV_CHUNK)
        elif many == 2:
            scores_2_fetching(query, query_at, head_dim, keys, first, stride, ahead, head_dim, s, at, KV_CHUNK)
        else:
            scores_1_fetching(query, query_at, head_dim, keys, first, stride, ahead, head_dim, s, at, KV_CHUNK)
    elif many == 4:
        scores_4(query, query_at, head_dim, keys, first, stride, ahead, head_dim, s, at, KV_CHUNK)
    elif many == 2:
        scores_2(query, query_at, head_dim, keys, first, stride, ahead, head_dim, s, at, KV_CHUNK)
    else:
        scores_1(query, query_at, head_dim, keys, first, stride, ahead, head_dim, s, at, KV_CHUNK)


@njit(inline="always")
def _gather_keys(
    pages: Any, block_tables: Any, table: int, kv_head: int, kv_heads: int, head_dim: int, block_size: int,
    first: int, count: int, out: Any,
) -> None:  # fmt: skip
    """Up to sixteen keys from pages smaller than that, as one [D, 16] tile."""
    for j in range(min(count, LANES)):
        block = block_tables[table, (first + j) // block_size]
        at = (block * kv_heads + kv_head) * 2 * head_dim * block_size + (first + j) % block_size
        for d in range(head_dim):
            out[d * LANES + j] = pages[at + d * block_size]


@njit(inline="always")
def _absorb(s: Any, lanes: Any, lo: int, hi: int, scale: Any, softcap: Any, old: Any, sums: Any, acc: Any) -> Any:
    """Turn the scores s[lo:hi] of a row into weights against its maximum so far, ``old``; the new maximum.

    The rest of the chunk gets weight 0; the row's partial sums and accumulator are rescaled.
    """
    for j in range(KV_CHUNK):
        s[j] = s[j] * scale
    if softcap > _ZERO:
        for j in range(KV_CHUNK):
            s[j] = softcap * tanh(s[j] / softcap)
    for j in range(lo):
        s[j] = _LOWEST
    for j in range(hi, KV_CHUNK):
        s[j] = _LOWEST
    for lane in range(LANES):
        best = s[lane]
        for j in range(LANES, KV_CHUNK, LANES):
            best = s[j + lane] if s[j + lane] > best else best
        lanes[lane] = best
    peak = old
    for lane in range(LANES):
        peak = lanes[lane] if lanes[lane] > peak else peak
    for j in range(KV_CHUNK):
        s[j] = exp(s[j] - peak)
    for j in range(lo):
        s[j] = _ZERO
    for j in range(hi, KV_CHUNK):
        s[j] = _ZERO
    if peak != old:
        shrink = exp(old - peak) if old > _LOWEST else _ZERO
        for lane in range(LANES):
            sums[lane] = sums[lane] * shrink
        for d in range(len(acc)):
            acc[d] = acc[d] * shrink
    for lane in range(LANES):
        total = sums[lane]
        for j in range(0, KV_CHUNK, LANES):
            total = total + s[j + lane]
        sums[lane] = total
    return peak


@njit(inline="always")
def _add_values(
    s: Any, r: int, many: int, pages: Any, block_tables: Any, table: int, kv_head: int, kv_heads: int,
    head_dim: int, block_size: int, base: int, position: int, group: int, window: int, newest: int, acc: Any,
) -> None:  # fmt: skip
    """acc[r + i] += s[i] . values: the keys that all rows see together, those before and after row by row.

    A key that a row does not see is left out, never multiplied by 0: its page may hold anything.
    """
    lo, _ = _seen(position + (r + many - 1) // group, base, window)
    _, hi = _seen(position + r // group, base, window)
    hi = max(lo, hi)
    for i in range(many):
        first, last = _seen(position + (r + i) // group, base, window)
        _values_of(s, i * KV_CHUNK, r + i, 1, pages, block_tables, table, kv_head, kv_heads, head_dim, block_size, base, first, min(lo, last), newest, acc)  # fmt: skip
    _values_of(s, 0, r, many, pages, block_tables, table, kv_head, kv_heads, head_dim, block_size, base, lo, hi, newest, acc)  # fmt: skip
    for i in range(many):
        _, last = _seen(position + (r + i) // group, base, window)
        _values_of(s, i * KV_CHUNK, r + i, 1, pages, block_tables, table, kv_head, kv_heads, head_dim, block_size, base, hi, last, newest, acc)  # fmt: skip


@njit(nogil=True, error_model="numpy")
def _values_of(
    s: Any, s_at: int, r: int, many: int, pages: Any, block_tables: Any, table: int, kv_head: int, kv_heads: int,
    head_dim: int, block_size: int, base: int, lo: int, hi: int, newest: int, acc: Any,
) -> None:  # fmt: skip
    """acc[r + i] += sum over lo <= j < hi of s[i, j] * value[j], ascending, page by page."""
    half = head_dim * block_size
    j = lo
    while j < hi:
        inside = (base + j) % block_size
        count = min(hi - j, block_size - inside)
        page = _page(block_tables, table, base + j, newest, kv_head, kv_heads, block_size)
        coming = _page(block_tables, table, base + j + KV_CHUNK, newest, kv_head, kv_heads, block_size)
        first = (page + 1) * half + inside * head_dim
        ahead = (coming + 1) * half + inside * head_dim
        d = 0
        while d + LANES <= head_dim:
            _accumulate_vector(s, s_at + j, many, r == 0, head_dim, pages, first + d, ahead + d, count, acc, r * head_dim + d)  # fmt: skip
            d += LANES
        while d < head_dim:
            for i in range(many):
                total = acc[(r + i) * head_dim + d]
                for k in range(count):
                    total = fma(s[s_at + i * KV_CHUNK + j + k], widen(pages[first + k * head_dim + d]), total)
                acc[(r + i) * head_dim + d] = total
            d += 1
        j += count


@njit(inline="always")
def _accumulate_vector(
    s: Any, s_at: int, many: int, fetch: bool, head_dim: int, values: Any, first: int, ahead: int, count: int,
    acc: Any, at: int,
) -> None:  # fmt: skip
    """Sixteen elements of each row's output, over ``count`` values."""
    if fetch:
        if many == 4:
            accumulate_4_fetching(s, s_at, KV_CHUNK, values, first, head_dim, ahead, count, acc, at, head_dim)
        elif many == 2:
            accumulate_2_fetching(s, s_at, KV_CHUNK, values, first, head_dim, ahead, count, acc, at, head_dim)
        else:
            accumulate_1_fetching(s, s_at, KV_CHUNK, values, first, head_dim, ahead, count, acc, at, head_dim)
    elif many == 4:
        accumulate_4(s, s_at, KV_CHUNK, values, first, head_dim, ahead, count, acc, at, head_dim)
    elif many == 2:
        accumulate_2(s, s_at, KV_CHUNK, values, first, head_dim, ahead, count, acc, at, head_dim)
    else:
        accumulate_1(s, s_at, KV_CHUNK, values, first, head_dim, ahead, count, acc, at, head_dim)


def _write(k: Any, v: Any, block_of_row: Any, offset_of_row: Any, block_size: int, pages: Any) -> None:
    kv_heads = k.shape[1]
    head_dim = k.shape[2]
    for row in prange(k.shape[0]):
        for head in range(kv_heads):
            keys = (block_of_row[row] * kv_heads + head) * 2 * head_dim * block_size + offset_of_row[row]
            for d in range(head_dim):
                pages[keys + d * block_size] = k[row, head, d]
            values = ((block_of_row[row] * kv_heads + head) * 2 + 1) * head_dim * block_size
            for d in range(head_dim):
                pages[values + offset_of_row[row] * head_dim + d] = v[row, head, d]


write_pages = RowKernel(_write)
