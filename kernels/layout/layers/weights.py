"""Hold the parameters of a decoder layer that is one call, and what was worked out from them; and those of its MLP."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from samebit.kernels.layout.options import Layer


class GatedWeights(NamedTuple):
    """Holds the linear layers of a gated MLP."""

    gate: Layer
    up: Layer
    down: Layer


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
