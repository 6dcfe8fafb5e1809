"""Compute attention over latents on the CPU, forward: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* A query row walks its keys in chunks of `KV_CHUNK` tokens anchored at position 0 of its own sequence, through one
  online-softmax accumulator, in order (`softmax`). How many heads and tokens an item has, the block size and the number
  of threads enter nowhere.
* A row with a list of chosen tokens walks chunks of the list, by the same code. One with no more tokens than would be
  chosen walks all of them: the same chunks.
* A key is a row of a page, ``rank + rope`` elements; its first ``rank`` are the value. All heads read the same.

T tokens, S sequences, H heads, W elements of a key, R of a value, B tokens a block, C tokens a chunk, N tiles, K tokens
chosen for a row.
"""

from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.attention.groups import Place
from samebit.kernels.cpu.base.callee import Callee
from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import copy_elements, elements, floats, integers, longs, scratch, whole_lines
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.latent.chunks import copy_rows, find_chosen, find_tokens
from samebit.kernels.cpu.latent.dots import DOTS, TOKENS
from samebit.kernels.cpu.latent.pairs import PAIRED_ROWS, copy_pairs
from samebit.kernels.cpu.latent.softmax import (
    Following,
    add_weighted,
    begin_rows,
    place_running,
    score,
    score_in_pairs,
    see,
    size_of_running,
    weigh_all,
    whole_columns,
    write_rows,
)
from samebit.kernels.cpu.latent.tiles import COLUMNS, LARGE, NARROW_COLUMNS
from samebit.kernels.layout.grids import KV_CHUNK, LANES, QUERY_TILE

_DEPTH = 192
"""Elements of keys that are copied, and multiplied with all queries, at a time: they stay in the nearest cache."""

_ROWS = 256 if LARGE else 64
"""Rows that take in a chunk together, at least a token's heads: what is kept for them stays in the cache."""


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
        heads: of an item, at most; they divide H. Of few tiles an item has fewer, so that all threads have work.
        scale: factor on the scores.
        out: ``[T, H, R]``.
        lse: ``[T, H]``, gets the log-sum-exp of the scores; empty to get none.
        threads: take the work items in turns: even loads.
    """
    width, rank = q.shape[2], out.shape[2]
    while heads % 2 == 0 and len(tiles) * (q.shape[1] // heads) < threads:
        heads //= 2
    tokens = _tokens(heads)
    deep = whole_columns(rank, pages.itemsize < 4)
    size = whole_lines(size_of_running(tokens * heads, width + 1, deep) + _room(deep) + 8 * KV_CHUNK)
    share_out(
        _attend_items, threads, threads,
        (threads, q, pages, sequences, block_tables, (tiles, chosen, heads), scale, (out, lse),
         scratch(threads * size), size),
    )  # fmt: skip


attend = compile_kernel(_attend)
attend_part = Callee(attend)


@inlined_part
def _tokens(heads: int) -> int:
    """Return how many tokens of a tile are an item's: a power of two."""
    tokens = QUERY_TILE
    while tokens > 1 and tokens * heads > _ROWS:
        tokens //= 2
    return tokens


@inlined_part
def _room(deep: int) -> Any:
    """Return the room for a copy of tokens."""
    return max(deep * KV_CHUNK, _DEPTH * TOKENS)


class _Memory(NamedTuple):
    """Says where tokens lie.

    pages: flat. read: the same as float32, if they are. copied: room in float32, flat. halves: the same as uint16.
    here, coming: ``[C]``, where the tokens of a chunk begin in the pages, and those of the one behind it. own,
    own_values: where parts of keys begin in ``copied``, and values.
    """

    pages: Any
    read: Any
    copied: Any
    halves: Any
    here: Any
    coming: Any
    own: Any
    own_values: Any


@kernel_part
def _attend_items(
    thread: int, threads: int, q: Any, pages: Any, sequences: Any, block_tables: Any, work: Any, scale: Any,
    results: Any, rooms: Any, size: int,
) -> None:  # fmt: skip
    """Attend for every ``threads``-th item from ``thread`` on; the first items are the first tokens of all tiles.

    ``work``: tiles, chosen tokens, and how many heads are an item's; ``results``: ``out`` and ``lse``.

    What is kept meanwhile lies in its room of ``size``, as arrays over its address. The caller holds ``rooms``.
    """
    tiles, chosen, heads = work
    out, lse = results
    groups, block_size, width, rank = q.shape[1] // heads, pages.shape[1], pages.shape[2], out.shape[2]
    row_start, lengths, starts, table_rows = sequences[0], sequences[1], sequences[2], sequences[3]
    tokens = _tokens(heads)
    paired = DOTS and pages.itemsize < 4
    running, end = place_running(rooms.ctypes.data + 4 * thread * size, tokens * heads, width, rank, paired)
    room = _room(running.deep)
    at = end + 4 * room
    memory = _Memory(
        elements(pages.ctypes.data, pages.size, pages.dtype.type(0)), floats(pages.ctypes.data, pages.size),
        floats(end, room), elements(end, 2 * room, np.uint16(0)), longs(at, KV_CHUNK),
        longs(at + 8 * KV_CHUNK, KV_CHUNK), longs(at + 16 * KV_CHUNK, KV_CHUNK), longs(at + 24 * KV_CHUNK, KV_CHUNK),
    )  # fmt: skip
    for j in range(KV_CHUNK):
        memory.own[j], memory.own_values[j] = j % TOKENS * _DEPTH, j * running.deep
    top_k, lists = chosen.shape[1], integers(chosen.ctypes.data, chosen.size)
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
            blocks = integers(
                block_tables.ctypes.data + block_tables.strides[0] * place.table, block_tables.shape[1]
            )  # fmt: skip
            if top_k == 0 or place.position + place.count <= top_k:
                _walk(q, memory, blocks, block_size, lists[:0], heads, scale, place, running, out, lse)
            else:
                for row in range(place.row, place.row + place.count):
                    position = place.position + row - place.row
                    alone = Place(place.table, row, position, 1, place.kv_head)
                    listed = lists[row * top_k : row * top_k + (top_k if position >= top_k else 0)]
                    _walk(q, memory, blocks, block_size, listed, heads, scale, alone, running, out, lse)


