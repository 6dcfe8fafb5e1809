"""Lay out the rows of a rollout's step in one pass.

Behind a step's kernels nothing of Python is in a processor's caches: the forty operations of NumPy that say the same
one by one (`layout.call_rows`) took a third of a millisecond.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.part import inlined_part
from samebit.kernels.layout.call_rows import MOST_BUNCHED, Ints, StepRows
from samebit.kernels.layout.grids import KV_CHUNK, QUERY_TILE

_NO_ORDER = np.empty(0, np.int64)


def _lay_out(
    asked: Any, tables: Any, bits: int, order: Any, numbers: Any, positions: Any, places: Any, tiles: Any, bunches: Any,
    drawn: Any, found: Any,
) -> None:  # fmt: skip
    """Write all arrays.

    ``order``: of the tiles where each sequence has one, empty elsewhere. ``found``: tiles, bunches, rows that sample,
    `longest`, `last_written_block`, and the rows; all stay 0 where a sequence leads out of the tables or the rows.
    """
    size, count, row, sampling, longest, last = 1 << bits, 0, 0, 0, 0, 0
    for sequence in range(len(asked)):
        length, start = np.int64(asked[sequence, 0]), np.int64(asked[sequence, 1])
        table, end = asked[sequence, 2], start + length
        if length < 1 or start < 0 or end > tables.shape[1] * size or row + length > len(positions):
            return
        if asked[sequence, 4] < 0 or asked[sequence, 4] > length:
            return
        if table < 0 or table >= len(tables):
            return
        numbers[0, sequence], numbers[1, sequence] = row, length
        numbers[2, sequence], numbers[3, sequence] = start, table
        for token in range(start, end):
            at, written = row + token - start, token >= asked[sequence, 3]
            positions[at] = token
            places[0, at] = tables[table, token >> bits] if written else 0
            places[1, at] = token & (size - 1) if written else 0
            last = max(last, np.int64(places[0, at]))
        for first in range(0, length, QUERY_TILE):
            tiles[count, 0], tiles[count, 1] = sequence, first
            count += 1
        row, longest = row + length, max(longest, end)
        for behind in range(asked[sequence, 4], 0, -1):
            drawn[0, sampling], drawn[1, sampling] = row - behind, end - behind + 1
            sampling += 1
    for tile in range(len(order)):
        tiles[tile, 0] = order[tile]
    bunched = _bunch(asked, tables, size, tiles[:count], len(order) > 0, bunches)
    found[0], found[1], found[2], found[3], found[4], found[5] = count, bunched, sampling, longest, last, row


@inlined_part
def _bunch(asked: Any, tables: Any, size: int, tiles: Any, is_a_tile_each: bool, bunches: Any) -> int:
    """Write what `CallRows.bunches` lists; return how many that are."""
    last, rows = 0, np.int64(asked[tiles[0, 0], 0] if len(tiles) > 0 else 0)
    bunches[0, 0], bunches[0, 1] = 0, 0
    for tile in range(1, len(tiles)):
        link, length = 0, np.int64(asked[tiles[tile, 0], 0])
        if is_a_tile_each:
            one, other = asked[tiles[tile - 1, 0]], asked[tiles[tile, 0]]
            whole = np.int64(min(one[1], other[1])) // KV_CHUNK
            while link * size < whole * KV_CHUNK and tables[one[2], link] == tables[other[2], link]:
                link += 1
            link = min(whole, link * size // KV_CHUNK)
        shared = bunches[last, 1]
        has_room = tile - bunches[last, 0] < MOST_BUNCHED and rows + length <= QUERY_TILE
        if link and has_room and (not shared or shared <= link <= 2 * shared):
            bunches[last, 1] = shared or link
            rows += length
        else:
            last, rows = last + 1, length
            bunches[last, 0], bunches[last, 1] = tile, 0
    bunches[last + 1, 0], bunches[last + 1, 1] = len(tiles), 0
    return last + 2


_kernel = compile_kernel(_lay_out)


def lay_out(asked: Ints, block_tables: Ints, block_size: int, num_rows: int) -> StepRows:
    """Implement `dispatch.lay_out`."""
    count, most, order = len(asked), len(asked) + num_rows // QUERY_TILE, _NO_ORDER
    if count == num_rows or asked[:, 0].max(initial=0) <= QUERY_TILE:
        order = np.argsort(block_tables[:, 0].take(asked[:, 2], mode="clip"), kind="stable")
    numbers, places = np.empty((4, count), np.int32), np.empty((2, num_rows), np.int32)
    tiles, bunches = np.empty((most, 2), np.int32), np.empty((most + 1, 2), np.int32)
    positions, drawn, found = np.empty(num_rows, np.int64), np.empty((2, num_rows), np.int64), np.zeros(6, np.int64)
    bits = block_size.bit_length() - 1
    _kernel(asked, block_tables, bits, order, numbers, positions, places, tiles, bunches, drawn, found)
    num_tiles, num_bunches, sampling, longest, last, rows = found.tolist()
    if rows != num_rows or not rows:
        raise ValueError(
            f"sequences of (rows, start, table, first written, drawn of) {asked.tolist()} in {num_rows} rows and "
            f"{block_tables.shape} blocks of {block_size}; allowed: all of the rows, within the tables"
        )
    tiles, (blocks, offsets) = tiles[:num_tiles], places
    return StepRows(
        positions, numbers, drawn[0, :sampling], drawn[1, :sampling],
        {
            "num_rows": num_rows, "covers_all_rows": True, "is_decode": count == num_rows, "longest": longest,
            "is_a_row_each": count == num_rows, "numbers": numbers, "tiles": tiles, "bunches": bunches[:num_bunches],
            "blocks_and_offsets": (blocks, offsets), "last_written_block": last,
            "read_by_layers": (blocks, offsets, numbers, block_tables, tiles),
        },
    )  # fmt: skip
