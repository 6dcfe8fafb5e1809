"""Hold what a block of routed experts is given where it is one call, behind that of a decoder layer.

W hidden size, E experts of width I, F width of the experts that compute every row.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from samebit.kernels.layout.layers.weights import GatedWeights, LayerWeights
from samebit.kernels.layout.options import ExpertOptions, ExpertWeights, Layer, RoutingOptions


@dataclass(frozen=True, eq=False)
class BlockWeights(LayerWeights):
    """Holds the parameters of a block of experts: the router's, those of the experts, those of what computes every row
    and of its gate, None without; and the correction, float32, or None. It stands at the end behind the router's, which
    are of the others' dtype or float32."""

    router: Layer
    experts: ExpertWeights
    shared: GatedWeights | None
    shared_gate: Layer | None
    correction: torch.Tensor | None

    @cached_property
    def flat(self) -> tuple[torch.Tensor | None, ...]:
        """Return the parameters one by one; None for what the block does not have."""
        experts, nothing = self.experts, (None, None)
        gate, up, down = (nothing, nothing, nothing) if self.shared is None else self.shared
        return (
            experts.up, experts.up_bias, experts.down, experts.down_bias, *gate, *up, *down,
            *(self.shared_gate or nothing), *self.router, self.correction,
        )  # fmt: skip


@dataclass(frozen=True)
class BlockOptions:
    """Tells one block of experts from another.

    Attributes:
        routing: of its router.
        experts: of its experts.
        width: W.
        number: E.
        inner: I.
        shared: F; 0 without.
        factor: on what the block gives.
    """

    routing: RoutingOptions
    experts: ExpertOptions
    width: int
    number: int
    inner: int
    shared: int
    factor: float = 1.0

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of `BlockWeights.flat`."""
        width, number, inner, shared = self.width, self.number, self.inner, self.shared
        products = self.experts.products * inner
        up, down = (products, width), (width, inner)
        if self.experts.transposed:
            up, down = up[::-1], down[::-1]
        return (
            (number, *up), (number, products), (number, *down), (number, width),
            (shared, width), (shared,), (shared, width), (shared,), (width, shared), (width,), (1, width), (1,),
            (number, width), (number,), (number,),
        )  # fmt: skip
