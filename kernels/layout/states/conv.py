"""Lay out what gated short convolutions keep of a sequence: the window, and no state beside it.

There is no tail either, so nothing depends on where a chunk of the arithmetic ends; the grid on which states are kept
is that of other recurrent layers. What a slot holds: `memory`.
"""

from dataclasses import dataclass

import torch

from samebit.kernels.layout.states.memory import LayerStates, states_and_windows


@dataclass(frozen=True)
class ConvShape:
    """Holds the sizes of a gated short convolution: its channels, and its taps."""

    conv_width: int
    taps: int

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Return the shape of no elements."""
        return (0,)

    @property
    def changes_tail(self) -> bool:
        """Return False: there is no tail."""
        return False

    def slots(self, count: int, rows: int, dtype: torch.dtype, device: str | torch.device) -> LayerStates:
        """Allocate a layer's slots 0 .. count - 1, zeroed, with windows of so many rows; ``dtype``: the model's."""
        return LayerStates(**states_and_windows(self, count, rows, dtype, device))
