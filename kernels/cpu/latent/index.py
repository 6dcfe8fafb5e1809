"""Score the tokens before a row by their index keys on the CPU, and choose the best.

Invariants:

* A score is a chain over the heads, ascending, of fused multiply-adds of a weight and the positive part of a product,
  itself a chain over the elements of a key (or pairs of them, as `dots` says), times the scale. It knows nothing
  else: not the rows or keys beside it, the block size, the threads, nor which part of the keys an item covers.
* Of equal scores the first are chosen; 0 and -0 are equal. A token behind a row's own is never looked at.

Selection bit by bit, most significant first (radix select). T rows, H heads, D elements of a key, B tokens a block, C
tokens a chunk, N pieces, K tokens chosen for a row.
"""

from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.base.callee import Callee
from samebit.kernels.cpu.base.jit import SharedKernel, compile_kernel
from samebit.kernels.cpu.base.memory import elements, floats, integers, longs, scratch, whole_lines
from samebit.kernels.cpu.base.numeric import bits_of, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.many_rows_vectors import transpose_tile
from samebit.kernels.cpu.gemm.pairs import STEP, transpose_pairs
from samebit.kernels.cpu.latent.chunks import copy_rows, find_tokens
from samebit.kernels.cpu.latent.dots import DOTS, TOKENS
from samebit.kernels.cpu.latent.tiles import VECTORS, score_and_fetch
from samebit.kernels.cpu.latent.vectors import add_heads, count_reaching
from samebit.kernels.layout.grids import KV_CHUNK, LANES

_TILE = KV_CHUNK * LANES

_FEW = 8
"""Pieces a thread, at least, that are shared out whole: of fewer, each thread scores a part of the keys."""

_ZERO = np.float32(0.0)
_LEAST = np.int64(-(1 << 31))
"""No key is less."""


def _select(
    queries: Any, weights: Any, pages: Any, sequences: Any, block_tables: Any, slabs: Any, scale: Any, scores: Any,
    chosen: Any, threads: int,
) -> None:  # fmt: skip
    """Score the tokens of rows, slab by slab, and choose; T rows of S sequences.

    Both by one call: the threads that have scored are still awake when they choose.

    Args:
        queries: ``[T, H, D]``.
        weights: ``[T, H]``.
        pages: ``[blocks, B, D]``.
        sequences: ``[4, S]``, first row, length, start and row of the block tables of each.
        block_tables: ``[tables, blocks of a sequence]``.
        slabs: arrays ``begins`` ``[slabs + 1, 2]``, of pieces and of rows; ``pieces`` ``[N, 4]``, sequence, first row
            in it, rows, and the first of them in ``scores``; ``rows``, of q, one after the other, and ``counts``, the
            tokens up to each one's own, more than K.
        scale: factor on the products.
        scores: ``[rows, keys]``, whole chunks; gets the scores of the tokens up to the newest of a piece.
        chosen: ``[T, K]``, gets the chosen of the rows.
        threads: take the items in turns.
    """
    begins, all_pieces, all_rows, all_counts = slabs
    for slab in range(len(begins) - 1):
        pieces = all_pieces[begins[slab, 0] : begins[slab + 1, 0]]
        rows = all_rows[begins[slab, 1] : begins[slab + 1, 1]]
        counts = all_counts[begins[slab, 1] : begins[slab + 1, 1]]
        parts = threads if len(pieces) < _FEW * threads else 1
        most = 0
        for piece in range(len(pieces)):
            most = max(most, pieces[piece, 2])
        lanes, size = whole_lines(most * queries.shape[1]), queries.shape[2]
        room = lanes * (size + KV_CHUNK) + KV_CHUNK * size + 6 * KV_CHUNK
        share_out(
            _score_items, threads, threads,
            (threads, queries, weights, pages, sequences, block_tables, (pieces, parts), scale, scores,
             scratch(threads * room), (lanes, room)),
        )  # fmt: skip
        share_out(_choose_place, len(rows), threads, (scores, rows, counts, chosen))


select = compile_kernel(_select)
select_part = Callee(select)


