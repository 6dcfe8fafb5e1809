"""Say which rows of a forward call belong to which sequence, at which positions, in which blocks of which memory.

Invariants:

* It is immutable. Rows of one sequence are consecutive; rows that belong to none are padding.
* Positions count from 0 at the first token of a sequence: padding and packing never shift the KV grid.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout.grids import KV_CHUNK, QUERY_TILE, ceil_div

Ints = npt.NDArray[np.int32]

MOST_BUNCHED = 8
"""The most sequences that are bunched; their rows are no more than a tile's."""


class Numbers(NamedTuple):
    """Holds a number of each kind that a sequence of a call has, as `CallRows` names them."""

    row_start: int
    lengths: int
    starts: int
    table_rows: int


class StepRows(NamedTuple):
    """Holds how a step's sequences are laid out: ``positions`` and ``numbers`` as in `CallRows`, of the rows
    that are drawn from their number and the position of the next token, ``[K]`` int64 each, and other properties by
    their names."""

    positions: npt.NDArray[np.int64]
    numbers: Ints
    last_rows: npt.NDArray[np.int64]
    next_positions: npt.NDArray[np.int64]
    known: dict[str, Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class CallRows:
    """Says where the T rows of a call with S sequences lie.

    Attributes:
        positions: ``[T]`` int64, what rotates each row; 0 for padding.
        row_start: ``[S]`` first row of each sequence.
        lengths: ``[S]`` rows of each sequence in this call, at least 1.
        starts: ``[S]`` tokens of each sequence that earlier calls have put into its pages.
        table_rows: ``[S]`` row of ``block_tables`` that each sequence reads.
        block_tables: ``[rows, W]`` block of each ``block_size`` tokens; block 0 belongs to no sequence.
        block_size: tokens a block (B).
        write_from: ``[S]`` tokens of each sequence that are not written, because the pages have them already;
            None for none.
        captures: ``[M, 3]`` (sequence, absolute position, checkpoint): keep the state of that sequence at that chunk
            boundary, which this call reaches or passes, in that checkpoint of the memory of recurrent layers.
    """

    positions: torch.Tensor
    row_start: Ints
    lengths: Ints
    starts: Ints
    table_rows: Ints
    block_tables: Ints
    block_size: int
    write_from: Ints | None = None
    captures: Ints = field(default_factory=lambda: np.empty((0, 3), np.int32))

    @cached_property
    def tiles(self) -> Ints:
        """List ``[N, 2]`` (sequence, first row within it) of the pieces that attention works on.

        In a step of a tile for each sequence those that begin with the same block are neighbours: the one whose prompt
        was computed runs before its siblings, apart from them.
        """
        if self.is_a_tile_each:
            return _before_zeros(np.argsort(self.block_tables[self.table_rows, 0], kind="stable"))
        counts = ceil_div(self.lengths, QUERY_TILE)
        sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        piece = np.arange(len(sequence), dtype=np.int32) - before
        return np.stack([sequence, piece * QUERY_TILE], axis=1).astype(np.int32)

    @cached_property
    def bunches(self) -> Ints:
        """List ``[M + 1, 2]`` the first of the tiles that one item of attention works on, and how many chunks, from
        position 0 on, all of them read from the same blocks; behind the last (number of tiles, 0).

        In a step of a tile for each sequence neighbours that share chunks are bunched: such chunks end before all of
        their rows. Elsewhere each tile is alone.
        """
        count = len(self.tiles)
        if not self.is_a_tile_each or count < 2 or self.highest.starts < KV_CHUNK:
            return _before_zeros(np.arange(count + 1))
        order = self.tiles[:, 0]
        tables, whole = self.block_tables[self.table_rows[order]], self.starts[order] // KV_CHUNK
        differ = tables[1:] != tables[:-1]
        alike = np.where(differ.any(axis=1), differ.argmax(axis=1), tables.shape[1])
        links = np.minimum(alike * self.block_size // KV_CHUNK, np.minimum(whole[1:], whole[:-1])).tolist()
        lengths = self.lengths[order].tolist()
        bunches, rows = [[0, 0]], lengths[0]
        for tile, (link, length) in enumerate(zip(links, lengths[1:], strict=True), start=1):
            first, shared = bunches[-1]
            has_room = tile - first < MOST_BUNCHED and rows + length <= QUERY_TILE
            if link and has_room and (not shared or shared <= link <= 2 * shared):
                bunches[-1][1], rows = shared or link, rows + length
            else:
                bunches.append([tile, 0])
                rows = length
        return np.array([*bunches, [count, 0]], np.int32)

    @cached_property
    def computed(self) -> tuple[Ints, Ints, Ints]:
        """List of each token that is computed, sequence after sequence, its sequence, its place there, and its row."""
        sequences = np.arange(len(self.lengths), dtype=np.int32)
        if self.is_decode:
            return sequences, np.zeros_like(sequences), self.row_start
        owner = np.repeat(sequences, self.lengths)
        before = (np.cumsum(self.lengths) - self.lengths).astype(np.int32)
        within = np.arange(len(owner), dtype=np.int32) - before[owner]
        return owner, within, self.row_start[owner] + within

    @cached_property
    def is_decode(self) -> bool:
        """Tell whether there are sequences, and each computes one token."""
        return len(self.lengths) > 0 and self.lowest.lengths == self.highest.lengths == 1

    @cached_property
    def is_a_tile_each(self) -> bool:
        """Tell whether there are sequences, and attention works on each in one piece: decodes, and tokens guessed
        behind them."""
        return len(self.lengths) > 0 and self.highest.lengths <= QUERY_TILE

    @cached_property
    def is_a_row_each(self) -> bool:
        """Tell whether each row is the one that the sequence of its number computes."""
        return self.is_decode and np.array_equal(self.row_start, np.arange(self.num_rows))

    @cached_property
    def blocks_and_offsets(self) -> tuple[Ints, Ints]:
        """Return ``[T]`` block and offset in it that each row's key and value go to.

        (0, 0) for padding and for tokens that are not written.
        """
        sequence, within, rows = self.computed
        token = self.starts[sequence] + within
        bits = self.block_size.bit_length() - 1  # a power of two: shifts are several times faster than divisions
        blocks = self.block_tables[self.table_rows[sequence], token >> bits]
        offsets = token & (self.block_size - 1)
        if self.write_from is not None:
            written = token >= self.write_from[sequence]
            blocks, offsets = blocks * written, offsets * written
        if self.is_a_row_each:
            return blocks, offsets
        places = np.zeros((2, self.num_rows), np.int32)
        places[0, rows], places[1, rows] = blocks, offsets
        return places[0], places[1]

    @cached_property
    def tokens_of_rows(self) -> tuple[Ints, Ints]:
        """Return ``[T]`` sequence of each row, and its place among that one's rows of the call; (-1, 0): padding."""
        sequence, within, rows = self.computed
        if self.is_a_row_each:
            return sequence, within
        owners, places = np.full(self.num_rows, -1, np.int32), np.zeros(self.num_rows, np.int32)
        owners[rows], places[rows] = sequence, within
        return owners, places

    @cached_property
    def numbers(self) -> npt.NDArray[np.integer[Any]]:
        """Return ``[4, S]``, the `Numbers` of each sequence."""
        return np.array([self.row_start, self.lengths, self.starts, self.table_rows])

    @cached_property
    def lowest(self) -> Numbers:
        """Return the least of the sequences' numbers; there must be sequences."""
        return Numbers(*self.numbers.min(axis=1).tolist())

    @cached_property
    def highest(self) -> Numbers:
        """Return the greatest, likewise."""
        return Numbers(*self.numbers.max(axis=1).tolist())

    @cached_property
    def layout(self) -> torch.Tensor:
        """Return the `numbers` as int32, for what takes addresses."""
        return torch.from_numpy(self.numbers.astype(np.int32, copy=False))

    @cached_property
    def captured(self) -> torch.Tensor:
        """Return the captures ``[M, 3]`` int32, likewise."""
        return torch.from_numpy(np.ascontiguousarray(self.captures, np.int32))

    @cached_property
    def layout_at(self) -> tuple[int, int]:
        """Return the address of the `layout`, and the number of sequences."""
        return self.layout.data_ptr(), len(self.lengths)

    @cached_property
    def captured_at(self) -> tuple[int, int]:
        """Return the address of what is `captured`, 0 for nothing, and the number of captures."""
        count = len(self.captures)
        return self.captured.data_ptr() if count else 0, count

    @cached_property
    def longest(self) -> int:
        """Return how many tokens the longest sequence has, those of this call included; 0 without sequences."""
        return int((self.starts + self.lengths).max(initial=0))

    @cached_property
    def num_rows(self) -> int:
        """Return T."""
        return len(self.positions)

    @cached_property
    def covers_all_rows(self) -> bool:
        """Return True when no row is padding."""
        return (len(self.lengths) if self.is_decode else int(self.lengths.sum())) == self.num_rows

    @cached_property
    def num_blocks(self) -> int:
        """Return how many blocks the tables name, the null block included (training calls)."""
        return int(self.block_tables.max(initial=0)) + 1


def _before_zeros(numbers: npt.NDArray[np.int64]) -> Ints:
    """Return ``[N, 2]``, each of the numbers before a 0."""
    pairs = np.zeros((len(numbers), 2), np.int32)
    pairs[:, 0] = numbers
    return pairs
