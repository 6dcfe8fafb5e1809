"""Compute the gradients of the paged causal attention of one training call, on the CPU.

One work item is a sequence and a KV head; it owns the gradients of its keys, its values and of the query
heads that read them, so no two items add to the same place. Probabilities are recomputed from the saved
log-sum-exp (Dao et al. 2022). Pages of a training call hold one KV chunk each.

Invariant: each sum is one chain in the order of rows, or of keys, over those alone that see each other; those that do
not are left out, never multiplied by 0.

T tokens, S sequences, H heads, G query heads a KV head, D head size, C tokens a chunk.
"""

from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.attention.gradient_vectors import (
    MOST_CHAINS,
    MOST_COLUMNS,
    ROWS_AT_ONCE,
    add_to_keys,
    add_to_queries,
    multiply_rows,
    to_slopes,
)
from samebit.kernels.cpu.attention.groups import Place, Shape, Softmax
from samebit.kernels.cpu.attention.softmax import behind
from samebit.kernels.cpu.attention.vectors import copy_vectors
from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, longs, scratch
from samebit.kernels.cpu.base.numeric import exp, narrow, tanh, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.rows import Rows
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.base.small_tiles import tile_scores
from samebit.kernels.cpu.gemm.many_rows_vectors import fetch, transpose_tile
from samebit.kernels.layout.grids import CACHE_LINE, KV_CHUNK, LANES

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_ROWS = 4
_TILE = 64
"""Rows whose weights are kept until they are added to the keys'; a multiple of `_ROWS` and of `MOST_CHAINS`."""

_ARRAYS = 16
"""Count of arrays of `_Queries` and `_Chunk`, each from the start of a cache line on."""


class _Queries(NamedTuple):
    """Holds the rows of an item, tokens times G heads, flat: ``[rows, D]`` padded to ``wide``, the others ``[rows]``.

    deltas: the product of a row's output and the gradient of it (``upstream``). shifts: its log-sum-exp. tokens: its
    place in the sequence.
    """

    query: Any
    upstream: Any
    grad_query: Any
    deltas: Any
    shifts: Any
    tokens: Any
    wide: int


class _Chunk(NamedTuple):
    """Holds a chunk of keys and values as ``[D, C]``, the keys and both gradients as ``[C, D]``, D padded; flat.

    s, slopes: of a tile of rows, ``[rows, C]``, the weights of values and those of keys. lows, highs: what each row
    sees of the chunk. begins, ends: what sees each of some keys of the tile.
    """

    keys: Any
    values: Any
    key_rows: Any
    grad_keys: Any
    grad_values: Any
    s: Any
    slopes: Any
    lows: Any
    highs: Any
    begins: Any
    ends: Any


def _backward(
    q: Any, pages: Any, sequences: Any, block_tables: Any, scales: Any, out: Any, lse: Any, grad: Any, grad_q: Any,
    grad_kv: Any, deltas: Any, threads: int,
) -> None:  # fmt: skip
    """Compute the gradients of q ``[T, H, D]`` and of keys and values ``[2, T, KV heads, D]``, in the dtype of q.

    ``out`` and ``lse`` are what the forward gave, ``grad`` the gradient of ``out``; the others are as there. ``deltas``
    ``[T, H]`` gets the product of each row's output and the gradient of it. Padding rows of all stay as they are.
    """
    kv_heads = grad_kv.shape[2]
    items = sequences.shape[1] * kv_heads
    share = (items + threads - 1) // threads
    share_out(
        _backward_head, share * threads, threads,
        (share, threads, q, pages, sequences, block_tables, scales, (out, lse, grad), (grad_q, grad_kv, deltas)),
    )  # fmt: skip


backward = compile_kernel(_backward)


