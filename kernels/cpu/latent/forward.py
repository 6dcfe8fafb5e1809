"""Compute attention over latents on the CPU, forward: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* A query row walks its keys in chunks of `KV_CHUNK` tokens anchored at position 0 of its own sequence, through one
  online-softmax accumulator, in order (`cpu.attention.softmax`). How many heads and tokens an item has, the block size
  and the number of threads enter nowhere.
* A row with a list of chosen tokens walks chunks of the list, by the same code. One with no more tokens than would be
  chosen walks all of them: the same chunks.
* A key is a row of a page, ``rank + rope`` elements; its first ``rank`` are the value. All heads read the same.

A chunk is copied once for all rows of an item, widened, keys as ``[W, C]`` (scores vectorise over tokens) and values as
``[C, R]`` (the output vectorises over the latent). T tokens, S sequences, H heads, W elements of a key, R of a value, B
tokens a block, C tokens a chunk.
"""

from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.attention.groups import Pieces, Place, Shape, Softmax
from samebit.kernels.cpu.attention.softmax import begin_rows, place_running, size_of_running, take_in, write_rows
from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import floats, longs, scratch, whole_lines
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.latent.chunks import copy_keys, copy_values, gather_rows
from samebit.kernels.layout.grids import KV_CHUNK, LANES, QUERY_TILE

_VECTORS = KV_CHUNK // LANES

_ARRAYS = 3
"""The room of a thread holds so many arrays beside the running softmax, each from the start of a cache line on."""

_ROWS = 256
"""Rows that take in a chunk together, at least a token's heads: what is kept for them stays in the cache."""

_ZERO = np.float32(0.0)


def _attend(
    q: Any, pages: Any, sequences: Any, block_tables: Any, tiles: Any, chosen: Any, heads: int, scale: Any, out: Any,
    lse: Any, threads: int,
) -> None:  # fmt: skip
    """Attend, T rows of S sequences.

    Args:
        q: ``[T, H, W]``.
        pages: ``[blocks, B, W]``.
        sequences: ``[4, S]``, first row, length, start and row of the block tables of each.
        block_tables: ``[tables, blocks of a sequence]``.
        tiles: ``[N, 2]``, sequence and first row in it of each `QUERY_TILE` tokens.
        chosen: ``[T, K]``, positions that a row with more than K tokens attends to, ascending; K is 0 for all.
        heads: of an item; they divide H.
        scale: factor on the scores.
        out: ``[T, H, R]``.
        lse: ``[T, H]``, gets the log-sum-exp of the scores; empty to get none.
        threads: take the work items in turns: even loads.
    """
    width, rank = q.shape[2], out.shape[2]
    tokens = _tokens(heads)
    running = size_of_running(tokens * heads, width, rank)
    size = whole_lines(running + (width + rank) * KV_CHUNK + 8 * _VECTORS + _ARRAYS * LANES)
    share_out(
        _attend_items, threads, threads,
        (threads, q, pages, sequences, block_tables, tiles, chosen, heads, scale, out, lse, scratch(threads * size),
         size),
    )  # fmt: skip


attend = compile_kernel(_attend)


@inlined_part
def _tokens(heads: int) -> int:
    """Return how many tokens of a tile are an item's: a power of two."""
    tokens = QUERY_TILE
    while tokens > 1 and tokens * heads > _ROWS:
        tokens //= 2
    return tokens


