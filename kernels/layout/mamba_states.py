"""Lay out the memory of Mamba layers: what a slot holds, and checkpoints of it.

A slot holds one sequence. Per layer, with ``b`` the last boundary of the scan's chunks (`SCAN_CHUNK` tokens) at or
before the sequence's end:

* ``state``: the float32 state as of ``b``, ``[H, N, P]``, P padded to whole vectors;
* the tail, the tokens from ``b`` on: x after the convolution ``[H, chunk, P]``, B ``[tiles, chunk, N]`` in float32 (a
  copy for each tile of heads; N in whole vectors), the time step and its running sum of decay ``[H, chunk]``;
* ``window``: the last K - 1 inputs of the convolution before the end;
* ``block_state`` and ``block_window``: both as of the last *block* boundary, for a checkpoint of it when the sequence
  stops later.

A checkpoint is the state and the window at a block boundary. Nothing is cleared between two sequences: a call that
starts at position 0 reads nothing of what its slot held.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.grids import HEAD_TILE, LANES, SCAN_CHUNK, ceil_div
from samebit.kernels.layout.memory_pool import zeroed_pool
from samebit.kernels.layout.transfer import indices

Pairs = Sequence[tuple[int, int]]
"""Moves go from the first of a pair to the second, one pair after the other."""


@dataclass(frozen=True)
class SSMShape:
    """Holds the sizes of a Mamba2 layer: H heads of size P in groups, state size N, K taps of the convolution."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int

    @property
    def inner(self) -> int:
        """Return the width of x."""
        return self.heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Return the width of what is convolved: x, B and C."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def padded_dim(self) -> int:
        """Return the head size in whole vectors."""
        return ceil_div(self.head_dim, LANES) * LANES

    @property
    def padded_state(self) -> int:
        """Return the state size in whole vectors."""
        return ceil_div(self.state_size, LANES) * LANES

    @property
    def tiles(self) -> int:
        """Return how many work items a sequence has."""
        return self.groups * ceil_div(self.heads // self.groups, HEAD_TILE)


@dataclass(frozen=True, eq=False)
class LayerStates:
    """Holds the slots of one layer; the first axis of each tensor is the slot."""

    state: torch.Tensor
    block_state: torch.Tensor
    tail_x: torch.Tensor
    tail_b: torch.Tensor
    tail_dt: torch.Tensor
    tail_sums: torch.Tensor
    window: torch.Tensor
    block_window: torch.Tensor

    @cached_property
    def addresses(self) -> torch.Tensor:
        """Return ``[6]`` int64: where states and tail are, as the scan takes them."""
        parts = (self.state, self.block_state, self.tail_x, self.tail_b, self.tail_dt, self.tail_sums)
        return torch.tensor([part.data_ptr() for part in parts])

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the model's dtype."""
        return self.tail_x.dtype


@dataclass(frozen=True, eq=False)
class LayerCheckpoints:
    """Holds the checkpoints of one layer; the first axis of each tensor is the checkpoint."""

    state: torch.Tensor
    window: torch.Tensor


@dataclass(frozen=True, eq=False)
class StateMemory:
    """Holds slots and checkpoints of all Mamba layers of a model."""

    layers: tuple[LayerStates, ...]
    checkpoints: tuple[LayerCheckpoints, ...]

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
                layer.window[slots] = layer.block_window[slots] = memory.window[kept]

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
    """Shapes the state memory of a model: one Mamba layer after the other, all alike.

    Attributes:
        num_layers: Mamba layers.
        shape: of each.
        chunk: of the grid that states are kept on (``bind(model, ssm_chunk=...)``); a block is a multiple of it.
    """

    num_layers: int
    shape: SSMShape
    chunk: int

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Return the bytes of one slot over all layers."""
        return self.num_layers * _bytes(self._slots(1, dtype, "meta"))

    def bytes_per_checkpoint(self, dtype: torch.dtype) -> int:
        """Return the bytes of one checkpoint over all layers."""
        return self.num_layers * _bytes(self._checkpoints(1, dtype, "meta"))

    def allocate(
        self, num_slots: int, dtype: torch.dtype, num_checkpoints: int = 0, device: str | torch.device = "cpu"
    ) -> StateMemory:
        """Allocate zeroed slots 0 .. num_slots - 1 and checkpoints 0 .. num_checkpoints - 1; ``dtype``: the model's."""
        return StateMemory(
            layers=tuple(self._slots(num_slots, dtype, device) for _ in range(self.num_layers)),
            checkpoints=tuple(self._checkpoints(num_checkpoints, dtype, device) for _ in range(self.num_layers)),
        )

    def _slots(self, count: int, dtype: torch.dtype, device: str | torch.device) -> LayerStates:
        shape, chunk = self.shape, SCAN_CHUNK
        heads, width = shape.heads, shape.padded_dim

        def zeros(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return zeroed_pool((count, *sizes), dtype, device)

        return LayerStates(
            state=zeros(heads, shape.state_size, width, dtype=torch.float32),
            block_state=zeros(heads, shape.state_size, width, dtype=torch.float32),
            tail_x=zeros(heads, chunk, width),
            tail_b=zeros(shape.tiles, chunk, shape.padded_state, dtype=torch.float32),
            tail_dt=zeros(heads, chunk, dtype=torch.float32),
            tail_sums=zeros(heads, chunk, dtype=torch.float64),
            window=zeros(shape.taps - 1, shape.conv_width),
            block_window=zeros(shape.taps - 1, shape.conv_width),
        )

    def _checkpoints(self, count: int, dtype: torch.dtype, device: str | torch.device) -> LayerCheckpoints:
        shape = self.shape
        return LayerCheckpoints(
            state=zeroed_pool((count, shape.heads, shape.state_size, shape.padded_dim), torch.float32, device),
            window=zeroed_pool((count, shape.taps - 1, shape.conv_width), dtype, device),
        )


Tensors = TypeVar("Tensors", LayerStates, LayerCheckpoints)


def _tensors(part: Tensors) -> list[torch.Tensor]:
    return [part.__dict__[field.name] for field in fields(part)]


def _bytes(part: Tensors) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in _tensors(part))
