"""Lay out the states of Mamba2 layers.

The state is ``[H, N, P]``, P padded to whole vectors. The tail: x after the convolution ``[H, chunk, P]``, B ``[tiles,
chunk, N]`` in float32 (a copy for each tile of heads; N in whole vectors), the time step and its running sum of decay
``[H, chunk]``. What else a slot holds: `memory`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from samebit.kernels.layout.grids import HEAD_TILE, LANES, SCAN_CHUNK, ceil_div
from samebit.kernels.layout.memory_pool import zeroed_pool
from samebit.kernels.layout.states.memory import LayerStates, states_and_windows


@dataclass(frozen=True, eq=False)
class SSMStates(LayerStates):
    """Holds the slots of one Mamba2 layer; the first axis of each tensor is the slot."""

    tail_x: torch.Tensor
    tail_b: torch.Tensor
    tail_dt: torch.Tensor
    tail_sums: torch.Tensor

    @cached_property
    def addresses(self) -> torch.Tensor:
        """Return ``[6]`` int64: where states and tail are, as the scan takes them."""
        parts = (self.state, self.block_state, self.tail_x, self.tail_b, self.tail_dt, self.tail_sums)
        return torch.tensor([part.data_ptr() for part in parts], device="cpu")


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

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Return the shape of the state of one sequence."""
        return self.heads, self.state_size, self.padded_dim

    @property
    def changes_tail(self) -> bool:
        """Return False: a token adds to the tail, and changes nothing of it."""
        return False

    def slots(self, count: int, rows: int, dtype: torch.dtype, device: str | torch.device) -> SSMStates:
        """Allocate a layer's slots 0 .. count - 1, zeroed, with windows of so many rows; ``dtype``: the model's."""
        chunk = SCAN_CHUNK

        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return zeroed_pool((count, *sizes), dtype, device)

        return SSMStates(
            **states_and_windows(self, count, rows, dtype, device),
            tail_x=zeros(self.heads, chunk, self.padded_dim, dtype=dtype),
            tail_b=zeros(self.tiles, chunk, self.padded_state),
            tail_dt=zeros(self.heads, chunk),
            tail_sums=zeros(self.heads, chunk, dtype=torch.float64),
        )
