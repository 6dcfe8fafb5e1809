"""Lay out the states of Gated DeltaNet layers.

The state is ``[Hv, K, V]``, V padded to whole vectors; on a CPU a head's elements lie in panels (`cpu.delta.panels`),
which is the kernels' own affair. The tail, all in whole vectors: keys, normalised, float32 ``[Hk, chunk, K]``; what
each token wrote, u, float32 ``[Hv, chunk, V]``; the running sum of the decay ``[Hv, chunk]`` float64.
Where each channel of a key decays by itself (Kimi Delta Attention), the keys are what is left of them at the last
token, and instead of the sum there is what is left of the state at each token, float32 ``[Hv, chunk, K]``. What else a
slot holds: `memory`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from samebit.kernels.layout.grids import LANES, SCAN_CHUNK, ceil_div
from samebit.kernels.layout.memory_pool import zeroed_pool
from samebit.kernels.layout.states.memory import LayerStates, states_and_windows


@dataclass(frozen=True, eq=False)
class DeltaStates(LayerStates):
    """Holds the slots of one Gated DeltaNet layer; the first axis of each tensor is the slot."""

    tail_k: torch.Tensor
    tail_u: torch.Tensor
    tail_sums: torch.Tensor

    @cached_property
    def shapes(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return how many slots there are of both, and the shapes of a slot's state and of the keys of its tail."""
        (slots, *of_state), (tails, *of_keys) = self.state.shape, self.tail_k.shape
        return min(slots, tails), tuple(of_state), tuple(of_keys)

    @cached_property
    def addresses(self) -> torch.Tensor:
        """Return ``[5]`` int64: where states and tail are, as the kernels take them."""
        parts = (self.state, self.block_state, self.tail_k, self.tail_u, self.tail_sums)
        return torch.tensor([part.data_ptr() for part in parts], device="cpu")


@dataclass(frozen=True)
class DeltaShape:
    """Holds the sizes of a Gated DeltaNet layer: Hk key heads of size K, Hv value heads of size V, and the taps of the
    convolution.

    Value head h reads key head ``h // (Hv / Hk)``. ``by_channel``: each channel of a key decays by itself.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_channel: bool = False

    @property
    def inner(self) -> int:
        """Return the width of the values."""
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Return the width of what is convolved: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def padded_key(self) -> int:
        """Return the size of a key in whole vectors."""
        return ceil_div(self.key_dim, LANES) * LANES

    @property
    def padded_value(self) -> int:
        """Return the size of a value in whole vectors."""
        return ceil_div(self.value_dim, LANES) * LANES

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Return the shape of the state of one sequence."""
        return self.value_heads, self.key_dim, self.padded_value

    @property
    def changes_tail(self) -> bool:
        """Return whether each token decays the keys of those before it, which the tail keeps."""
        return self.by_channel

    def slots(self, count: int, rows: int, dtype: torch.dtype, device: str | torch.device) -> DeltaStates:
        """Allocate a layer's slots 0 .. count - 1, zeroed, with windows of so many rows; ``dtype``: the model's."""
        chunk = SCAN_CHUNK

        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return zeroed_pool((count, *sizes), dtype, device)

        return DeltaStates(
            **states_and_windows(self, count, rows, dtype, device),
            tail_k=zeros(self.key_heads, chunk, self.padded_key),
            tail_u=zeros(self.value_heads, chunk, self.padded_value),
            tail_sums=zeros(self.value_heads, chunk, self.padded_key)
            if self.by_channel
            else zeros(self.value_heads, chunk, dtype=torch.float64),
        )
