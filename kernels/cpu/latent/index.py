"""Score the tokens before a row by their index keys on the CPU, and choose the best.

Invariants:

* A score is a chain over the heads, ascending, of fused multiply-adds of a weight and the positive part of a product,
  itself a chain over the elements of a key, times the scale. It knows nothing else: not the rows or keys beside it, the
  block size, the threads, nor which part of the keys an item covers.
* Of equal scores the first are chosen; 0 and -0 are equal. A token behind a row's own is never looked at.

Selection by the digits of the scores' bits, most significant first (radix select). T rows, H heads, D elements of a
key, B tokens a block, C tokens a chunk.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel, compile_kernel
from samebit.kernels.cpu.base.memory import scratch
from samebit.kernels.cpu.base.numeric import bits_of, fma, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.rows import Rows
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.base.small_tiles import tile_multiply
from samebit.kernels.cpu.latent.chunks import ask_for_keys, copy_keys
from samebit.kernels.layout.grids import KV_CHUNK, LANES

_TILE = 4
"""Heads that are multiplied with a chunk at once."""

_ZERO = np.float32(0.0)
_HIGH, _MIDDLE = 21, 10
"""Digits are the 11 bits from here on, and the 10 below."""

_DIGITS = 1 << 11


def _score(
    queries: Any, weights: Any, pages: Any, sequences: Any, block_tables: Any, pieces: Any, parts: int, scale: Any,
    scores: Any, threads: int,
) -> None:  # fmt: skip
    """Score, T rows of S sequences.

    Args:
        queries: ``[T, H, D]``.
        weights: ``[T, H]``.
        pages: ``[blocks, B, D]``.
        sequences: ``[4, S]``, first row, length, start and row of the block tables of each.
        block_tables: ``[tables, blocks of a sequence]``.
        pieces: ``[N, 4]``, sequence, first row in it, rows, and the first of them in ``scores``.
        parts: of the keys of a piece, each an item of its own.
        scale: factor on the products.
        scores: ``[rows, keys]``, whole chunks; gets the scores of the tokens up to the newest of a piece.
        threads: take the items in turns.
    """
    share_out(
        _score_items, threads, threads,
        (threads, queries, weights, pages, sequences, block_tables, pieces, parts, scale, scores),
    )  # fmt: skip


score = compile_kernel(_score)


@kernel_part
def _score_items(
    thread: int, threads: int, queries: Any, weights: Any, pages: Any, sequences: Any, block_tables: Any, pieces: Any,
    parts: int, scale: Any, scores: Any,
) -> None:  # fmt: skip
    """Score every ``threads``-th item from ``thread`` on."""
    heads, size = queries.shape[1], queries.shape[2]
    rows = 0
    for piece in range(len(pieces)):
        rows = max(rows, pieces[piece, 2])
    query, keys = scratch((rows * heads + _TILE) * size), scratch((size + LANES) * KV_CHUNK)
    query[:] = _ZERO
    for item in range(thread, len(pieces) * parts, threads):
        _score_item(
            item // parts, item % parts, parts, queries, weights, pages, sequences, block_tables, pieces, scale, scores,
            query, keys,
        )  # fmt: skip


@kernel_part
def _score_item(
    piece: int, part: int, parts: int, queries: Any, weights: Any, pages: Any, sequences: Any, block_tables: Any,
    pieces: Any, scale: Any, scores: Any, query: Any, keys: Any,
) -> None:  # fmt: skip
    """Score a part of the tokens for the rows of a piece."""
    heads, size, block_size = queries.shape[1], queries.shape[2], pages.shape[1]
    sequence, first, count, to = pieces[piece]
    row = sequences[0, sequence] + first
    newest = sequences[2, sequence] + first + count - 1
    for r in range(count):
        for h in range(heads):
            for d in range(size):
                query[(r * heads + h) * size + d] = widen(queries[row + r, h, d])
    flat, blocks = pages.reshape(-1), block_tables[sequences[3, sequence]]
    products = np.zeros(_TILE * KV_CHUNK, np.float32)
    chunks = newest // KV_CHUNK + 1
    for chunk in range(chunks * part // parts, chunks * (part + 1) // parts):
        base = chunk * KV_CHUNK
        copy_keys(flat, blocks, block_size, size, base, min(KV_CHUNK, newest + 1 - base), keys)
        ask_for_keys(flat, blocks, block_size, size, base + KV_CHUNK, min(KV_CHUNK, newest + 1 - base - KV_CHUNK))
        for r in range(count):
            _score_chunk(query, r * heads, weights[row + r], keys, size, scale, products, scores[to + r], base)


@kernel_part
def _score_chunk(
    query: Any, first: int, weights: Any, keys: Any, size: int, scale: Any, products: Any, scores: Any, base: int
) -> None:
    """Write the scores of a row for the chunk at ``base``; its queries are those from the ``first`` on."""
    heads, out = len(weights), scores[base : base + KV_CHUNK]
    out[:] = _ZERO
    for h in range(0, heads, _TILE):
        tile_multiply(
            _TILE, 4, Rows(query, (first + h) * size, size), Rows(keys, 0, KV_CHUNK), size, Rows(products, 0, KV_CHUNK)
        )
        for i in range(min(_TILE, heads - h)):
            weight = weights[h + i]
            for j in range(KV_CHUNK):
                product = products[i * KV_CHUNK + j] * scale
                out[j] = fma(weight, product if product > _ZERO else _ZERO, out[j])


def _choose(threads: int, scores: Any, rows: Any, counts: Any, chosen: Any) -> None:
    """Write the chosen of each of ``rows`` to its line of ``chosen`` ``[T, K]``.

    ``counts``: the tokens up to its own. ``scores``: a line for each of them, empty where none has more than K.
    """
    share_out(_choose_place, len(rows), threads, (scores, rows, counts, chosen))


@kernel_part
def _choose_place(place: int, scores: Any, rows: Any, counts: Any, chosen: Any) -> None:
    count, out = counts[place], chosen[rows[place]]
    if count <= len(out):
        for token in range(count):
            out[token] = token
    else:
        _choose_row(scores[place], count, out)


choose = SharedKernel(_choose)


@inlined_part
def _ordered(score: Any) -> Any:
    """Return a number from 0 to 2**32 - 1 that compares as the score does."""
    bits = np.int64(bits_of(score + _ZERO))  # -0 becomes 0
    return bits + 0x80000000 if bits >= 0 else 0x7FFFFFFF - (bits & 0x7FFFFFFF)


@kernel_part
def _choose_row(scores: Any, count: int, out: Any) -> None:
    """Write the places of the greatest of the first ``count`` scores, as many as ``out`` holds, ascending."""
    left, least = len(out), np.int64(0)
    numbers = np.empty(_DIGITS, np.int32)
    for level in range(3):
        above = _HIGH if level == 1 else _MIDDLE
        numbers[:] = 0
        for token in range(count):
            key = _ordered(scores[token])
            if level == 0:
                numbers[key >> _HIGH] += 1
            elif key >> above == least >> above:
                numbers[key >> _MIDDLE & (_DIGITS - 1) if level == 1 else key & ((1 << _MIDDLE) - 1)] += 1
        digit = _DIGITS - 1
        while numbers[digit] < left:
            left -= numbers[digit]
            digit -= 1
        least += np.int64(digit) << (_HIGH if level == 0 else (_MIDDLE if level == 1 else 0))
    filled = 0
    for token in range(count):  # ``left`` of those that equal the least are chosen, the first
        key = _ordered(scores[token])
        equal = key == least and left > 0
        if key > least or equal:
            out[filled] = token
            filled += 1
            left -= equal
