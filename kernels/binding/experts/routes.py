"""Note which experts computed each token, during a forward call, where the caller asks for it.

Invariants:

* Nothing is noted, and nothing is allocated, unless notes are installed around the call.
* In a worker, notes lie where the keys of the same token lie: in the block and at the offset that the layout gives its
  row. So they follow the blocks: a token that is found in the prefix cache has the notes of when it was computed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.forward_context import ForwardContext, installed_context

Routes = npt.NDArray[np.int16]


class RouteNotes(Protocol):
    """Takes what routers choose."""

    def note(self, layer: int, ids: torch.Tensor) -> None:
        """Take the experts ``[T, top_k]`` of the rows of a call; ``layer`` counts the layers with experts."""


@dataclass(frozen=True)
class RouteLayout:
    """Describes the shape of a model's notes: which layers have routed experts, and how many layers there are in all.

    top_k: the experts of a token.
    """

    layers: tuple[int, ...]
    num_layers: int
    top_k: int

    def allocate(self, num_blocks: int, block_size: int, device: str | torch.device = "cpu") -> "RoutePages":
        """Allocate zeroed notes for blocks 0 .. num_blocks."""
        shape = (num_blocks + 1, block_size, len(self.layers), self.top_k)
        return RoutePages(self, torch.zeros(shape, dtype=torch.int16, device=device))

    def of_no_token(self) -> Routes:
        """Return the notes of a sequence of which nothing is computed, ``[0, num_layers, top_k]``."""
        return np.zeros((0, self.num_layers, self.top_k), np.int16)

    def spread(self, notes: torch.Tensor) -> Routes:
        """Return ``[tokens, num_layers, top_k]`` of ``[tokens, layers with experts, top_k]``; other layers are 0."""
        found = np.zeros((len(notes), self.num_layers, self.top_k), np.int16)
        found[:, list(self.layers)] = notes.cpu().numpy()
        return found


@dataclass(frozen=True, eq=False)
class RoutePages:
    """Holds notes in blocks: ``memory`` is ``[blocks, block_size, layers with experts, top_k]`` int16."""

    layout: RouteLayout
    memory: torch.Tensor

    def note(self, layer: int, ids: torch.Tensor) -> None:
        """Note the experts of the rows of the installed layout; padding goes to the null block."""
        context = installed_context()
        if context is None:
            raise ValueError("notes in blocks need a layout: they are for the calls of a worker")
        blocks, offsets = _blocks_and_offsets(context, ids)
        self.memory[blocks, offsets, layer] = ids.to(torch.int16)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks."""
        self.memory[targets] = self.memory[sources]

    def of_tokens(self, blocks: Sequence[int], count: int) -> Routes:
        """Return ``[count, num_layers, top_k]``, the notes of the first tokens in these blocks."""
        found = self.memory[torch.tensor(blocks, dtype=torch.int64, device=self.memory.device)]
        return self.layout.spread(found.flatten(0, 1)[:count])


@dataclass(frozen=True, eq=False)
class RouteList:
    """Holds the notes of one training call, row after row: ``rows[layer]`` is ``[T, top_k]``."""

    rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def note(self, layer: int, ids: torch.Tensor) -> None:
        """Keep the experts of the rows."""
        self.rows[layer] = ids.detach()

    def of_rows(self, layout: RouteLayout) -> Routes:
        """Return the notes of all rows, ``[T, num_layers, top_k]``."""
        return layout.spread(torch.stack([self.rows[layer] for layer in range(len(layout.layers))], dim=1))


def _blocks_and_offsets(context: ForwardContext, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block and offset of each row, on the device of the ids."""
    if device.on_gpu(ids):
        return context.on_device.blocks, context.on_device.offsets
    blocks, offsets = context.blocks_and_offsets
    return torch.from_numpy(blocks), torch.from_numpy(offsets)


_installed: ContextVar[RouteNotes | None] = ContextVar("samebit_route_notes", default=None)


def installed_notes() -> RouteNotes | None:
    """Return the notes installed around the running code, if any."""
    return _installed.get()


@contextmanager
def use_notes(notes: RouteNotes | None) -> Iterator[None]:
    """Let routers note what they choose inside the block; with None they note nothing."""
    token = _installed.set(notes)
    try:
        yield
    finally:
        _installed.reset(token)