class _Memory(NamedTuple):
    """Says where an item's tokens lie, and holds what it computes with; all flat.

    pages: of the keys. query: ``[vectors, D, LANES]``, a lane is a head of a
    row; or pairs of elements. words: the same as int32. products: ``[vectors, C, LANES]``, and then with sixteen tokens
    side by side. copied: ``[C, D]``, widened. here, coming, own: ``[C]``, where the tokens of a chunk begin in the
    pages, those of the next one, and copies.
    """

    pages: Any
    query: Any
    words: Any
    products: Any
    copied: Any
    here: Any
    coming: Any
    own: Any


@inlined_part
def _place(pages: Any, size: int, lanes: int, address: int) -> Any:
    """Place an item's memory from an address on."""
    products = address + 4 * lanes * size
    copied = products + 4 * lanes * KV_CHUNK
    at = copied + 4 * KV_CHUNK * size
    return _Memory(
        elements(pages.ctypes.data, pages.size, pages.dtype.type(0)),
        floats(address, lanes * size), integers(address, lanes * size), floats(products, lanes * KV_CHUNK),
        floats(copied, KV_CHUNK * size), longs(at, KV_CHUNK), longs(at + 8 * KV_CHUNK, KV_CHUNK),
        longs(at + 16 * KV_CHUNK, KV_CHUNK),
    )  # fmt: skip


