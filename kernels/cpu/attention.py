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
from .numeric import LANES, exp, fma, narrow, tanh, widen
from .simd import multiply, multiply_add

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
    share = (items + threads - 1) // threads
    for slot in prange(share * threads):
        item = (slot % share) * threads + slot // share  # a thread takes every threads-th item: even loads
        if item < items:
            sequence = tiles[item // kv_heads, 0]
            first = tiles[item // kv_heads, 1]
            after = min(item + threads, items - 1)  # what this thread does next
            coming = tiles[after // kv_heads, 0]
            _attend_tile(
                q, pages, block_tables, table_rows[sequence], row_start[sequence] + first, starts[sequence] + first,
                table_rows[coming], after % kv_heads, starts[coming],
                min(QUERY_TILE, lengths[sequence] - first), item % kv_heads, kv_heads, group, head_dim,
                block_size, scale, window, softcap, out, lse, keep_lse,
            )  # fmt: skip


attend = parallel_kernel(_attend)


@njit(nogil=True, error_model="numpy")
def _attend_tile(
    q: Any, pages: Any, block_tables: Any, table: int, row: int, position: int, next_table: int,
    next_head: int, next_newest: int, count: int, kv_head: int,
    kv_heads: int, group: int, head_dim: int, block_size: int, scale: Any, window: int, softcap: Any, out: Any,
    lse: Any, keep_lse: bool,
) -> None:  # fmt: skip
    """Attention of ``count`` tokens from ``row`` on, for the query heads of one KV head."""
    rows = count * group
    query = np.empty(rows * head_dim, np.float32)
    tokens = np.empty(rows, np.int64)
    for r in range(rows):
        tokens[r] = position + r // group
        for d in range(head_dim):
            query[r * head_dim + d] = widen(q[row + r // group, kv_head * group + r % group, d])
    acc = np.zeros(rows * head_dim, np.float32)
    sums = np.zeros(rows * LANES, np.float32)
    peaks = np.full(rows, _LOWEST, np.float32)
    s = np.zeros(4 * KV_CHUNK, np.float32)
    lanes = np.empty(LANES, np.float32)
    here = np.zeros((2, _VECTORS), np.int64)  # where the keys and the values of each vector of the chunk are
    ahead = np.zeros((2, _VECTORS), np.int64)
    steps = np.arange(0, KV_CHUNK, LANES)
    small = block_size < LANES
    copied = np.empty(2 * head_dim * KV_CHUNK if small else 0, pages.dtype)
    source, key_stride = (copied, KV_CHUNK) if small else (pages, block_size)
    newest = position + count - 1
    begin = max(0, position - window + 1) // KV_CHUNK if window > 0 else 0
    for chunk in range(begin, newest // KV_CHUNK + 1):
        base = chunk * KV_CHUNK
        if small:
            _copy_chunk(pages, block_tables, table, kv_head, kv_heads, head_dim, block_size, base, newest, copied, here)
        else:
            _locate(block_tables, table, kv_head, kv_heads, head_dim, block_size, base, newest, here)
            if base + KV_CHUNK <= newest:
                _locate(block_tables, table, kv_head, kv_heads, head_dim, block_size, base + KV_CHUNK, newest, ahead)
            else:
                _locate(block_tables, next_table, next_head, kv_heads, head_dim, block_size, 0, next_newest, ahead)
        r = 0
        while r < rows:
            many = 4 if r + 4 <= rows else (2 if r + 2 <= rows else 1)
            lo, _ = _seen(tokens[r], base, window)
            _, hi = _seen(tokens[r + many - 1], base, window)
            if lo < hi:
                fetch = r == 0 and not small  # the first rows ask for what the next chunk will need
                _score(query, r, many, fetch, source, here[0], ahead[0], key_stride, head_dim, lo, hi, s)
                for i in range(many):
                    lo, hi = _seen(tokens[r + i], base, window)
                    if lo < hi:
                        row_s = s[i * KV_CHUNK : (i + 1) * KV_CHUNK]
                        row_sums = sums[(r + i) * LANES : (r + i + 1) * LANES]
                        row_acc = acc[(r + i) * head_dim : (r + i + 1) * head_dim]
                        peaks[r + i] = _absorb(row_s, lanes, lo, hi, scale, softcap, peaks[r + i], row_sums, row_acc)
                _add_values(s, r, many, fetch, source, here[1], ahead[1], head_dim, base, tokens, window, acc, steps)
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
    newest: int, where: Any,
) -> None:  # fmt: skip
    """Offsets of the keys (``where[0]``) and values (``where[1]``) of each sixteen tokens from ``base`` on.

    Beyond the newest token they are those of the newest: nobody reads them, they are only fetched.
    """
    half = head_dim * block_size
    for c in range(_VECTORS):
        token = min(base + c * LANES, newest // LANES * LANES)
        inside = token % block_size
        page = (np.int64(block_tables[table, token // block_size]) * kv_heads + kv_head) * 2 * half
        where[0, c] = page + inside
        where[1, c] = page + half + inside * head_dim


@njit(inline="always")
def _copy_chunk(
    pages: Any, block_tables: Any, table: int, kv_head: int, kv_heads: int, head_dim: int, block_size: int, base: int,
    newest: int, out: Any, where: Any,
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
        where[0, c] = c * LANES
        where[1, c] = (KV_CHUNK + c * LANES) * head_dim


@njit(nogil=True, error_model="numpy")
def _score(
    query: Any, r: int, many: int, fetch: bool, source: Any, here: Any, ahead: Any, stride: int, head_dim: int,
    lo: int, hi: int, s: Any,
) -> None:  # fmt: skip
    """s[i, lo:hi] = query[r + i] . keys of the chunk (rounded out to whole vectors), over the head in order."""
    c = lo // LANES
    end = (hi + LANES - 1) // LANES
    while c < end:
        columns = 2 if c + 2 <= end else 1
        multiply(
            many, columns, fetch, query, r * head_dim, head_dim, source, 0, here[c:], 0, ahead[c:], stride, head_dim,
            s, c * LANES, KV_CHUNK,
        )  # fmt: skip
        c += columns


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
    s: Any, r: int, many: int, fetch: bool, source: Any, here: Any, ahead: Any, head_dim: int, base: int, tokens: Any,
    window: int, acc: Any, steps: Any,
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
            _values_of(
                s, i * KV_CHUNK, r + i, 1, False, source, here, ahead, head_dim, first, min(lo, last), acc, steps
            )
    _values_of(s, 0, r, many, fetch, source, here, ahead, head_dim, lo, hi, acc, steps)
    for i in range(many):
        _, last = _seen(tokens[r + i], base, window)
        if last > hi:
            _values_of(s, i * KV_CHUNK, r + i, 1, False, source, here, ahead, head_dim, hi, last, acc, steps)


@njit(nogil=True, error_model="numpy")
def _values_of(
    s: Any, s_at: int, r: int, many: int, fetch: bool, source: Any, here: Any, ahead: Any, head_dim: int, lo: int,
    hi: int, acc: Any, steps: Any,
) -> None:  # fmt: skip
    """acc[r + i] += sum over lo <= j < hi of s[i, j] * value[j], ascending."""
    j = lo
    while j < hi:
        inside = j % LANES
        count = min(hi - j, LANES - inside)
        first = here[j // LANES] + inside * head_dim
        coming = ahead[j // LANES] + inside * head_dim
        d = 0
        while d + LANES <= head_dim:
            columns = 2 if d + 2 * LANES <= head_dim else 1
            multiply_add(
                many, columns, fetch, s, s_at + j, KV_CHUNK, source, first + d, steps, coming + d, steps, head_dim,
                count, acc, r * head_dim + d, head_dim,
            )  # fmt: skip
            d += columns * LANES
        while d < head_dim:
            for i in range(many):
                total = acc[(r + i) * head_dim + d]
                for k in range(count):
                    total = fma(s[s_at + i * KV_CHUNK + j + k], widen(source[first + k * head_dim + d]), total)
                acc[(r + i) * head_dim + d] = total
            d += 1
        j += count
