"""The layout of a forward call on the device: what the kernels read of a `ForwardContext`.

Everything is built on the host and travels in one copy, from pinned memory and without waiting.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from ..context import ForwardContext, Ints

_ALIGNMENT = 4
"""Words; each part begins at a multiple of sixteen bytes."""


@dataclass(frozen=True, eq=False)
class DeviceLayout:
    """int32 on the device; S sequences, T rows.

    Attributes:
        row_start: ``[S]`` as in `ForwardContext`; so are ``lengths`` and ``starts``.
        slots: ``[S]`` slot of each sequence in the memory of Mamba layers.
        tables: ``[S, W]`` block table of each sequence.
        blocks: ``[T]`` where each row's key and value go to, with ``offsets``.
        sequences: ``[T]`` of each row, -1 for padding; ``within``: its place in it.
        captures: ``[M, 3]``.
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
    host_lengths: Ints
    _tiles: dict[int, torch.Tensor] = field(init=False, default_factory=dict)

    @staticmethod
    def of(context: ForwardContext, device: torch.device) -> "DeviceLayout":
        """The context's, on this device."""
        blocks, offsets = context.slots
        sequences, within = context.tokens_of_rows
        parts = {
            "row_start": context.row_start,
            "lengths": context.lengths,
            "starts": context.starts,
            "slots": context.table_rows,
            "tables": context.block_tables[context.table_rows],
            "blocks": blocks,
            "offsets": offsets,
            "sequences": sequences,
            "within": within,
            "captures": context.captures,
        }
        return DeviceLayout(host_lengths=context.lengths, **_sent(parts, device))

    def tiles(self, tokens: int) -> torch.Tensor:
        """``[N, 2]`` (sequence, first row within it) of the pieces of so many tokens."""
        if tokens not in self._tiles:
            counts = -(-self.host_lengths // tokens)
            sequence = np.repeat(np.arange(len(counts)), counts)
            piece = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
            pieces = np.stack([sequence, piece * tokens], axis=1).astype(np.int32)
            self._tiles[tokens] = _sent({"pieces": pieces}, self.tables.device)["pieces"]
        return self._tiles[tokens]


def _sent(parts: dict[str, Ints], device: torch.device) -> dict[str, torch.Tensor]:
    starts = np.cumsum([0, *(-(-part.size // _ALIGNMENT) * _ALIGNMENT for part in parts.values())])
    host = torch.empty(int(starts[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    words, sent = host.numpy(), {}
    for part, start in zip(parts.values(), starts, strict=False):
        words[start : start + part.size] = part.reshape(-1)
    moved = host.to(device, non_blocking=True)
    for (name, part), start in zip(parts.items(), starts.tolist(), strict=False):
        sent[name] = moved[start : start + part.size].view(part.shape)
    return sent
