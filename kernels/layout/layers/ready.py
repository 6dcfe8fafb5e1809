"""Name the call of a decoder layer for which everything is ready but the layer's input.

Invariant: it is made for the rows of one step.
"""

from typing import Protocol

import torch


class ReadyLayer(Protocol):
    """Computes a layer of ``x``: its result, or what it is without the child that is called by itself, and that one's
    input.

    Attributes:
        chosen: the tokens that its rows read, for the next layers; None where all are read.
    """

    @property
    def chosen(self) -> torch.Tensor | None:
        """Return them."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute it."""
