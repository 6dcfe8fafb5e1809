"""Compute the gradients of the paged causal attention of one training call, on the CPU.

One work item is a sequence and a KV head; it owns the gradients of its keys, its values and of the query
heads that read them, so no two items add to the same place. Probabilities are recomputed from the saved
log-sum-exp (Dao et al. 2022). Pages of a training call hold one KV chunk each.

T tokens, S sequences, H heads, G query heads a KV head, D head size, C tokens a chunk.
"""

from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.attention.groups import Place, Shape, Softmax
from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.numeric import exp, fma, tanh, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.rows import Rows
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.base.small_tiles import tile_multiply, tile_multiply_add
from samebit.kernels.cpu.gemm.many_rows_vectors import transpose_tile
from samebit.kernels.layout.grids import KV_CHUNK, LANES

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_ROWS = 4
_TILE = 32
"""Rows whose weights are kept until they are added to the keys'; a multiple of `_ROWS` and of `LANES`."""


class _Queries(NamedTuple):
    """Holds the rows of an item, tokens times G heads, flat: ``[rows, D]`` padded to ``wide``, ``delta [rows]``.

    delta: the product of a row's output and the gradient of it (``upstream``).
    """

    query: Any
    upstream: Any
    delta: Any
    grad_query: Any
    wide: int


class _Chunk(NamedTuple):
    """Holds a chunk of keys and values as ``[D, C]``, the keys and both gradients as ``[C, D]``, D padded; flat."""

    keys: Any
    values: Any
    key_rows: Any
    grad_keys: Any
    grad_values: Any