@kernel_part
def _score_items(
    thread: int, threads: int, queries: Any, weights: Any, pages: Any, sequences: Any, block_tables: Any, work: Any,
    scale: Any, scores: Any, rooms: Any, sizes: Any,
) -> None:  # fmt: skip
    """Score every ``threads``-th item from ``thread`` on, in its room. The caller holds ``rooms``.

    ``work``: pieces, and the parts that a piece's chunks are cut into; ``sizes``: lanes, and elements of a room.
    """
    (pieces, parts), (lanes, room) = work, sizes
    heads, size, block_size = queries.shape[1], queries.shape[2], pages.shape[1]
    memory = _place(pages, size, lanes, rooms.ctypes.data + 4 * thread * room)
    for j in range(KV_CHUNK):
        memory.own[j] = j * size
    for item in range(thread, len(pieces) * parts, threads):
        sequence, first, count, to = pieces[item // parts]
        row, newest = sequences[0, sequence] + first, sequences[2, sequence] + first + count - 1
        if DOTS and queries.itemsize < 4:
            _pair_queries(queries.reshape(-1), row * heads * size, count * heads, size, memory)
        else:
            _load_queries(queries.reshape(-1), row * heads * size, count * heads, size, memory.query)
        blocks = block_tables[sequences[3, sequence]]
        chunks, part = newest // KV_CHUNK + 1, item % parts
        begin, end = chunks * part // parts, chunks * (part + 1) // parts
        find_tokens(blocks, block_size, size, begin * KV_CHUNK, newest + 1, memory.coming)
        for chunk in range(begin, end):
            base = chunk * KV_CHUNK
            memory.here[:] = memory.coming
            if chunk + 1 < end:
                find_tokens(blocks, block_size, size, base + KV_CHUNK, newest + 1, memory.coming)
            _multiply(memory, count * heads, size, min(KV_CHUNK, newest + 1 - base), chunk + 1 < end)
            for r in range(count):
                add_heads(memory.products, r * heads, weights[row + r], 0, heads, scale, scores[to + r], base)


@kernel_part
def _load_queries(queries: Any, first: int, rows: int, size: int, query: Any) -> None:
    """Load queries ``[rows, D]`` from the ``first`` element on, zeros in the lanes that fill up the last vector."""
    for v in range(0, rows, LANES):
        whole = size // LANES * LANES if v + LANES <= rows else 0
        for d in range(0, whole, LANES):
            transpose_tile(queries, first + v * size + d, size, query, v * size + d * LANES, LANES)
        for d in range(whole, size):
            for lane in range(LANES):
                at = first + (v + lane) * size + d
                query[v * size + d * LANES + lane] = widen(queries[at]) if v + lane < rows else _ZERO


@kernel_part
def _pair_queries(queries: Any, first: int, rows: int, size: int, memory: Any) -> None:
    """Do as `_load_queries`, in pairs of elements; what is in the lanes that fill up the last vector is never read."""
    steps, whole = (size + 1) // 2, size // STEP * STEP
    for r in range(0, rows, LANES // 2):
        at, to = first + r * size, r // LANES * LANES * steps + r % LANES
        there = min(rows - r, LANES // 2)
        for d in range(0, whole, STEP):
            transpose_pairs(queries, at + d, size, there, memory.query, to + d // 2 * LANES, LANES)
        for d in range(whole, size, 2):
            for lane in range(there):
                word = np.int32(queries[at + lane * size + d])
                if d + 1 < size:
                    word |= np.int32(queries[at + lane * size + d + 1]) << 16
                memory.words[to + d // 2 * LANES + lane] = word


@kernel_part
def _multiply(memory: Any, rows: int, size: int, count: int, more: bool) -> None:
    """Multiply the queries with ``count`` tokens of a chunk; with ``more`` asks for those of the next one meanwhile."""
    vectors = whole_lines(rows) // LANES
    narrow = memory.pages.itemsize < 4
    paired = DOTS and narrow
    steps = (size + 1) // 2 if paired else size
    copied = narrow and not paired
    for v in range(0, vectors, 2):  # what a key is loaded for: two vectors read it from the nearest cache
        last = min(v + 2, vectors)
        if not paired:
            memory.products[v * _TILE : last * _TILE] = _ZERO
        for token in range(0, count, TOKENS):
            if copied and v == 0:
                copy_rows(memory.pages, memory.here, token, TOKENS, 0, size, memory.copied[token * size :], size)
            for own in range(v, last, VECTORS):
                tile = 0 if rows - own * LANES <= LANES // 2 else min(VECTORS, last - own)
                more_to_come = own == 0 and more
                if not copied:
                    score_and_fetch(
                        tile, more_to_come, memory.query, own * steps * LANES, steps * LANES, size, memory.pages,
                        memory.here, 0, token, memory.pages, memory.coming, 0, size, memory.products, own * _TILE,
                    )  # fmt: skip
                else:
                    score_and_fetch(
                        tile, more_to_come, memory.query, own * steps * LANES, steps * LANES, size, memory.copied,
                        memory.own, 0, token, memory.pages, memory.coming, 0, size, memory.products, own * _TILE,
                    )  # fmt: skip
            for own in range(v, last):
                at = own * _TILE + token * LANES
                transpose_tile(memory.products, at, LANES, memory.products, at, LANES)


@kernel_part
def _choose_place(place: int, scores: Any, rows: Any, counts: Any, chosen: Any) -> None:
    _choose_row(scores[place], counts[place], chosen[rows[place]])


def _take(threads: int, rows: Any, counts: Any, chosen: Any) -> None:
    """Write all tokens of rows that see no more than K to their lines of ``chosen`` ``[T, K]``, and -1 behind them."""
    share_out(_take_place, len(rows), threads, (rows, counts, chosen))


@kernel_part
def _take_place(place: int, rows: Any, counts: Any, chosen: Any) -> None:
    out = chosen[rows[place]]
    for token in range(len(out)):
        out[token] = token if token < counts[place] else -1


take = SharedKernel(_take)


@inlined_part
def _ordered(score: Any) -> Any:
    """Return an int32 that compares as the score does."""
    bits = bits_of(score + _ZERO)  # -0 becomes 0
    return np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@kernel_part
def _choose_row(scores: Any, count: int, out: Any) -> None:
    """Write the places of the greatest of the first ``count`` scores, as many as ``out`` holds, ascending.

    The greatest number that as many keys reach as are wanted is found bit by bit.
    """
    keys = np.empty(count, np.int32)
    for token in range(count):
        keys[token] = _ordered(scores[token])
    least, surplus = _LEAST, count - len(out)
    for bit in range(31, -1, -1):
        higher = least + (np.int64(1) << bit)
        more = count_reaching(keys, count, np.int32(higher)) - len(out)
        if more >= 0:
            least, surplus = higher, more
        if more == 0:
            break
    last, filled, token = count, 0, 0
    while surplus > 0:  # of those that equal the least the last are left out
        last -= 1
        surplus -= keys[last] == least
    while filled < len(out):
        out[filled] = token
        filled += keys[token] >= least + (token >= last)
        token += 1
