"""Name what a decoder layer of latent attention, computed in one call, is given: its parameters, its sizes, and what an
adapter adds.

T rows, W hidden size, F width of the MLP; the sizes of heads as in `options.LatentOptions`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from samebit.kernels.layout.layers.weights import GatedWeights, LayerWeights
from samebit.kernels.layout.lora.adapters import PlacedTerms
from samebit.kernels.layout.options import IndexOptions, LatentOptions, Layer


class IndexWeights(NamedTuple):
    """Holds the parameters of an indexer: what makes its queries of the queries' latents, its keys of the layer's
    input, the norm of these, and the weights of its heads, which may be float32 whatever the others are."""

    queries: Layer
    keys: Layer
    norm: tuple[torch.Tensor, torch.Tensor]
    factors: torch.Tensor


@dataclass(frozen=True, eq=False)
class LatentWeights(LayerWeights):
    """Holds the parameters of a decoder layer of latent attention.

    Attributes:
        norms: before attention and before the MLP, of the queries' latents or None, and of latents.
        first: of the layer's input: queries, or their latents; latents and keys that all heads share.
        queries: of the queries' latents; None where the first gives queries.
        heads: ``[heads * (nope + value), rank]``, both halves of the products of heads.
        o: of what heads give.
        mlp: None for another one behind the call.
        index: of the layer's own indexer; None without one.
    """

    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
    first: tuple[Layer, Layer]
    queries: Layer | None
    heads: torch.Tensor
    o: Layer
    mlp: GatedWeights | None
    index: IndexWeights | None = None

    @cached_property
    def flat(self) -> tuple[torch.Tensor | None, ...]:
        """Return the parameters one by one, an indexer's last; None for what the layer does not have."""
        (q, kv), nothing = self.first, (None, None)
        gate, up, down = (nothing, nothing, nothing) if self.mlp is None else self.mlp
        of_layer = (*self.norms, *q, *kv, *(self.queries or nothing), self.heads, *self.o, *gate, *up, *down)
        if self.index is None:
            return of_layer
        return (*of_layer, *self.index.queries, *self.index.keys, *self.index.norm, self.index.factors)


class LatentTerms(NamedTuple):
    """Holds what an adapter adds to the linear layers of `LatentWeights`; None for nothing."""

    first: PlacedTerms | None = None
    queries: PlacedTerms | None = None
    o: PlacedTerms | None = None
    gate_up: PlacedTerms | None = None
    down: PlacedTerms | None = None


@dataclass(frozen=True)
class IndexerOptions:
    """Tells the indexer of one layer from that of another.

    Attributes:
        choice: of its choice.
        neighbours: elements that are rotated together stand side by side.
        eps: of the norm of its keys.
    """

    choice: IndexOptions
    neighbours: bool
    eps: float

    @cached_property
    def numbers(self) -> tuple[np.float32, ...]:
        """Return eps, the factor on the weights of the heads, and that on products, as a kernel takes them."""
        return np.float32(self.eps), np.float32(self.choice.heads**-0.5), np.float32(self.choice.scale)


@dataclass(frozen=True)
class LatentLayerOptions:
    """Tells one decoder layer of latent attention from another.

    Attributes:
        attention: of its attention.
        width: hidden size.
        heads: their number.
        nope: elements of a head's query that are not rotated.
        value: elements of a head's value.
        query_rank: elements of the queries' latents; 0 where they have none.
        inner: width of the gated MLP; 0 for another one behind the call.
        neighbours: elements that are rotated together stand side by side.
        norms: eps and offset of each of `LatentWeights.norms`.
        index: of its own indexer; None without one.
    """

    attention: LatentOptions
    width: int
    heads: int
    nope: int
    value: int
    query_rank: int
    inner: int
    neighbours: bool
    norms: tuple[tuple[float, float], ...]
    index: IndexerOptions | None = None

    @cached_property
    def numbers(self) -> tuple[np.float32, ...]:
        """Return the norms' as a kernel takes them."""
        return tuple(np.float32(number) for norm in self.norms for number in norm)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of `LatentWeights.flat`."""
        width, inner, rank, latent = self.width, self.inner, self.attention.rank, self.attention.width
        queries = self.heads * (self.nope + self.attention.rope)
        first = self.query_rank or queries
        values = self.heads * self.value
        of_layer: tuple[tuple[int, ...], ...] = (
            (width,), (width,), (self.query_rank,), (rank,),
            (first, width), (first,), (latent, width), (latent,), (queries, self.query_rank), (queries,),
            (self.heads * self.nope + values, rank), (width, values), (width,),
            (inner, width), (inner,), (inner, width), (inner,), (width, inner), (width,),
        )  # fmt: skip
        if self.index is None:
            return of_layer
        heads, size = self.index.choice.heads, self.index.choice.size
        of_index = ((heads * size, self.query_rank), (heads * size,), (size, width), (size,), (size,), (size,))
        return (*of_layer, *of_index, (heads, width))