@kernel_part
def _walk(
    q: Any, memory: Any, blocks: Any, block_size: int, listed: Any, heads: int, scale: Any, place: Any, running: Any,
    out: Any, lse: Any,
) -> None:  # fmt: skip
    """Attend for the rows at a place: to the tokens listed, or up to each row's own where none are listed."""
    width, rank, rows = q.shape[2], out.shape[2], place.count * heads
    begin_rows(q, heads, place, running)
    halved = memory.pages.itemsize < 4 and rank % (NARROW_COLUMNS * LANES) == 0
    newest, many = place.position, place.position + place.count
    if len(listed) > 0:
        many = len(listed)
        newest = many - 1
    _find(blocks, block_size, width, listed, 0, many, memory.coming)
    for base in range(0, many, KV_CHUNK):
        count = min(KV_CHUNK, many - base)
        memory.here[:] = memory.coming
        if count == KV_CHUNK and base + KV_CHUNK < many:
            _find(blocks, block_size, width, listed, base + KV_CHUNK, many, memory.coming)
        see(heads, newest, base, place.count, running)
        following = Following(memory.pages, memory.coming, base + KV_CHUNK < many, running.deep)
        _score_chunk(memory, rows, width, count, following, running)
        weigh_all(rows, scale, running)
        _add_chunk(memory, rows, width, rank, count, following, running)
    write_rows(heads, rank, halved, place, running, out, lse)


@inlined_part
def _find(blocks: Any, block_size: int, width: int, listed: Any, base: int, many: int, places: Any) -> None:
    """Find where the tokens of the chunk at ``base`` begin; the last stands for those that are not there."""
    if len(listed) > 0:
        find_chosen(blocks, block_size, width, listed, base, many, places)
    else:
        find_tokens(blocks, block_size, width, base, many, places)


@kernel_part
def _score_chunk(memory: Any, rows: int, width: int, count: int, following: Any, running: Any) -> None:
    """Compute the scores of a chunk's first ``count`` tokens; keys that are not paired are widened part by part."""
    if running.paired:
        score(rows, 0, count, 0, width, memory.pages, memory.here, 0, following, running)
        return
    for first in range(0, count, TOKENS):
        for begin in range(0, width, _DEPTH):
            depth = min(_DEPTH, width - begin)
            if memory.pages.itemsize < 4 and rows <= PAIRED_ROWS:
                copy_pairs(memory.pages, memory.here, first, begin, depth, memory.copied, 2 * _DEPTH)
                score_in_pairs(first, begin, depth, memory.copied, 2 * _DEPTH, following, running)
            elif memory.pages.itemsize < 4:
                copy_rows(memory.pages, memory.here, first, TOKENS, begin, depth, memory.copied, _DEPTH)
                score(rows, first, first + TOKENS, begin, depth, memory.copied, memory.own, 0, following, running)
            else:
                score(rows, first, first + TOKENS, begin, depth, memory.read, memory.here, begin, following, running)


@kernel_part
def _add_chunk(memory: Any, rows: int, width: int, rank: int, count: int, following: Any, running: Any) -> None:
    """Add the weighted values of a chunk's first ``count`` tokens: from the pages if their vectors are whole there."""
    narrow = memory.pages.itemsize < 4
    whole = rank % (NARROW_COLUMNS * LANES) == 0
    if narrow and (whole or (running.paired and running.deep <= width)):
        add_weighted(rows, NARROW_COLUMNS, memory.pages, memory.here, following, running)
    elif running.paired:
        for j in range(count):
            copy_elements(memory.pages, memory.here[j], rank, memory.halves, j * running.deep)
        add_weighted(rows, NARROW_COLUMNS, memory.halves, memory.own_values, following, running)
    elif not narrow and rank % LANES == 0:
        add_weighted(rows, COLUMNS[-1], memory.read, memory.here, following, running)
    else:
        copy_rows(memory.pages, memory.here, 0, count, 0, rank, memory.copied, running.deep)
        add_weighted(rows, COLUMNS[-1], memory.copied, memory.own_values, following, running)
