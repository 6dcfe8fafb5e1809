"""Compute paged causal attention on the CPU, forward: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* A query row walks its keys in chunks of `KV_CHUNK` tokens anchored at position 0 of its own sequence,
  through one online-softmax accumulator, in order. Nothing else enters its arithmetic: not the number
  of rows, not where a prefill chunk began, not the block size, not the number of threads.
* What a chunk does to a row is in `softmax`.

A page holds ``block_size`` tokens of one layer: ``pages[block, kv_head, 0]`` is the keys as ``[D, B]``
(scores vectorise over tokens), ``pages[block, kv_head, 1]`` the values as ``[B, D]`` (the output
vectorises over the head).

T tokens, S sequences, H heads, G query heads a KV head, D head size, B tokens a block, C tokens a chunk,
W blocks of the longest table, N tiles, M work items.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.attention.groups import Following, Pieces, Place, Shape, Softmax
from samebit.kernels.cpu.attention.softmax import (
    begin_rows,
    place_running,
    rows_from,
    size_of_running,
    take_in,
    write_rows,
)
from samebit.kernels.cpu.base.callee import Callee
from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import elements, longs, scratch, whole_lines
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.layout.grids import KV_CHUNK, LANES, QUERY_TILE

_VECTORS = KV_CHUNK // LANES
_ITEMS_A_THREAD = 4
"""Tiles are bunched where that leaves this count of items for each thread: an even load."""

_MOST_BEHIND = 32
_BYTES_BEHIND = 3 << 17
"""The most chunks, and bytes, of tiles' own that are asked for while what they share is computed: a part of a
second-level cache."""

_PLACES = 2 * _VECTORS * (2 + _MOST_BEHIND)
"""Numbers of `Pieces`: where the pieces of a chunk and of those that come begin."""

_ARRAYS = 2
"""Count of arrays that a thread's room holds beside the running softmax, each from the start of a cache line on."""