def _backward(
    q: Any, pages: Any, sequences: Any, block_tables: Any, scales: Any, out: Any, lse: Any, grad: Any, grad_q: Any,
    grad_kv: Any, deltas: Any, threads: int,
) -> None:  # fmt: skip
    """Compute the gradients of q ``[T, H, D]`` and of keys and values ``[2, T, KV heads, D]`` in float32.

    ``out`` and ``lse`` are what the forward gave, ``grad`` the gradient of ``out``; the others are as there. ``deltas``
    ``[T, H]`` gets the product of each row's output and the gradient of it.
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
    ``grad``; ``results``: ``grad_q``, ``grad_kv`` and ``deltas``.
    """
    out, lse, grad = given
    grad_q, grad_kv, deltas = results
    kv_heads, head_dim = pages.shape[1], q.shape[2]
    item = slot % share * threads + slot // share
    if item >= sequences.shape[1] * kv_heads:
        return
    shape = Shape(kv_heads, q.shape[1] // kv_heads, head_dim, head_dim, pages.shape[3] // head_dim)
    softmax = Softmax(scales[0], scales[1], scales[2])
    sequence = item // kv_heads
    place = Place(sequences[3, sequence], sequences[0, sequence], 0, sequences[1, sequence], item % kv_heads)
    queries = _load_queries(q, out, grad, shape, place)
    wide = queries.wide
    chunk = _Chunk(
        np.zeros(wide * KV_CHUNK, np.float32), np.zeros(wide * KV_CHUNK, np.float32),
        np.zeros(KV_CHUNK * wide, np.float32), np.zeros(KV_CHUNK * wide, np.float32),
        np.zeros(KV_CHUNK * wide, np.float32),
    )  # fmt: skip
    for base in range(0, place.count, KV_CHUNK):
        count = min(KV_CHUNK, place.count - base)
        block = block_tables[place.table, base // shape.block_size]
        _load_chunk(pages[block, place.kv_head], shape.block_size, head_dim, wide, count, chunk)
        chunk.grad_keys[:] = _ZERO
        chunk.grad_values[:] = _ZERO
        _chunk_gradients(shape, softmax, place, base, count, lse, queries, chunk)
        for j in range(count):
            for d in range(head_dim):
                grad_kv[0, place.row + base + j, place.kv_head, d] = chunk.grad_keys[j * wide + d]
                grad_kv[1, place.row + base + j, place.kv_head, d] = chunk.grad_values[j * wide + d]
    for r in range(place.count * shape.group):
        token, head = place.row + r // shape.group, place.kv_head * shape.group + r % shape.group
        deltas[token, head] = queries.delta[r]
        for d in range(head_dim):
            grad_q[token, head, d] = queries.grad_query[r * wide + d]


@inlined_part
def _load_queries(q: Any, out: Any, grad: Any, shape: Any, place: Any) -> Any:
    """Load the rows of an item in float32, padded with zeros."""
    group, head_dim = shape.group, shape.head_dim
    wide = (head_dim + LANES - 1) // LANES * LANES  # rows padded to whole vectors
    rows = place.count * group
    query, upstream = np.zeros(rows * wide, np.float32), np.zeros(rows * wide, np.float32)
    delta = np.zeros(rows, np.float32)
    for r in range(rows):
        token, head = place.row + r // group, place.kv_head * group + r % group
        total = _ZERO
        for d in range(head_dim):
            query[r * wide + d] = widen(q[token, head, d])
            upstream[r * wide + d] = widen(grad[token, head, d])
            total = fma(upstream[r * wide + d], widen(out[token, head, d]), total)
        delta[r] = total
    return _Queries(query, upstream, delta, np.zeros(rows * wide, np.float32), wide)


@inlined_part
def _load_chunk(page: Any, block_size: int, head_dim: int, wide: int, count: int, chunk: Any) -> None:
    """Load the keys and values of a chunk from its page ``[2, D * B]``; 0 where there is no token."""
    for d in range(head_dim):
        for j in range(KV_CHUNK):
            key = widen(page[0, d * block_size + j]) if j < count else _ZERO
            chunk.keys[d * KV_CHUNK + j] = key
            chunk.values[d * KV_CHUNK + j] = widen(page[1, j * head_dim + d]) if j < count else _ZERO
            chunk.key_rows[j * wide + d] = key


@inlined_part
def _chunk_gradients(
    shape: Any, softmax: Any, place: Any, base: int, count: int, lse: Any, queries: Any, chunk: Any
) -> None:  # fmt: skip
    """Add what the chunk of ``count`` tokens at ``base`` gives to the gradients of its keys, values and queries.

    Rows are taken `_ROWS` at a time, and theirs are added to keys and values `_TILE` at a time; each sum is still one
    chain in the order of rows, or of keys, over those alone that see each other.
    """
    group, window = shape.group, softmax.window
    rows = place.count * group
    last_row = rows if window <= 0 else min(rows, (base + count - 1 + window) * group)
    s = np.zeros(_TILE * KV_CHUNK, np.float32)
    slopes = np.zeros(_TILE * KV_CHUNK, np.float32)
    weights = np.zeros(KV_CHUNK * _TILE, np.float32)
    bends = np.zeros(KV_CHUNK * _TILE, np.float32)
    for first in range(base * group, last_row, _TILE):
        end = min(first + _TILE, last_row)
        for r in range(first, end, _ROWS):
            many = _ROWS if r + _ROWS <= end else 1
            for row in range(r, min(r + _ROWS, end), many):
                at = (row - first) * KV_CHUNK
                _tile_of_slopes(
                    shape, softmax, place, base, count, lse, queries, chunk, row, many, s[at:], slopes[at:]
                )  # fmt: skip
        for row in range(0, end - first, LANES):
            for key in range(0, count, LANES):
                transpose_tile(s, row * KV_CHUNK + key, KV_CHUNK, weights, key * _TILE + row, _TILE)
                transpose_tile(slopes, row * KV_CHUNK + key, KV_CHUNK, bends, key * _TILE + row, _TILE)
        _add_to_keys(weights, queries.upstream, chunk.grad_values, queries.wide, group, window, base, count, first, end)
        _add_to_keys(bends, queries.query, chunk.grad_keys, queries.wide, group, window, base, count, first, end)


@inlined_part
def _tile_of_slopes(
    shape: Any, softmax: Any, place: Any, base: int, count: int, lse: Any, queries: Any, chunk: Any, row: int,
    many: int, s: Any, slopes: Any,
) -> None:  # fmt: skip
    """Compute the probabilities ``s`` of ``many`` rows from ``row`` on and their ``slopes``, add to grad_query."""
    group, wide, window = shape.group, queries.wide, softmax.window
    most = min(count, (row + many - 1) // group + 1 - base)
    for at in range(0, most, 2 * LANES):
        tile_multiply(
            many, 2, Rows(queries.query, row * wide, wide), Rows(chunk.keys, at, KV_CHUNK), shape.head_dim,
            Rows(s, at, KV_CHUNK),
        )  # fmt: skip
        tile_multiply(
            many, 2, Rows(queries.upstream, row * wide, wide), Rows(chunk.values, at, KV_CHUNK), shape.head_dim,
            Rows(slopes, at, KV_CHUNK),
        )  # fmt: skip
    for i in range(many):
        r = row + i
        token = r // group
        lo = max(0, token - window + 1 - base) if window > 0 else 0
        shift = lse[place.row + token, place.kv_head * group + r % group]
        scores, bends = s[i * KV_CHUNK : (i + 1) * KV_CHUNK], slopes[i * KV_CHUNK : (i + 1) * KV_CHUNK]
        _to_slopes(softmax, shift, queries.delta[r], lo, min(count, token + 1 - base), scores, bends)
    least = min(count, row // group + 1 - base)  # keys that all of these rows see
    at = 0
    while at < wide:
        columns = _columns(wide - at)
        tile_multiply_add(
            many, columns, Rows(slopes, 0, KV_CHUNK), Rows(chunk.key_rows, at, wide), least,
            Rows(queries.grad_query, row * wide + at, wide),
        )  # fmt: skip
        for i in range(many):
            own = min(count, (row + i) // group + 1 - base) - least
            tile_multiply_add(
                1, columns, Rows(slopes, i * KV_CHUNK + least, KV_CHUNK), Rows(chunk.key_rows, least * wide + at, wide),
                own, Rows(queries.grad_query, (row + i) * wide + at, wide),
            )  # fmt: skip
        at += columns * LANES


@inlined_part
def _add_to_keys(
    weights: Any, rows: Any, out: Any, wide: int, group: int, window: int, base: int, count: int, first: int, end: int
) -> None:
    """Add to each key's ``out [C, wide]`` the rows from ``first`` to ``end`` that see it, times ``weights [C, rows]``.

    Key j is seen by the rows from (base + j) group on, and from (base + j + window) group on no more. Keys are taken
    `_ROWS` at a time where all of them are seen; the rows before and after are added to each alone.
    """
    for j in range(0, count, _ROWS):
        many = _ROWS if j + _ROWS <= count else 1
        for key in range(j, min(j + _ROWS, count), many):
            begin = max(first, (base + key + many - 1) * group)
            stop = end if window <= 0 else min(end, (base + key + window) * group)
            stop = max(begin, stop)
            at = 0
            while at < wide:
                columns = _columns(wide - at)
                for i in range(key, key + many):
                    own = max(first, (base + i) * group)
                    last = end if window <= 0 else min(end, (base + i + window) * group)
                    _add_rows(1, columns, weights, i, first, own, min(begin, last), rows, at, wide, out)
                _add_rows(many, columns, weights, key, first, begin, stop, rows, at, wide, out)
                for i in range(key, key + many):
                    last = end if window <= 0 else min(end, (base + i + window) * group)
                    _add_rows(1, columns, weights, i, first, stop, last, rows, at, wide, out)
                at += columns * LANES


@inlined_part
def _add_rows(
    many: int, columns: int, weights: Any, key: int, first: int, begin: int, end: int, rows: Any, at: int, wide: int,
    out: Any,
) -> None:  # fmt: skip
    """Add the rows from ``begin`` to ``end``, in their order, to ``many`` keys; columns from ``at`` on."""
    if begin < end:
        tile_multiply_add(
            many, columns, Rows(weights, key * _TILE + begin - first, _TILE), Rows(rows, begin * wide + at, wide),
            end - begin, Rows(out, key * wide + at, wide),
        )  # fmt: skip


@inlined_part
def _columns(left: int) -> int:
    """Return how many vectors of the ``left`` elements a tile takes."""
    return 4 if left >= 4 * LANES else 2 if left >= 2 * LANES else 1


@inlined_part
def _to_slopes(softmax: Any, shift: Any, delta: Any, lo: int, hi: int, p: Any, slope: Any) -> None:
    """Turn raw scores ``p`` into probabilities, and their gradients ``slope`` into those of the raw scores."""
    for j in range(KV_CHUNK):  # all of them: to leave some out takes longer than to compute them
        s = p[j] * softmax.scale
        bend = _ONE
        if softmax.softcap > _ZERO:
            t = tanh(s / softmax.softcap)
            s = softmax.softcap * t
            bend = _ONE - t * t
        p[j] = exp(s - shift)
        slope[j] = p[j] * (slope[j] - delta) * bend * softmax.scale
    for unseen in (slice(0, lo), slice(hi, KV_CHUNK)):
        p[unseen] = _ZERO
        slope[unseen] = _ZERO
