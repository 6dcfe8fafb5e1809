"""Hold the parameters of a decoder layer that is one call, and what was worked out from them; and those of its MLP."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from samebit.kernels.layout.options import Layer


class GatedWeights(NamedTuple):
    """Holds the linear layers of a gated MLP; ``(None, None)`` for the second where the first is gate and up."""

    gate: Layer
    up: Layer | tuple[None, None]
    down: Layer


@dataclass(frozen=True)
class GatedOptions:
    """Tells one gated MLP from another.

    Attributes:
        inner: its width; 0 for another MLP behind the call.
        activation: of its gate.
        fused: gate and up are one layer, the gate first.
    """

    inner: int
    activation: str = "silu"
    fused: bool = False

    def shapes(self, width: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of `GatedWeights` of inputs of this width, weights and biases."""
        inner = self.inner
        gates, ups = (2 * inner, 0) if self.fused else (inner, inner)
        return (gates, width), (gates,), (ups, width), (ups,), (width, inner), (width,)


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Holds the parameters of a decoder layer, all of one dtype, contiguous."""

    @cached_property
    def flat(self) -> tuple[torch.Tensor | None, ...]:
        """Return the parameters one by one; None for what the layer does not have."""
        raise NotImplementedError

    @cached_property
    def present(self) -> list[torch.Tensor]:
        """Return the parameters that the layer has."""
        return [weight for weight in self.flat if weight is not None]

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the parameters, 0 for what the layer does not have."""
        return tuple(0 if weight is None else weight.data_ptr() for weight in self.flat)

    @cached_property
    def worked_out(self) -> dict[object, Any]:
        """Return a dictionary that callers fill with what they find out about these parameters."""
        return {}
