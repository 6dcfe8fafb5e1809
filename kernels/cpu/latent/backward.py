"""Compute the gradients of attention over latents of one training call, on the CPU.

One work item is a sequence and some of its heads. It owns the gradients of these heads' queries, and its own sums of
what they give to the latents, which are added up in the order of the heads: no two items add to the same place, and no
bit depends on the threads. A query with a list of chosen tokens meets chunks of its list alone. Probabilities are
recomputed from the saved log-sum-exp (Dao et al. 2022). Pages of a training call hold one chunk each.

T tokens, S sequences, H heads, W elements of a key, R of a value, C tokens a chunk; ``wide`` and ``deep`` are W and R
in whole vectors.
"""

from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.numeric import exp, fma, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.rows import Rows
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.base.small_tiles import tile_multiply, tile_multiply_add
from samebit.kernels.cpu.latent.chunks import gather_rows
from samebit.kernels.layout.grids import KV_CHUNK, LANES

_ROWS = 64
"""Query rows that meet a chunk together: tokens times heads."""

_ZERO = np.float32(0.0)


class _Tile(NamedTuple):
    """Holds `_ROWS` query rows, padded with zeros, and what they and a chunk give each other; all flat.

    query, grad_query: ``[rows, wide]``. upstream: ``[rows, deep]``, the gradient of the output. delta, level:
    ``[rows]``, the product of output and upstream, and the log-sum-exp. weights, slopes: ``[rows, C]``, probabilities
    and gradients of the raw scores; turned_weights, turned_slopes: the same as ``[C, rows]``.
    """

    query: Any
    grad_query: Any
    upstream: Any
    delta: Any
    level: Any
    weights: Any
    slopes: Any
    turned_weights: Any
    turned_slopes: Any


class _Chunk(NamedTuple):
    """Holds a chunk of keys as ``[wide, C]`` and as ``[C, wide]``, and their gradient ``[C, wide]``; flat."""

    keys: Any
    key_rows: Any
    grad: Any


class _Item(NamedTuple):
    """Names a sequence and its heads: ``count`` tokens from ``row`` on, ``heads`` heads from ``head`` on.

    table: the row of the block tables. tokens: of a tile.
    """

    table: Any
    row: Any
    count: Any
    head: Any
    heads: Any
    tokens: Any


def _backward(
    q: Any, pages: Any, sequences: Any, block_tables: Any, chosen: Any, heads: int, scale: Any, given: Any,
    found: Any, threads: int,
) -> None:  # fmt: skip
    """Compute the gradients of q ``[T, H, W]`` and of the latents, each group of heads for itself, in float32.

    ``given``: ``out`` ``[T, H, R]`` and ``lse`` as the forward gave them, and the gradient of ``out``; ``chosen`` is as
    there; ``heads`` are a group's. ``found``: ``deltas`` ``[T, H]``, which gets the product of each row's output and
    the gradient of it, and, given as zeros, ``grad_q`` and ``grad_latents`` ``[H / heads, T, W]``.
    """
    groups = q.shape[1] // heads
    items = sequences.shape[1] * groups
    share = (items + threads - 1) // threads
    share_out(
        _backward_slot, share * threads, threads,
        (share, threads, q, pages, sequences, block_tables, chosen, heads, scale, given, found),
    )  # fmt: skip


backward = compile_kernel(_backward)


