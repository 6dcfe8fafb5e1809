"""Compute paged causal attention on the CPU, forward: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* A query row walks its keys in chunks of `KV_CHUNK` tokens anchored at position 0 of its own sequence,
  through one online-softmax accumulator, in order. Nothing else enters its arithmetic: not the number
  of rows, not where a prefill chunk began, not the block size, not the number of threads.
* What a chunk does to a row is in `softmax`.

A page holds ``block_size`` tokens of one layer: ``pages[block, kv_head, 0]`` is the keys as ``[D, B]``
(scores vectorise over tokens), ``pages[block, kv_head, 1]`` the values as ``[B, D]`` (the output
vectorises over the head).

T tokens, S sequences, H heads, G query heads a KV head, D head size, B tokens a block, C tokens a chunk.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.attention.groups import Following, Pieces, Place, Shape, Softmax
from samebit.kernels.cpu.attention.softmax import begin_rows, place_running, size_of_running, take_in, write_rows
from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import elements, longs, scratch, whole_lines
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.layout.grids import KV_CHUNK, LANES, QUERY_TILE

_VECTORS = KV_CHUNK // LANES
_ARRAYS = 2
"""Count of arrays that a thread's room holds beside the running softmax, each from the start of a cache line on."""


def _attend(
    q: Any, pages: Any, sequences: Any, block_tables: Any, tiles: Any, scales: Any, sinks: Any, out: Any, lse: Any,
    threads: int,
) -> None:  # fmt: skip
    """Attend, T rows of S sequences.

    Args:
        q: ``[T, H, D]``.
        pages: ``[blocks, KV heads, 2, D * B]``.
        sequences: ``[4, S]``, first row, length, start and row of the block tables of each.
        block_tables: ``[tables, W]``.
        tiles: ``[N, 2]``, sequence and first row in it of what a work item computes for one KV head.
        scales: factor on the scores, their softcap (0 for off), and how many tokens a token sees (0 for all).
        sinks: ``[H]``, the score that a head's softmax begins with; empty for none.
        out: ``[T, H, D]``.
        lse: ``[T, H]``, gets the log-sum-exp of the scores; empty to get none.
        threads: take the work items in turns: even loads.
    """
    head_dim = q.shape[2]
    longest = 0
    for sequence in range(sequences.shape[1]):
        longest = max(longest, min(QUERY_TILE, sequences[1, sequence]))
    rows = longest * (q.shape[1] // pages.shape[1])
    copied = 2 * head_dim * KV_CHUNK if pages.shape[3] < LANES * head_dim else 0
    size = whole_lines(size_of_running(rows, head_dim, head_dim) + 8 * _VECTORS + copied + _ARRAYS * LANES)
    share_out(
        _attend_items, threads, threads,
        (threads, q, pages, sequences, block_tables, tiles, scales, sinks, out, lse, scratch(threads * size), size),
    )  # fmt: skip


attend = compile_kernel(_attend)


@kernel_part
def _attend_items(
    thread: int, threads: int, q: Any, pages: Any, sequences: Any, block_tables: Any, tiles: Any, scales: Any,
    sinks: Any, out: Any, lse: Any, rooms: Any, size: int,
) -> None:  # fmt: skip
    """Attend for every ``threads``-th item from ``thread`` on.

    What is kept meanwhile lies in its room of ``size``, as arrays over its address: reading arrays that count their
    references from a named tuple counts each time, which made a decode step a quarter slower. The caller holds
    ``rooms``.
    """
    kv_heads, head_dim = pages.shape[1], q.shape[2]
    shape = Shape(kv_heads, q.shape[1] // kv_heads, head_dim, head_dim, pages.shape[3] // head_dim)
    softmax = Softmax(scales[0], scales[1], scales[2])
    row_start, lengths, starts, table_rows = sequences[0], sequences[1], sequences[2], sequences[3]
    longest = 0
    for sequence in range(len(lengths)):
        longest = max(longest, min(QUERY_TILE, lengths[sequence]))
    flat = pages.reshape(-1)
    kind = np.zeros(1, pages.dtype)[0]
    running, end = place_running(rooms.ctypes.data + 4 * thread * size, longest * shape.group, head_dim, head_dim)
    pieces = _place_pieces(end, flat, kind, shape)
    items = tiles.shape[0] * kv_heads
    for item in range(thread, items, threads):
        tile, after = item // kv_heads, min(item + threads, items - 1)  # this, and what the thread does next
        sequence, first, coming = tiles[tile, 0], tiles[tile, 1], tiles[after // kv_heads, 0]
        last_table = -1
        if tile > 0:
            last_table = table_rows[tiles[tile - 1, 0]]
        place = Place(
            table_rows[sequence], row_start[sequence] + first, starts[sequence] + first,
            min(QUERY_TILE, lengths[sequence] - first), item % kv_heads,
        )  # fmt: skip
        following = Following(last_table, table_rows[coming], after % kv_heads, starts[coming])
        begin_rows(q, sinks, shape, place, running)
        _attend_tile(flat, block_tables, shape, softmax, place, following, running, pieces)
        write_rows(shape, place, running, out, lse)


@inlined_part
def _place_pieces(address: int, pages: Any, kind: Any, shape: Any) -> Any:
    """Place the beginnings of a chunk's pieces, and a copy of it if pages are smaller than a vector."""
    small = shape.block_size < LANES
    copied = elements(address + 32 * _VECTORS, 2 * shape.head_dim * KV_CHUNK, kind)
    source, stride = (copied, KV_CHUNK) if small else (pages, shape.block_size)
    places = longs(address, 4 * _VECTORS)
    places[:] = 0
    return Pieces(
        source, stride, places[:_VECTORS], places[_VECTORS : 2 * _VECTORS], places[2 * _VECTORS : 3 * _VECTORS],
        places[3 * _VECTORS :],
    )  # fmt: skip


@kernel_part
def _attend_tile(
    pages: Any, block_tables: Any, shape: Any, softmax: Any, place: Any, following: Any, running: Any, pieces: Any
) -> None:
    """Take in all chunks that the item's rows see, in order."""
    window, newest = softmax.window, place.position + place.count - 1
    begin = max(0, place.position - window + 1) // KV_CHUNK if window > 0 else 0
    for chunk in range(begin, newest // KV_CHUNK + 1):
        base = chunk * KV_CHUNK
        cold = False
        if shape.block_size < LANES:
            _copy_chunk(pages, block_tables, shape, place, base, newest, pieces)
        else:
            _locate(block_tables[place.table], place.kv_head, shape, base, newest, pieces.keys, pieces.values)
            cold = _locate_coming(block_tables, shape, place, following, base + KV_CHUNK, newest, pieces)
        take_in(shape, softmax, place.count * shape.group, base, cold, running, pieces)


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
        table, head, last, at = following.table, following.kv_head, following.newest, 0
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
