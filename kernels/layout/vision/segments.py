"""Lay out rows that attend to all rows of their own segment: the windows and images of a vision tower.

Invariants:

* A row is a decode of a sequence: it sees the keys of its segment from position 0 up to the newest, as a token that is
  computed last does. So segments have the arithmetic, the row rule and the grid rule of causal attention.
* Rows of a segment are computed together, as many as an item has room for, which changes no bit of them.
* It is immutable, and worked out once for all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from samebit.kernels.layout.attention_work import ITEM, AttentionWork, names_of_items
from samebit.kernels.layout.call_rows import Ints
from samebit.kernels.layout.forward_context import ForwardContext, training_context
from samebit.kernels.layout.grids import KV_CHUNK, QUERY_TILE, ceil_div
from samebit.kernels.layout.transfer import Arrays


@dataclass(frozen=True, eq=False)
class Segments:
    """Holds the segments of T rows, one behind the other.

    Attributes:
        lengths: ``[S]`` rows of each.
        keys: a training call in which each segment is a sequence: where the rows' keys and values go.
        rows: a call in which each row is the newest token of its segment: what it reads.
    """

    lengths: Ints
    keys: ForwardContext
    rows: ForwardContext

    @staticmethod
    def of(lengths: Sequence[int] | torch.Tensor, device: str | torch.device = "cpu") -> "Segments":
        """Lay out consecutive segments of these lengths, for queries on this device.

        Raises:
            ValueError: no lengths, or one below 1.
            TypeError: lengths that are no integers.
        """
        counts = _checked(lengths)
        firsts = np.cumsum(counts) - counts
        rows = int(counts.sum())
        places = torch.from_numpy(np.arange(rows) - np.repeat(firsts, counts))
        keys = training_context((1, rows), None, places[None], device)
        order, ones, newest = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32), np.repeat(counts - 1, counts)
        none = np.empty(0, np.int32)
        work = _SegmentWork(order, order, ones, newest, none, none, counts)
        reads = ForwardContext(
            positions=keys.positions,
            row_start=order,
            lengths=ones,
            starts=newest,
            table_rows=np.repeat(keys.table_rows, counts),
            block_tables=keys.block_tables,
            block_size=keys.block_size,
            known={"tiles": _tiles(rows), "bunches": _bunches(counts), "work": work},
        )
        return Segments(counts, keys, reads)

    @property
    def num_rows(self) -> int:
        """Return T."""
        return self.keys.num_rows

    @property
    def firsts(self) -> Ints:
        """Return the first row of each segment, ``[S]``."""
        return self.keys.row_start

    @property
    def device(self) -> torch.device:
        """Return where queries are."""
        return self.keys.positions.device


@dataclass(frozen=True, eq=False)
class _SegmentWork(AttentionWork):
    """Lists items for a GPU that walk the keys of a segment once for several of its rows.

    Attributes:
        segments: ``[S]`` rows of each segment.
    """

    segments: Ints

    def items(self, tokens: int) -> Arrays:
        """List ``[N, ITEM]`` pieces of at most ``tokens`` rows; no softmaxes are kept."""
        owner, first, count = _pieces(self.segments, tokens)
        length, nothing = self.segments[owner], np.zeros_like(first)
        kept, pieces = names_of_items(tokens)
        columns = (first, first, count, length - 1, nothing, length, nothing, nothing)
        return {kept: np.empty((0, ITEM), np.int32), pieces: np.stack(columns, axis=1).astype(np.int32)}


def _checked(lengths: Sequence[int] | torch.Tensor) -> Ints:
    counts = np.asarray(lengths.detach().cpu() if isinstance(lengths, torch.Tensor) else lengths)
    if counts.ndim != 1 or not len(counts):
        raise ValueError(f"lengths of segments have the shape {list(counts.shape)}; allowed: [S], at least one")
    if counts.dtype.kind not in "iu":
        raise TypeError(f"lengths of segments are {counts.dtype}; allowed: integers")
    if counts.min() < 1:
        raise ValueError(f"a segment has {counts.min()} rows; allowed: at least 1")
    return counts.astype(np.int32)


def _tiles(rows: int) -> Ints:
    """List ``[T, 2]`` (row, 0): each row is a sequence of one tile."""
    tiles = np.zeros((rows, 2), np.int32)
    tiles[:, 0] = np.arange(rows)
    return tiles


def _bunches(lengths: Ints) -> Ints:
    """List `CallRows.bunches` of rows that share all chunks of their segment, the last too: they see all it holds."""
    owner, first, _ = _pieces(lengths, QUERY_TILE)
    bunches = np.stack([first, ceil_div(lengths, KV_CHUNK)[owner]], axis=1)
    return np.concatenate([bunches, [[lengths.sum(), 0]]]).astype(np.int32)


def _pieces(lengths: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Cut segments into pieces of at most ``most`` rows: of each piece its segment, first row and count of rows."""
    counts = ceil_div(lengths, most)
    owner = np.repeat(np.arange(len(lengths)), counts)
    within = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    first = (np.cumsum(lengths) - lengths)[owner] + within
    return owner.astype(np.int32), first.astype(np.int32), np.minimum(most, lengths[owner] - within).astype(np.int32)
