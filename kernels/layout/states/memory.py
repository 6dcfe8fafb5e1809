"""Lay out the memory of layers with a recurrent state: slots, one for each sequence, and checkpoints of them.

Per layer, with ``b`` the last boundary of the arithmetic's chunks (`SCAN_CHUNK` tokens) at or before the sequence's
end, a slot holds:

* ``state``: the float32 state as of ``b``;
* the tail: what the kind of layer keeps of the tokens from ``b`` on (`mamba`, `delta`; `conv` has neither);
* ``window``: the last K - 1 inputs of the convolution before the end, that of position p in row ``p % R`` of R rows;
* ``block_state`` and ``block_window``: both as of the last *block* boundary, for a checkpoint of it when the sequence
  stops later, the window's K - 1 inputs in the rows ``p % R - (R - K + 1)``.

R is K - 1. Where up to g tokens behind a sequence's end may be computed and taken back (guesses), it is a power of two
of at least K - 1 + g that divides a block: their inputs stand beside those that are still needed, and at a block
boundary the last K - 1 stand in the window's last rows. Nothing else has to be kept of a token that is taken back, as
long as it is not the last one of a chunk, which moves the state: what the tail has of a position is written anew with
the token that comes there, and not read before. (Not so where a token changes what the tail has of others:
`StateShape.changes_tail`.)

A checkpoint is the state and the window at a block boundary. Nothing is cleared between two sequences: a call that
starts at position 0 reads nothing of what its slot held.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.grids import SCAN_CHUNK
from samebit.kernels.layout.memory_pool import zeroed_pool
from samebit.kernels.layout.transfer import indices

Pairs = Sequence[tuple[int, int]]
"""Moves go from the first of a pair to the second, one pair after the other."""


@dataclass(frozen=True, eq=False)
class LayerStates:
    """Holds the slots of one layer, without its tails; the first axis of each tensor is the slot."""

    state: torch.Tensor
    block_state: torch.Tensor
    window: torch.Tensor
    block_window: torch.Tensor

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the model's dtype."""
        return self.window.dtype

    @cached_property
    def windows(self) -> tuple[int, int, tuple[int, ...]]:
        """Return how many windows there are, how many rows each has, and the shape of one as of a block boundary: to
        ask a tensor takes longer than to compare."""
        count, rows, _ = self.window.shape
        return count, rows, tuple(self.block_window.shape[1:])


@dataclass(frozen=True, eq=False)
class LayerCheckpoints:
    """Holds the checkpoints of one layer; the first axis of each tensor is the checkpoint."""

    state: torch.Tensor
    window: torch.Tensor


States = TypeVar("States", bound=LayerStates)