@kernel_part
def _attend_items(
    thread: int, threads: int, q: Any, pages: Any, sequences: Any, block_tables: Any, tiles: Any, chosen: Any,
    heads: int, scale: Any, out: Any, lse: Any, rooms: Any, size: int,
) -> None:  # fmt: skip
    """Attend for every ``threads``-th item from ``thread`` on; the first items are the first tokens of all tiles.

    What is kept meanwhile lies in its room of ``size``, as arrays over its address. The caller holds ``rooms``.
    """
    groups, block_size, width, rank = q.shape[1] // heads, pages.shape[1], pages.shape[2], out.shape[2]
    shape = Shape(groups, heads, width, rank, block_size)
    softmax = Softmax(scale, _ZERO, 0)
    row_start, lengths, starts, table_rows = sequences[0], sequences[1], sequences[2], sequences[3]
    tokens = _tokens(heads)
    running, end = place_running(rooms.ctypes.data + 4 * thread * size, tokens * heads, width, rank)
    pieces = _place_pieces(end, width, rank)
    top_k, lists = chosen.shape[1], chosen.reshape(-1)
    memory = _Memory(
        pages.reshape(-1), np.empty(KV_CHUNK * width if top_k > 0 else 0, pages.dtype), np.zeros(1, np.int32)
    )
    each = tiles.shape[0] * groups
    for item in range(thread, each * (QUERY_TILE // tokens), threads):
        tile = item % each // groups
        sequence, first = tiles[tile, 0], tiles[tile, 1] + item // each * tokens
        last = min(lengths[sequence], tiles[tile, 1] + QUERY_TILE)
        if first < last:
            place = Place(
                table_rows[sequence], row_start[sequence] + first, starts[sequence] + first,
                min(tokens, last - first), item % groups,
            )  # fmt: skip
            blocks = block_tables[place.table]
            if top_k == 0 or place.position + place.count <= top_k:
                _walk(q, memory, blocks, lists[:0], shape, softmax, place, running, pieces, out, lse)
            else:
                for row in range(place.row, place.row + place.count):
                    position = place.position + row - place.row
                    alone = Place(place.table, row, position, 1, place.kv_head)
                    listed = lists[row * top_k : row * top_k + (top_k if position >= top_k else 0)]
                    _walk(q, memory, blocks, listed, shape, softmax, alone, running, pieces, out, lse)


class _Memory(NamedTuple):
    """Holds the pages, flat, room for a chunk of chosen rows ``[C, W]``, flat, and the table of that one block."""

    pages: Any
    gathered: Any
    table: Any


@kernel_part
def _walk(
    q: Any, memory: Any, blocks: Any, listed: Any, shape: Any, softmax: Any, place: Any, running: Any, pieces: Any,
    out: Any, lse: Any,
) -> None:  # fmt: skip
    """Attend for the rows at a place: to the tokens listed, or up to each row's own where none are listed."""
    rows, width, rank = place.count * shape.group, shape.head_dim, shape.value_dim
    begin_rows(q, pieces.source[:0], shape, place, running)
    many = place.position + place.count
    if len(listed) > 0:
        many = len(listed)
        running.tokens[:rows] = many - 1
    for base in range(0, many, KV_CHUNK):
        count = min(KV_CHUNK, many - base)
        if len(listed) > 0:
            gather_rows(memory.pages, blocks, shape.block_size, width, listed, base, count, memory.gathered)
            copy_keys(memory.gathered, memory.table, KV_CHUNK, width, 0, count, pieces.source)
            copy_values(
                memory.gathered, memory.table, KV_CHUNK, width, rank, 0, count, pieces.source, width * KV_CHUNK
            )  # fmt: skip
        else:
            copy_keys(memory.pages, blocks, shape.block_size, width, base, count, pieces.source)
            copy_values(
                memory.pages, blocks, shape.block_size, width, rank, base, count, pieces.source, width * KV_CHUNK
            )  # fmt: skip
        take_in(shape, softmax, rows, base, False, running, pieces)
    write_rows(shape, place, running, out, lse)


@inlined_part
def _place_pieces(address: int, width: int, rank: int) -> Any:
    """Place the copy of a chunk and the beginnings of its pieces, which never change."""
    places = longs(address, 4 * _VECTORS)
    address += (8 * _VECTORS + LANES - 1) // LANES * LANES * 4
    source = floats(address, (width + rank) * KV_CHUNK)
    for c in range(_VECTORS):
        places[c] = places[2 * _VECTORS + c] = c * LANES
        places[_VECTORS + c] = places[3 * _VECTORS + c] = width * KV_CHUNK + c * LANES * rank
    return Pieces(
        source, KV_CHUNK, places[:_VECTORS], places[_VECTORS : 2 * _VECTORS], places[2 * _VECTORS : 3 * _VECTORS],
        places[3 * _VECTORS :],
    )  # fmt: skip
