"""The layout of a forward call on the device: what the kernels read of a `ForwardContext`.

Everything is built on the host and travels in one copy (`packing`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from ..context import ForwardContext, Ints
from ..packing import Arrays, Tensors, sent

_TILES = "tiles of "


@dataclass(frozen=True, eq=False)
class DeviceLayout:
    """int32 on the device; S sequences, T rows.

    Attributes:
        row_start: ``[S]`` as in `ForwardContext`; so are ``lengths`` and ``starts``.
        slots: ``[S]`` slot of each sequence in the memory of Mamba layers.
        tables: ``[S, W]`` block table of each sequence.
        blocks: ``[T]`` where each row's key and value go to, with ``offsets``.
        sequences: ``[T]`` of each row, -1 for padding; ``within``: its place in it.
        captures: ``[M, 3]``, sorted by sequence; those of sequence s are ``captures[first_capture[s]:first_capture[s +
            1]]``.
        first_capture: ``[S + 1]``.
    """

    row_start: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    sequences: torch.Tensor
    within: torch.Tensor
    captures: torch.Tensor
    first_capture: torch.Tensor
    host_lengths: Ints
    tiles_of: dict[int, torch.Tensor] = field(default_factory=dict)
    first_tiles_of: dict[int, torch.Tensor] = field(default_factory=dict, init=False)

    @staticmethod
    def of(context: ForwardContext, device: torch.device) -> "DeviceLayout":
        """The context's, on this device."""
        return DeviceLayout.from_parts(sent(layout_parts(context), device), context.lengths)

    @staticmethod
    def from_parts(parts: Tensors, host_lengths: Ints) -> "DeviceLayout":
        """From what `layout_parts` gave, on the device; other names are left out."""
        named = {one.name: parts[one.name] for one in fields(DeviceLayout) if one.name in parts}
        tiles = {int(name.removeprefix(_TILES)): part for name, part in parts.items() if name.startswith(_TILES)}
        return DeviceLayout(**named, host_lengths=host_lengths, tiles_of=tiles)

    def tiles(self, tokens: int) -> torch.Tensor:
        """``[N, 2]`` (sequence, first row within it) of the pieces of so many tokens."""
        if tokens not in self.tiles_of:
            pieces = _pieces(self.host_lengths, tokens)
            self.tiles_of[tokens] = sent({"pieces": pieces}, self.tables.device)["pieces"]
        return self.tiles_of[tokens]

    def first_tiles(self, tokens: int) -> torch.Tensor:
        """``[S]`` where in ``tiles(tokens)`` each sequence's pieces begin."""
        if tokens not in self.first_tiles_of:
            counts = -(-self.host_lengths // tokens)
            first = (np.cumsum(counts) - counts).astype(np.int32)
            self.first_tiles_of[tokens] = sent({"first": first}, self.tables.device)["first"]
        return self.first_tiles_of[tokens]


def on_device(context: ForwardContext, parts: Tensors) -> ForwardContext:
    """The context with its layout, and its ``positions``, as they were sent."""
    layout = DeviceLayout.from_parts(parts, context.lengths)
    return replace(context, positions=parts["positions"], device_layout=layout)


def layout_parts(context: ForwardContext, tile_sizes: Iterable[int] = ()) -> Arrays:
    """What the device needs of a context; ``tile_sizes``: those that `DeviceLayout.tiles` will be asked for."""
    blocks, offsets = context.slots
    sequences, within = context.tokens_of_rows
    captures = context.captures[np.argsort(context.captures[:, 0], kind="stable")]
    return {
        "row_start": context.row_start,
        "lengths": context.lengths,
        "starts": context.starts,
        "slots": context.table_rows,
        "tables": context.block_tables[context.table_rows],
        "blocks": blocks,
        "offsets": offsets,
        "sequences": sequences,
        "within": within,
        "captures": captures,
        "first_capture": np.searchsorted(captures[:, 0], np.arange(len(context.lengths) + 1)).astype(np.int32),
        **{f"{_TILES}{size}": _pieces(context.lengths, size) for size in tile_sizes},
    }


def _pieces(lengths: Ints, tokens: int) -> Ints:
    counts = -(-lengths // tokens)
    sequence = np.repeat(np.arange(len(counts)), counts)
    piece = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([sequence, piece * tokens], axis=1).astype(np.int32)


def room_for_tiles(name: str, rows: int, sequences: int) -> Ints:
    """As many pieces of the sequence after the last as these rows and sequences can have; ``name``: of a part."""
    tokens = int(name.removeprefix(_TILES))
    pieces = np.zeros((-(-rows // tokens) + sequences, 2), np.int32)
    pieces[:, 0] = sequences
    return pieces