def _attend(
    q: Any, pages: Any, sequences: Any, block_tables: Any, tiles: Any, bunches: Any, scales: Any, sinks: Any, out: Any,
    lse: Any, threads: int,
) -> None:  # fmt: skip
    """Attend, T rows of S sequences.

    Args:
        q: ``[T, H, D]``.
        pages: ``[blocks, KV heads, 2, D * B]``.
        sequences: ``[4, S]``, first row, length, start and row of the block tables of each.
        block_tables: ``[tables, W]``.
        tiles: ``[N, 2]``, sequence and first row in it of what is computed together for one KV head.
        bunches: ``[M + 1, 2]``, first tile of each work item, and how many chunks its tiles read from the same blocks;
            behind the last (N, 0).
        scales: factor on the scores, their softcap (0 for off), and how many tokens a token sees (0 for all).
        sinks: ``[H]``, the score that a head's softmax begins with; empty for none.
        out: ``[T, H, D]``.
        lse: ``[T, H]``, gets the log-sum-exp of the scores; empty to get none.
        threads: take the work items in turns: even loads.
    """
    head_dim, kv_heads = q.shape[2], pages.shape[1]
    together = (len(bunches) - 1) * kv_heads >= _ITEMS_A_THREAD * threads and scales[2] == 0
    rows = most_rows(sequences, tiles, bunches, together) * (q.shape[1] // kv_heads)
    copied = 2 * head_dim * KV_CHUNK if pages.shape[3] < LANES * head_dim else 0
    size = whole_lines(size_of_running(rows, head_dim, head_dim) + 2 * _PLACES + copied + _ARRAYS * LANES)
    share_out(
        _attend_items, threads, threads,
        (threads, q, pages, sequences, block_tables, (tiles, bunches, together, rows), scales, sinks, (out, lse),
         scratch(threads * size), size),
    )  # fmt: skip


@kernel_part
def most_rows(sequences: Any, tiles: Any, bunches: Any, together: bool) -> int:
    """Return the most tokens of an item."""
    most = 0
    for bunch in range(len(bunches) - 1):
        count = 0
        for tile in range(bunches[bunch, 0], bunches[bunch + 1, 0]):
            own = min(QUERY_TILE, sequences[1, tiles[tile, 0]] - tiles[tile, 1])
            count = count + own if together else max(count, own)
        most = max(most, count)
    return most


attend = compile_kernel(_attend)
attend_part = Callee(attend)


@kernel_part
def _attend_items(
    thread: int, threads: int, q: Any, pages: Any, sequences: Any, block_tables: Any, work: Any, scales: Any,
    sinks: Any, results: Any, rooms: Any, size: int,
) -> None:  # fmt: skip
    """Attend for every ``threads``-th item from ``thread`` on; ``work``: tiles, their bunches, whether those are the
    items, and the most rows of one; ``results``: ``out`` and ``lse``.

    What is kept meanwhile lies in its room of ``size``, as arrays over its address: reading arrays that count their
    references from a named tuple counts each time, which made a decode step a quarter slower. The caller holds
    ``rooms``.
    """
    tiles, bunches, together, rows = work
    out, lse = results
    kv_heads, head_dim = pages.shape[1], q.shape[2]
    shape = Shape(kv_heads, q.shape[1] // kv_heads, head_dim, head_dim, pages.shape[3] // head_dim)
    softmax = Softmax(scales[0], scales[1], scales[2])
    flat = pages.reshape(-1)
    kind = pages.dtype.type(0)
    running, end = place_running(rooms.ctypes.data + 4 * thread * size, rows, head_dim, head_dim)
    pieces = _place_pieces(end, flat, kind, shape)
    most_behind = min(_MOST_BEHIND, _BYTES_BEHIND // (2 * head_dim * KV_CHUNK * pages.itemsize))
    count = len(bunches) - 1 if together else len(tiles)
    for item in range(thread, count * kv_heads, threads):
        bunch, head = item // kv_heads, item % kv_heads
        after = min(item + threads, count * kv_heads - 1)  # what the thread does next
        first, last, shared = bunch, bunch + 1, 0
        coming = after // kv_heads
        if together:
            first, last, shared = bunches[bunch, 0], bunches[bunch + 1, 0], bunches[bunch, 1]
            coming = bunches[coming, 0]
        begun = 0
        for tile in range(first, last):
            place = _place(sequences, tiles, tile, head)
            begin_rows(q, sinks, shape, place, rows_from(running, begun, shape))
            begun += place.count * shape.group
        if shared > 0:
            place = _place(sequences, tiles, first, head)
            behind = _locate_behind(
                block_tables, sequences, tiles, shape, head, (first, last, shared),
                min(most_behind, shared * ((begun - 1) // 4)), pieces,
            )  # fmt: skip
            following = Following(-1, place.table, head, 0, behind)
            _attend_chunks(
                flat, block_tables, shape, softmax, place, following, begun, (0, shared), running, pieces
            )  # fmt: skip
        begun = 0
        for tile in range(first, last):
            place = _place(sequences, tiles, tile, head)
            own = rows_from(running, begun, shape)
            last_table = sequences[3, tiles[tile - 1, 0]] if tile > 0 else -1
            if tile + 1 < last:
                following = Following(last_table, sequences[3, tiles[tile + 1, 0]], head, shared * KV_CHUNK, 0)
            else:
                following = Following(last_table, sequences[3, tiles[coming, 0]], after % kv_heads, 0, 0)
            rows_of_tile, chunks = place.count * shape.group, _chunks_of_tile(softmax, place, shared)
            _attend_chunks(
                flat, block_tables, shape, softmax, place, following, rows_of_tile, chunks, own, pieces
            )  # fmt: skip
            write_rows(shape, place, own, out, lse)
            begun += place.count * shape.group


@inlined_part
def _place(sequences: Any, tiles: Any, tile: int, head: int) -> Any:
    """Name what is computed of a tile for one KV head."""
    sequence, first = tiles[tile, 0], tiles[tile, 1]
    return Place(
        sequences[3, sequence], sequences[0, sequence] + first, sequences[2, sequence] + first,
        min(QUERY_TILE, sequences[1, sequence] - first), head,
    )  # fmt: skip


@inlined_part
def _place_pieces(address: int, pages: Any, kind: Any, shape: Any) -> Any:
    """Place the beginnings of a chunk's pieces, and a copy of it if pages are smaller than a vector."""
    small = shape.block_size < LANES
    copied = elements(address + 8 * _PLACES, 2 * shape.head_dim * KV_CHUNK, kind)
    source, stride = (copied, KV_CHUNK) if small else (pages, shape.block_size)
    places = longs(address, _PLACES)
    places[:] = 0
    half = _PLACES // 2
    return Pieces(
        source, stride, places[:_VECTORS], places[half : half + _VECTORS], places[_VECTORS:half],
        places[half + _VECTORS :],
    )  # fmt: skip


@inlined_part
def _chunks_of_tile(softmax: Any, place: Any, shared: int) -> Any:
    """Return the chunks that a tile's rows see, from the first to before the last, after those taken in with others."""
    window, newest = softmax.window, place.position + place.count - 1
    begin = max(0, place.position - window + 1) // KV_CHUNK if window > 0 else shared
    return begin, newest // KV_CHUNK + 1


@inlined_part
def _locate_behind(
    block_tables: Any, sequences: Any, tiles: Any, shape: Any, kv_head: int, work: Any, most: int, pieces: Any
) -> int:
    """Locate up to ``most`` chunks that tiles read by themselves behind those that they share, but the very first;
    return how many.

    The computation of what is shared hardly reads memory, that of what is not waits for it: so one asks for the other.

    work: the first tile, the one behind the last, and how many chunks they share.
    """
    first, last, shared = work
    if shape.block_size < LANES:
        return 0
    count, chunk = 0, shared + 1
    for tile in range(first, last):
        sequence = tiles[tile, 0]
        newest = sequences[2, sequence] + tiles[tile, 1]
        while count < most and chunk * KV_CHUNK <= newest:
            at = (1 + count) * _VECTORS
            _locate(
                block_tables[sequences[3, sequence]], kv_head, shape, chunk * KV_CHUNK, newest,
                pieces.coming_keys[at:], pieces.coming_values[at:],
            )  # fmt: skip
            count, chunk = count + 1, chunk + 1
        chunk = shared
    return count


@kernel_part
def _attend_chunks(
    pages: Any, block_tables: Any, shape: Any, softmax: Any, place: Any, following: Any, rows: int, chunks: Any,
    running: Any, pieces: Any,
) -> None:  # fmt: skip
    """Take in some of the chunks that ``rows`` rows see in the blocks of the tile at ``place``, in order.

    Those of one tile and those of several are taken in by this code, which is half of the kernel.
    """
    begin, end = chunks
    behind = 0
    for chunk in range(begin, end):
        cold = _find_chunk(pages, block_tables, shape, place, following, chunk * KV_CHUNK, pieces)
        last = following.behind * (chunk - begin + 1) // (end - begin)
        take_in(shape, softmax, rows, chunk * KV_CHUNK, (cold, behind, last), running, pieces)
        behind = last


@inlined_part
def _find_chunk(pages: Any, block_tables: Any, shape: Any, place: Any, following: Any, base: int, pieces: Any) -> Any:
    """Locate or copy the chunk at ``base``, and locate what comes next; return whether to ask for it."""
    newest = place.position + place.count - 1
    if shape.block_size < LANES:
        _copy_chunk(pages, block_tables, shape, place, base, newest, pieces)
        return False
    _locate(block_tables[place.table], place.kv_head, shape, base, newest, pieces.keys, pieces.values)
    return _locate_coming(block_tables, shape, place, following, base + KV_CHUNK, newest, pieces)


@inlined_part
def _locate_coming(
    block_tables: Any, shape: Any, place: Any, following: Any, base: int, newest: int, pieces: Any
) -> Any:
    """Locate the chunk that comes next, the one at ``base`` or the next item's first; return whether to ask for it.

    Blocks that were read shortly before are cached: those of the sequence before, or of this one, if both have them.
    """
    if base <= newest:
        table, head, last, at, reference = place.table, place.kv_head, newest, base, following.last_table
    else:
        table, head, at = following.table, following.kv_head, following.first
        last = min(at + KV_CHUNK, block_tables.shape[1] * shape.block_size) - 1  # its tokens may be fewer
        reference = following.last_table if following.table == place.table else place.table
    _locate(block_tables[table], head, shape, at, last, pieces.coming_keys, pieces.coming_values)
    block = at // shape.block_size
    return reference < 0 or block_tables[table, block] != block_tables[reference, block]


@inlined_part
def _locate(blocks: Any, kv_head: int, shape: Any, base: int, newest: int, keys: Any, values: Any) -> None:
    """Find where the keys and values of each sixteen tokens from ``base`` on begin.

    Beyond the newest token they are those of the newest: they are not read, only fetched.
    """
    block_size, head_dim = shape.block_size, shape.head_dim
    half = head_dim * block_size
    for c in range(_VECTORS):
        token = min(base + c * LANES, newest // LANES * LANES)
        inside = token % block_size
        page = (np.int64(blocks[token // block_size]) * shape.kv_heads + kv_head) * 2 * half
        keys[c] = page + inside
        values[c] = page + half + inside * head_dim


@inlined_part
def _copy_chunk(pages: Any, block_tables: Any, shape: Any, place: Any, base: int, newest: int, pieces: Any) -> None:
    """Copy a chunk from pages smaller than a vector, as keys ``[D, C]`` and values ``[C, D]``."""
    block_size, head_dim, copied = shape.block_size, shape.head_dim, pieces.source
    half = head_dim * block_size
    for j in range(min(KV_CHUNK, newest + 1 - base)):
        inside = (base + j) % block_size
        block = np.int64(block_tables[place.table, (base + j) // block_size])
        page = (block * shape.kv_heads + place.kv_head) * 2 * half
        for d in range(head_dim):
            copied[d * KV_CHUNK + j] = pages[page + d * block_size + inside]
            copied[(KV_CHUNK + j) * head_dim + d] = pages[page + half + inside * head_dim + d]
    for c in range(_VECTORS):
        pieces.keys[c] = c * LANES
        pieces.values[c] = (KV_CHUNK + c * LANES) * head_dim