class StateShape(Protocol):
    """Holds the sizes of a kind of layer, and knows the memory that one needs."""

    @property
    def taps(self) -> int:
        """Return K of the convolution."""

    @property
    def conv_width(self) -> int:
        """Return the width of what is convolved."""

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Return the shape of the state of one sequence."""

    @property
    def changes_tail(self) -> bool:
        """Return whether a token changes what the tail has of those before it: then none can be taken back."""

    def slots(self, count: int, rows: int, dtype: torch.dtype, device: str | torch.device) -> LayerStates:
        """Allocate a layer's slots 0 .. count - 1, zeroed, with windows of so many rows; ``dtype``: the model's."""


def states_and_windows(
    shape: StateShape, count: int, rows: int, dtype: torch.dtype, device: str | torch.device
) -> dict[str, torch.Tensor]:
    """Allocate the fields of `LayerStates`, which all kinds of layers have."""
    state = count, *shape.state_sizes
    return {
        "state": zeroed_pool(state, torch.float32, device),
        "block_state": zeroed_pool(state, torch.float32, device),
        "window": zeroed_pool((count, rows, shape.conv_width), dtype, device),
        "block_window": zeroed_pool((count, shape.taps - 1, shape.conv_width), dtype, device),
    }


@dataclass(frozen=True, eq=False)
class StateMemory:
    """Holds slots and checkpoints of all layers of a model that have a state."""

    layers: tuple[LayerStates, ...]
    checkpoints: tuple[LayerCheckpoints, ...]

    def layer(self, number: int, kind: type[States]) -> States:
        """Return the slots of a layer.

        Raises:
            TypeError: they are those of another kind of layer.
        """
        layer = self.layers[number]
        if not isinstance(layer, kind):
            raise TypeError(f"the memory of layer {number} is {type(layer).__name__}; allowed: {kind.__name__}")
        return layer

    def copy_slots(self, pairs: Pairs) -> None:
        """Make the target of each (source, target) continue where the source is."""
        for sources, targets in self._together(pairs):
            for layer in self.layers:
                for tensor in _tensors(layer):
                    tensor[targets] = tensor[sources]

    def take_checkpoints(self, pairs: Pairs) -> None:
        """Keep the last block boundary of each (slot, checkpoint)'s slot."""
        for slots, kept in self._together(pairs):
            for layer, memory in zip(self.layers, self.checkpoints, strict=True):
                memory.state[kept] = layer.block_state[slots]
                memory.window[kept] = layer.block_window[slots]

    def restore_checkpoints(self, pairs: Pairs) -> None:
        """Put each (checkpoint, slot)'s slot at the checkpoint's boundary; its tail is then empty."""
        for kept, slots in self._together(pairs):
            for layer, memory in zip(self.layers, self.checkpoints, strict=True):
                layer.state[slots] = layer.block_state[slots] = memory.state[kept]
                _, rows, (last, _) = layer.windows
                layer.window[slots, rows - last :] = layer.block_window[slots] = memory.window[kept]

    def _together(self, pairs: Pairs) -> Iterator[tuple[Any, Any]]:
        """Return the indices of what is moved at once: on the CPU a pair, on a GPU, where each launch costs, what does
        not depend on a move before it."""
        if not pairs or not device.on_gpu(self.layers[0].state):
            yield from pairs
            return
        batch: dict[int, int] = {}
        for source, target in pairs:
            if target in batch or source in batch:
                yield self._indices(batch)
                batch = {}
            batch[target] = source
        yield self._indices(batch)

    def _indices(self, source_of: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = np.array([list(source_of.values()), list(source_of)], np.int64)
        sources, targets = indices(numbers, self.layers[0].state.device)
        return sources, targets


@dataclass(frozen=True)
class StateLayout:
    """Describes the shape of a model's state memory: one layer with a state after the other, all alike.

    Attributes:
        num_layers: layers with a state.
        shape: of each.
        chunk: of the grid that states are kept on (``bind(model, ssm_chunk=...)``); a block is a multiple of it.
        guesses: tokens behind a sequence's end that may be computed and taken back.
    """

    num_layers: int
    shape: StateShape
    chunk: int
    guesses: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.guesses <= self.most_guesses:
            raise ValueError(f"{self.guesses} tokens can not be taken back; allowed: 0 to {self.most_guesses}")

    @property
    def most_guesses(self) -> int:
        """Return how many tokens may be taken back at once: all between two that move the state, as far as a window has
        their inputs; none where a token changes what is kept of others."""
        kept = self.shape.taps - 1
        return 0 if self.shape.changes_tail else max(0, min(SCAN_CHUNK - 1, self.chunk - kept))

    @property
    def window_rows(self) -> int:
        """Return how many inputs a sequence's window has room for."""
        least = self.shape.taps - 1 + self.guesses
        return 1 << (least - 1).bit_length() if self.guesses else least

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Return the bytes of one slot over all layers."""
        return self.num_layers * _bytes(self.shape.slots(1, self.window_rows, dtype, "meta"))

    def bytes_per_checkpoint(self, dtype: torch.dtype) -> int:
        """Return the bytes of one checkpoint over all layers."""
        return self.num_layers * _bytes(self._checkpoints(1, dtype, "meta"))

    def allocate(
        self, num_slots: int, dtype: torch.dtype, num_checkpoints: int = 0, device: str | torch.device = "cpu"
    ) -> StateMemory:
        """Allocate zeroed slots 0 .. num_slots - 1 and checkpoints 0 .. num_checkpoints - 1; ``dtype``: the model's."""
        rows = self.window_rows
        return StateMemory(
            layers=tuple(self.shape.slots(num_slots, rows, dtype, device) for _ in range(self.num_layers)),
            checkpoints=tuple(self._checkpoints(num_checkpoints, dtype, device) for _ in range(self.num_layers)),
        )

    def _checkpoints(self, count: int, dtype: torch.dtype, device: str | torch.device) -> LayerCheckpoints:
        shape = self.shape
        return LayerCheckpoints(
            state=zeroed_pool((count, *shape.state_sizes), torch.float32, device),
            window=zeroed_pool((count, shape.taps - 1, shape.conv_width), dtype, device),
        )


def _tensors(part: LayerStates | LayerCheckpoints) -> list[torch.Tensor]:
    return [part.__dict__[field.name] for field in fields(part)]


def _bytes(part: LayerStates | LayerCheckpoints) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in _tensors(part))