@kernel_part
def _backward_head(
    slot: int, share: int, threads: int, q: Any, pages: Any, sequences: Any, block_tables: Any, scales: Any,
    given: Any, results: Any,
) -> None:  # fmt: skip
    """Compute the gradients of one sequence's keys and values of a KV head, and of the queries that read them.

    Threads take items in turns, each the next ``share`` slots; a slot may have none. ``given``: ``out``, ``lse`` and
    ``grad``; ``results``: ``grad_q``, ``grad_kv`` and ``deltas``. All arrays are named by their addresses: those that
    count their references are counted at each use.
    """
    out, lse, grad = given
    grad_q, grad_kv, deltas = results
    kv_heads, head_dim = pages.shape[1], q.shape[2]
    item = slot % share * threads + slot // share
    if item >= sequences.shape[1] * kv_heads:
        return
    shape = Shape(kv_heads, q.shape[1] // kv_heads, head_dim, head_dim, pages.shape[3] // head_dim)
    softmax = Softmax(scales[0], scales[1], scales[2])
    sequence, kind = item // kv_heads, pages.dtype.type(0)
    place = Place(sequences[3, sequence], sequences[0, sequence], 0, sequences[1, sequence], item % kv_heads)
    room = scratch(_size(shape, place.count * shape.group))
    queries, chunk = _place_arrays(room.ctypes.data, shape, place.count * shape.group)
    _load_queries(
        elements(q.ctypes.data, q.size, kind), elements(out.ctypes.data, q.size, kind),
        elements(grad.ctypes.data, q.size, kind), floats(lse.ctypes.data, lse.size), shape, place, queries,
        chunk.grad_keys,
    )  # fmt: skip
    memory, keys_out = elements(pages.ctypes.data, pages.size, kind), elements(grad_kv.ctypes.data, grad_kv.size, kind)
    for base in range(0, place.count, KV_CHUNK):
        count = min(KV_CHUNK, place.count - base)
        block = np.int64(block_tables[place.table, base // shape.block_size])
        _load_chunk(memory, (block * kv_heads + place.kv_head) * 2 * head_dim * KV_CHUNK, head_dim, queries.wide, chunk)
        _chunk_gradients(shape, softmax, base, count, queries, chunk)
        at = ((place.row + base) * kv_heads + place.kv_head) * head_dim
        for found, first in ((chunk.grad_keys, at), (chunk.grad_values, at + grad_kv.size // 2)):
            for j in range(count):
                _write_row(found, j * queries.wide, keys_out, first + j * kv_heads * head_dim, head_dim)
    _write_queries(
        shape, place, queries, elements(grad_q.ctypes.data, q.size, kind), floats(deltas.ctypes.data, deltas.size)
    )  # fmt: skip
    room[0] = _ZERO  # it is held till here


@inlined_part
def _padded(head_dim: int) -> int:
    """Return the head size in whole vectors."""
    return (head_dim + LANES - 1) // LANES * LANES


@inlined_part
def _size(shape: Any, rows: int) -> int:
    """Return how many float32 `_place_arrays` needs."""
    wide = _padded(shape.head_dim)
    size: int = (
        rows * (3 * wide + 4) + 5 * wide * KV_CHUNK + 2 * _TILE * KV_CHUNK + 4 * _TILE + 4 * MOST_CHAINS
        + _ARRAYS * LANES
    )  # fmt: skip
    return size


@inlined_part
def _place_arrays(address: int, shape: Any, rows: int) -> Any:
    """Place the arrays of an item of ``rows`` rows from an address on; what is padded is 0."""
    wide = _padded(shape.head_dim)
    upstream = behind(address, rows * wide)
    grad_query = behind(upstream, rows * wide)
    deltas = behind(grad_query, rows * wide)
    shifts = behind(deltas, rows)
    tokens = behind(shifts, rows)
    keys = behind(tokens, 2 * rows)
    panel = wide * KV_CHUNK * 4
    s = keys + 5 * panel
    slopes = s + _TILE * KV_CHUNK * 4
    lows = slopes + _TILE * KV_CHUNK * 4
    begins = behind(lows, 4 * _TILE)
    queries = _Queries(
        floats(address, rows * wide), floats(upstream, rows * wide), floats(grad_query, rows * wide),
        floats(deltas, rows), floats(shifts, rows), longs(tokens, rows), wide,
    )  # fmt: skip
    chunk = _Chunk(
        floats(keys, wide * KV_CHUNK), floats(keys + panel, wide * KV_CHUNK), floats(keys + 2 * panel, wide * KV_CHUNK),
        floats(keys + 3 * panel, wide * KV_CHUNK), floats(keys + 4 * panel, wide * KV_CHUNK),
        floats(s, _TILE * KV_CHUNK), floats(slopes, _TILE * KV_CHUNK), longs(lows, _TILE),
        longs(lows + 8 * _TILE, _TILE), longs(begins, MOST_CHAINS), longs(begins + 8 * MOST_CHAINS, MOST_CHAINS),
    )  # fmt: skip
    queries.grad_query[:] = _ZERO
    if wide != shape.head_dim:
        queries.query[:] = _ZERO
        queries.upstream[:] = _ZERO
        chunk.keys[:] = _ZERO
    return queries, chunk


@inlined_part
def _load_queries(q: Any, out: Any, grad: Any, lse: Any, shape: Any, place: Any, queries: Any, outs: Any) -> None:
    """Load the rows of an item in float32; ``outs`` is room for some rows of ``out``."""
    group, head_dim, wide = shape.group, shape.head_dim, queries.wide
    rows, heads = place.count * group, shape.kv_heads * group
    r = 0
    while r < rows:
        many = ROWS_AT_ONCE if r + ROWS_AT_ONCE <= rows else 1
        for row in range(r, r + many):
            token, head = place.row + row // group, place.kv_head * group + row % group
            at = (token * heads + head) * head_dim
            ahead = at + ROWS_AT_ONCE // group * heads * head_dim  # rows lie apart in memory
            for d in range(0, head_dim, CACHE_LINE // q.itemsize):
                fetch(q, ahead + d)
                fetch(grad, ahead + d)
                fetch(out, ahead + d)
            _read_row(q, at, queries.query, row * wide, head_dim)
            _read_row(grad, at, queries.upstream, row * wide, head_dim)
            _read_row(out, at, outs, (row - r) * wide, head_dim)
            queries.shifts[row] = lse[token * heads + head]
            queries.tokens[row] = row // group
        multiply_rows(many, Rows(queries.upstream, r * wide, wide), Rows(outs, 0, wide), head_dim, queries.deltas, r)
        r += many


@inlined_part
def _read_row(source: Any, at: int, target: Any, to: int, count: int) -> None:
    """Copy a row to float32."""
    copy_vectors(source, at, target, to, count)
    for d in range(count // LANES * LANES, count):
        target[to + d] = widen(source[at + d])


@inlined_part
def _write_row(source: Any, at: int, target: Any, to: int, count: int) -> None:
    """Copy a row from float32."""
    copy_vectors(source, at, target, to, count)
    for d in range(count // LANES * LANES, count):
        target[to + d] = narrow(source[at + d], target[to + d])


@inlined_part
def _write_queries(shape: Any, place: Any, queries: Any, grad_q: Any, deltas: Any) -> None:
    """Write what was found of an item's rows."""
    group, heads = shape.group, shape.kv_heads * shape.group
    for r in range(place.count * group):
        at = (place.row + r // group) * heads + place.kv_head * group + r % group
        deltas[at] = queries.deltas[r]
        _write_row(queries.grad_query, r * queries.wide, grad_q, at * shape.head_dim, shape.head_dim)


@inlined_part
def _load_chunk(pages: Any, page: int, head_dim: int, wide: int, chunk: Any) -> None:
    """Load the keys ``[D, C]`` and values ``[C, D]`` of the page that begins at element ``page``.

    Where there is no token, they may be anything.
    """
    values, whole = page + head_dim * KV_CHUNK, head_dim // LANES * LANES
    copy_vectors(pages, page, chunk.keys, 0, head_dim * KV_CHUNK)
    for j in range(0, KV_CHUNK, LANES):
        for d in range(0, wide, LANES):
            transpose_tile(chunk.keys, d * KV_CHUNK + j, KV_CHUNK, chunk.key_rows, j * wide + d, wide)
        for d in range(0, whole, LANES):
            transpose_tile(pages, values + j * head_dim + d, head_dim, chunk.values, d * KV_CHUNK + j, KV_CHUNK)
    for d in range(whole, head_dim):
        for j in range(KV_CHUNK):
            chunk.values[d * KV_CHUNK + j] = widen(pages[values + j * head_dim + d])
    chunk.grad_keys[:] = _ZERO
    chunk.grad_values[:] = _ZERO


@inlined_part
def _chunk_gradients(shape: Any, softmax: Any, base: int, count: int, queries: Any, chunk: Any) -> None:
    """Add what the chunk of ``count`` tokens at ``base`` gives to the gradients of its keys, values and queries."""
    group, window, wide = shape.group, softmax.window, queries.wide
    rows = len(queries.tokens)
    last_row = rows if window <= 0 else min(rows, (base + count - 1 + window) * group)
    for first in range(base * group, last_row, _TILE):
        end = min(first + _TILE, last_row)
        for r in range(first, end):
            token = queries.tokens[r]
            chunk.lows[r - first] = max(0, token - window + 1 - base) if window > 0 else 0
            chunk.highs[r - first] = min(count, token + 1 - base)
        row = first
        while row < end:
            many = _ROWS if row + _ROWS <= end else 1
            _slopes_of_rows(shape.head_dim, softmax, queries, chunk, row, many, row - first)
            row += many
        row = first
        while row < end:
            many = _together(end - row, window)
            for at in range(0, wide, MOST_COLUMNS * LANES):
                add_to_queries(
                    many, min(MOST_COLUMNS, (wide - at) // LANES), chunk.slopes, (row - first) * KV_CHUNK,
                    Rows(chunk.key_rows, at, wide), chunk.lows, chunk.highs, row - first,
                    Rows(queries.grad_query, row * wide + at, wide),
                )  # fmt: skip
            row += many
        _add_rows_to_keys(group, window, base, count, first, end, queries, chunk)


@inlined_part
def _together(left: int, window: int) -> int:
    """Return how many rows, or keys, are taken together of those left: in a short window one alone may see nothing
    that the others see."""
    most = left if window <= 0 or window >= MOST_CHAINS else 1
    return MOST_CHAINS if most >= MOST_CHAINS else 1


@inlined_part
def _slopes_of_rows(head_dim: int, softmax: Any, queries: Any, chunk: Any, row: int, many: int, inside: int) -> None:
    """Compute the probabilities of ``many`` rows from ``row`` on, which are ``inside`` the tile, and their slopes."""
    wide, at = queries.wide, inside * KV_CHUNK
    most = chunk.highs[inside + many - 1]
    vectors = (most + LANES - 1) // LANES
    tile_scores(
        many, vectors, Rows(queries.query, row * wide, wide), Rows(chunk.keys, 0, KV_CHUNK), head_dim,
        Rows(chunk.s, at, KV_CHUNK),
    )  # fmt: skip
    tile_scores(
        many, vectors, Rows(queries.upstream, row * wide, wide), Rows(chunk.values, 0, KV_CHUNK), head_dim,
        Rows(chunk.slopes, at, KV_CHUNK),
    )  # fmt: skip
    if softmax.softcap > _ZERO:
        for i in range(many):
            _bend_scores(
                softmax, queries.shifts[row + i], queries.deltas[row + i], chunk.lows[inside + i],
                chunk.highs[inside + i], chunk.s, chunk.slopes, at + i * KV_CHUNK,
            )  # fmt: skip
    else:
        whole = chunk.lows[inside + many - 1] == 0 and chunk.highs[inside] == KV_CHUNK
        to_slopes(
            many, whole, vectors, chunk.s, chunk.slopes, at, softmax.scale, queries.shifts, queries.deltas, row,
            chunk.lows, chunk.highs, inside,
        )  # fmt: skip


@inlined_part
def _bend_scores(
    softmax: Any, shift: Any, delta: Any, low: int, high: int, p: Any, slopes: Any, at: int
) -> None:  # fmt: skip
    """Do what `to_slopes` does for a row whose scores are capped."""
    for j in range(at, at + KV_CHUNK):
        t = tanh(p[j] * softmax.scale / softmax.softcap)
        p[j] = exp(softmax.softcap * t - shift)
        slopes[j] = p[j] * (slopes[j] - delta) * (_ONE - t * t) * softmax.scale
    for j in range(at, at + low):
        p[j], slopes[j] = _ZERO, _ZERO
    for j in range(at + high, at + KV_CHUNK):
        p[j], slopes[j] = _ZERO, _ZERO


@inlined_part
def _add_rows_to_keys(
    group: int, window: int, base: int, count: int, first: int, end: int, queries: Any, chunk: Any
) -> None:
    """Add the rows from ``first`` to ``end``, whose weights are there, to the keys that they see.

    Key j is seen by the rows from (base + j) group on, and from (base + j + window) group on no more.
    """
    key, wide = 0, queries.wide
    while key < count:
        many = _together(count - key, window)
        for k in range(many):
            since = (base + key + k) * group
            chunk.begins[k] = min(end, max(first, since)) - first
            chunk.ends[k] = (end if window <= 0 else min(end, max(first, since + window * group))) - first
        if chunk.begins[0] < chunk.ends[many - 1]:
            at, to = 4 * first * wide, 4 * key * wide
            _add_tile(
                many, chunk.s.ctypes.data + 4 * key, queries.upstream.ctypes.data + at,
                chunk.grad_values.ctypes.data + to, wide, chunk.begins.ctypes.data,
            )  # fmt: skip
            _add_tile(
                many, chunk.slopes.ctypes.data + 4 * key, queries.query.ctypes.data + at,
                chunk.grad_keys.ctypes.data + to, wide, chunk.begins.ctypes.data,
            )  # fmt: skip
        key += many


@kernel_part
def _add_tile(many: int, weights: int, rows: int, out: int, wide: int, bounds: int) -> None:
    """Add rows to ``many`` keys. All arrays are addresses: twice as many words to hand over took a twentieth longer."""
    ends = longs(bounds + 8 * MOST_CHAINS, MOST_CHAINS)
    for at in range(0, wide, MOST_COLUMNS * LANES):
        add_to_keys(
            many, min(MOST_COLUMNS, (wide - at) // LANES), floats(weights, NO_END), 0,
            Rows(floats(rows, NO_END), at, wide), longs(bounds, MOST_CHAINS), ends, 0,
            Rows(floats(out, NO_END), at, wide),
        )  # fmt: skip