@kernel_part
def _backward_slot(
    slot: int, share: int, threads: int, q: Any, pages: Any, sequences: Any, block_tables: Any, chosen: Any, heads: int,
    scale: Any, given: Any, found: Any,
) -> None:  # fmt: skip
    """Compute an item, if the slot has one: threads take items in turns, each the next ``share`` slots."""
    (out, lse, grad), (deltas, grad_q, grad_latents) = given, found
    groups = q.shape[1] // heads
    number = slot % share * threads + slot // share
    if number >= sequences.shape[1] * groups:
        return
    sequence, group = number // groups, number % groups
    item = _Item(
        sequences[3, sequence], sequences[0, sequence], sequences[1, sequence], group * heads, heads,
        max(1, _ROWS // heads),
    )  # fmt: skip
    _product_of_outputs(item, out, grad, deltas)
    _backward_item(item, q, pages, block_tables, chosen, scale, lse, grad, deltas, grad_q, grad_latents[group])


@kernel_part
def _product_of_outputs(item: Any, out: Any, grad: Any, deltas: Any) -> None:
    """Write the product of each row's output and its gradient, a chain over R."""
    for token in range(item.row, item.row + item.count):
        for head in range(item.head, item.head + item.heads):
            total = _ZERO
            for d in range(out.shape[2]):
                total = fma(widen(grad[token, head, d]), widen(out[token, head, d]), total)
            deltas[token, head] = total


@kernel_part
def _backward_item(
    item: Any, q: Any, pages: Any, block_tables: Any, chosen: Any, scale: Any, lse: Any, grad: Any, deltas: Any,
    grad_q: Any, grad_latents: Any,
) -> None:  # fmt: skip
    """Compute the gradients of one sequence's queries of some heads, and what these give to its latents."""
    width, rank, blocks = q.shape[2], grad.shape[2], block_tables[item.table]
    wide, deep = (width + LANES - 1) // LANES * LANES, (rank + LANES - 1) // LANES * LANES
    whole = min(item.count, chosen.shape[1]) if chosen.shape[1] > 0 else item.count  # tokens that see all before them
    tile = _new_tile(item.tokens * item.heads, wide, deep)
    chunk = _Chunk(
        np.zeros(wide * KV_CHUNK, np.float32), np.zeros(KV_CHUNK * wide, np.float32),
        np.zeros(KV_CHUNK * wide, np.float32),
    )  # fmt: skip
    for base in range(0, whole, KV_CHUNK):
        count = min(KV_CHUNK, whole - base)
        _load_chunk(pages[blocks[base // KV_CHUNK]], width, wide, count, chunk)
        for first in range(base, whole, item.tokens):
            tokens = min(item.tokens, whole - first)
            _load_tile(item, first, tokens, q, lse, grad, deltas, grad_q, wide, deep, tile)
            _weights_and_slopes(item, first, tokens, base, count, width, rank, wide, deep, scale, tile, chunk)
            _add_gradients(wide, deep, tile, chunk)
            _store_queries(item, first, tokens, wide, tile, grad_q)
        for j in range(count):
            for d in range(width):
                grad_latents[item.row + base + j, d] = chunk.grad[j * wide + d]
    if whole < item.count:
        tile = _new_tile(item.heads, wide, deep)
        gathered = np.empty((KV_CHUNK, width), pages.dtype)
        for token in range(whole, item.count):
            listed = chosen[item.row + token]
            for base in range(0, whole, KV_CHUNK):
                count = min(KV_CHUNK, whole - base)
                gather_rows(
                    pages.reshape(-1), blocks, KV_CHUNK, width, listed, base, count, gathered.reshape(-1)
                )  # fmt: skip
                _load_chunk(gathered, width, wide, count, chunk)
                _load_tile(item, token, 1, q, lse, grad, deltas, grad_q, wide, deep, tile)
                _weights_and_slopes(item, count - 1, 1, 0, count, width, rank, wide, deep, scale, tile, chunk)
                _add_gradients(wide, deep, tile, chunk)
                _store_queries(item, token, 1, wide, tile, grad_q)
                for j in range(count):
                    target = grad_latents[item.row + listed[base + j]]
                    for d in range(width):
                        target[d] += chunk.grad[j * wide + d]


@kernel_part
def _new_tile(rows: int, wide: int, deep: int) -> Any:
    """Make a tile of rows of zeros, as many as fill fours."""
    rows = (rows + 3) // 4 * 4
    return _Tile(
        np.zeros(rows * wide, np.float32), np.zeros(rows * wide, np.float32), np.zeros(rows * deep, np.float32),
        np.zeros(rows, np.float32), np.zeros(rows, np.float32), np.zeros(rows * KV_CHUNK, np.float32),
        np.zeros(rows * KV_CHUNK, np.float32), np.zeros(rows * KV_CHUNK, np.float32),
        np.zeros(rows * KV_CHUNK, np.float32),
    )  # fmt: skip


@kernel_part
def _store_queries(item: Any, first: int, tokens: int, wide: int, tile: Any, grad_q: Any) -> None:
    """Store the gradient of a tile's queries so far."""
    for r in range(tokens * item.heads):
        target = grad_q[item.row + first + r // item.heads, item.head + r % item.heads]
        for d in range(len(target)):
            target[d] = tile.grad_query[r * wide + d]


@kernel_part
def _load_chunk(page: Any, width: int, wide: int, count: int, chunk: Any) -> None:
    """Load the keys of a chunk from its page ``[C, W]``, 0 where there is no token; their gradient begins with 0."""
    chunk.grad[:] = _ZERO
    for j in range(KV_CHUNK):
        for d in range(width):
            key = widen(page[j, d]) if j < count else _ZERO
            chunk.keys[d * KV_CHUNK + j] = key
            chunk.key_rows[j * wide + d] = key


@kernel_part
def _load_tile(
    item: Any, first: int, tokens: int, q: Any, lse: Any, grad: Any, deltas: Any, grad_q: Any, wide: int, deep: int,
    tile: Any,
) -> None:  # fmt: skip
    """Load the rows of ``tokens`` tokens from ``first`` on, and the gradient of their queries so far."""
    for r in range(tokens * item.heads):
        token, head = item.row + first + r // item.heads, item.head + r % item.heads
        tile.delta[r], tile.level[r] = deltas[token, head], lse[token, head]
        for d in range(q.shape[2]):
            tile.query[r * wide + d] = widen(q[token, head, d])
            tile.grad_query[r * wide + d] = grad_q[token, head, d]
        for d in range(grad.shape[2]):
            tile.upstream[r * deep + d] = widen(grad[token, head, d])


@kernel_part
def _weights_and_slopes(
    item: Any, first: int, tokens: int, base: int, count: int, width: int, rank: int, wide: int, deep: int, scale: Any,
    tile: Any, chunk: Any,
) -> None:  # fmt: skip
    """Compute the probabilities of the rows on a chunk, and the gradients of their raw scores; 0 where unseen."""
    rows = len(tile.delta)
    for r in range(0, rows, 4):
        tile_multiply(
            4, 4, Rows(tile.query, r * wide, wide), Rows(chunk.keys, 0, KV_CHUNK), width,
            Rows(tile.weights, r * KV_CHUNK, KV_CHUNK),
        )  # fmt: skip
        tile_multiply(
            4, 4, Rows(tile.upstream, r * deep, deep), Rows(chunk.keys, 0, KV_CHUNK), rank,
            Rows(tile.slopes, r * KV_CHUNK, KV_CHUNK),
        )  # fmt: skip
    for r in range(rows):
        seen = min(count, first + r // item.heads + 1 - base) if r < tokens * item.heads else 0
        at, level, delta = r * KV_CHUNK, tile.level[r], tile.delta[r]
        for j in range(KV_CHUNK):
            p = exp(tile.weights[at + j] * scale - level) if j < seen else _ZERO
            tile.weights[at + j] = p
            tile.slopes[at + j] = p * (tile.slopes[at + j] - delta) * scale if j < seen else _ZERO
        for j in range(KV_CHUNK):
            tile.turned_weights[j * rows + r] = tile.weights[at + j]
            tile.turned_slopes[j * rows + r] = tile.slopes[at + j]


@kernel_part
def _add_gradients(wide: int, deep: int, tile: Any, chunk: Any) -> None:
    """Add to the gradients of the queries, and of the chunk's keys and values."""
    rows = len(tile.delta)
    for r in range(0, rows, 4):
        _add(Rows(tile.slopes, r * KV_CHUNK, KV_CHUNK), chunk.key_rows, wide, wide, KV_CHUNK, tile.grad_query, r * wide)
    for j in range(0, KV_CHUNK, 4):
        _add(Rows(tile.turned_slopes, j * rows, rows), tile.query, wide, wide, rows, chunk.grad, j * wide)
        _add(Rows(tile.turned_weights, j * rows, rows), tile.upstream, deep, wide, rows, chunk.grad, j * wide)


@inlined_part
def _add(weights: Any, vectors: Any, columns: int, out_stride: int, count: int, out: Any, at: int) -> None:
    """Add to four rows of ``out`` the sums of ``count`` weighted vectors, in whole vectors of columns."""
    d = 0
    while d < columns:
        wide = 4 if d + 4 * LANES <= columns else (2 if d + 2 * LANES <= columns else 1)
        tile_multiply_add(4, wide, weights, Rows(vectors, d, columns), count, Rows(out, at + d, out_stride))
        d += wide * LANES
