"""Lay a forward call out on the device: what a GPU's kernels read of `CallRows`.

Everything is built on the host and travels in one copy (`samebit.kernels.layout.transfer`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from samebit.kernels.layout.attention_work import AttentionWork, names_of_items, sizes_of_items
from samebit.kernels.layout.call_rows import CallRows
from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.transfer import Arrays, Tensors, sent


@dataclass(frozen=True, eq=False)
class Items:
    """Holds work items of attention on the device, ``[N, ITEM]`` each: ``kept`` first, then ``pieces``."""

    kept: torch.Tensor
    pieces: torch.Tensor

    @staticmethod
    def named(parts: Tensors, tokens: int) -> "Items":
        """Pick the items for this many tokens."""
        kept, pieces = names_of_items(tokens)
        return Items(parts[kept], parts[pieces])


@dataclass(frozen=True, eq=False)
class DeviceLayout:
    """Holds int32 on the device; S sequences, T rows.

    Attributes:
        row_start: ``[S]`` as in `CallRows`; so are ``lengths`` and ``starts``.
        queries: ``[N, 2]`` row and position of each token, in the order of `AttentionWork`.
        slots: ``[S]`` slot of each sequence in the memory of recurrent layers.
        tables: ``[S, W]`` block table of each sequence.
        blocks: ``[T]`` where each row's key and value go to, with ``offsets``.
        sequences: ``[T]`` of each row, -1 for padding; ``within``: its place in it.
        captures: ``[M, 3]``, sorted by sequence; those of sequence s are ``captures[first_capture[s]:first_capture[s +
            1]]``.
        first_capture: ``[S + 1]``.
        work: of attention, on the host.
        tiles_of, items_of, first_tiles_of: what was asked for, by tokens.
    """

    row_start: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    queries: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    sequences: torch.Tensor
    within: torch.Tensor
    captures: torch.Tensor
    first_capture: torch.Tensor
    work: AttentionWork
    tiles_of: dict[int, torch.Tensor]
    items_of: dict[int, Items]
    first_tiles_of: dict[int, torch.Tensor] = field(default_factory=dict, init=False)

    @staticmethod
    def of(call: CallRows, work: AttentionWork, device: torch.device) -> "DeviceLayout":
        """Send the layout of a call to this device."""
        return DeviceLayout.from_parts(sent(layout_parts(call, work), device), work)

    @staticmethod
    def from_parts(parts: Tensors, work: AttentionWork) -> "DeviceLayout":
        """Build the layout from the arrays of `layout_parts`, which are on the device; other names are left out."""
        named = {one.name: parts[one.name] for one in fields(DeviceLayout) if one.name in parts}
        items = {tokens: Items.named(parts, tokens) for tokens in sizes_of_items(parts)}
        return DeviceLayout(**named, work=work, tiles_of={}, items_of=items)

    def tiles(self, tokens: int) -> torch.Tensor:
        """Return ``[N, 2]`` (sequence, first row within it) of the pieces of at most ``tokens``."""
        if tokens not in self.tiles_of:
            self.tiles_of[tokens] = sent({"tiles": self.work.tiles(tokens)}, self.tables.device)["tiles"]
        return self.tiles_of[tokens]

    def first_tiles(self, tokens: int) -> torch.Tensor:
        """Return ``[S]``, where in ``tiles(tokens)`` of a training call each sequence's pieces begin."""
        if tokens not in self.first_tiles_of:
            counts = ceil_div(self.work.lengths, tokens)
            first = (np.cumsum(counts) - counts).astype(np.int32)
            self.first_tiles_of[tokens] = sent({"first": first}, self.tables.device)["first"]
        return self.first_tiles_of[tokens]

    def items(self, tokens: int) -> Items:
        """Return the items of at most ``tokens``."""
        if tokens not in self.items_of:
            self.items_of[tokens] = Items.named(sent(self.work.items(tokens), self.tables.device), tokens)
        return self.items_of[tokens]


def layout_parts(call: CallRows, work: AttentionWork, item_sizes: Iterable[int] = ()) -> Arrays:
    """Return what the device needs of a call; ``item_sizes``: those that `DeviceLayout.items` will be asked for."""
    blocks, offsets = call.blocks_and_offsets
    sequences, within = call.tokens_of_rows
    captures, first_capture = call.captures, np.zeros(len(call.lengths) + 1, np.int32)
    if len(captures):
        captures = captures[np.argsort(captures[:, 0], kind="stable")]
        first_capture = np.searchsorted(captures[:, 0], np.arange(len(first_capture))).astype(np.int32)
    return {
        "row_start": call.row_start,
        "lengths": call.lengths,
        "starts": call.starts,
        "queries": work.queries(),
        "slots": call.table_rows,
        "tables": call.block_tables[call.table_rows],
        "blocks": blocks,
        "offsets": offsets,
        "sequences": sequences,
        "within": within,
        "captures": captures,
        "first_capture": first_capture,
        **{name: array for size in item_sizes for name, array in work.items(size).items()},
    }
