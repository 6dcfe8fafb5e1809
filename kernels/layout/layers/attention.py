"""Hold what a decoder layer of attention is given where it is one call."""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from samebit.kernels.layout.layers.weights import GatedWeights, LayerWeights
from samebit.kernels.layout.lora.adapters import PlacedTerms
from samebit.kernels.layout.options import AttentionOptions, Layer


@dataclass(frozen=True, eq=False)
class AttentionWeights(LayerWeights):
    """Holds the parameters of a decoder layer: the norms before attention and before the MLP, those of queries and keys
    or None, and the linear layers; None for those of another MLP behind the call."""

    norms: tuple[torch.Tensor, torch.Tensor]
    head_norms: tuple[torch.Tensor | None, torch.Tensor | None]
    qkv: tuple[Layer, Layer, Layer]
    o: Layer
    mlp: GatedWeights | None

    @cached_property
    def flat(self) -> tuple[torch.Tensor | None, ...]:
        """Return the parameters one by one; None for what the layer does not have."""
        (q, k, v), nothing = self.qkv, (None, None)
        gate, up, down = (nothing, nothing, nothing) if self.mlp is None else self.mlp
        return (*self.norms, *self.head_norms, *q, *k, *v, *self.o, *gate, *up, *down)


class AttentionTerms(NamedTuple):
    """Holds what an adapter adds to the linear layers of `AttentionWeights`; None for nothing."""

    qkv: PlacedTerms | None = None
    o: PlacedTerms | None = None
    gate_up: PlacedTerms | None = None
    down: PlacedTerms | None = None


@dataclass(frozen=True)
class AttentionLayerOptions:
    """Tells one decoder layer of attention from another.

    Attributes:
        attention: of its attention.
        width: hidden size.
        heads: of queries.
        kv_heads: of keys.
        head_dim: their size.
        inner: width of the gated MLP; 0 for another one behind the call.
        gated: queries come with a gate each, whose sigmoid is multiplied onto what is attended to.
        norms: eps and offset of the norm before attention, of that before the MLP, and of those of the heads.
        rotated: queries and keys are.
        neighbours: elements of queries and keys that are rotated together stand side by side, not in halves.
    """

    attention: AttentionOptions
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    gated: bool
    norms: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
    rotated: bool = True
    neighbours: bool = False

    @cached_property
    def numbers(self) -> tuple[np.float32, ...]:
        """Return the norms', then scale and softcap of attention, as a kernel takes them."""
        attention = self.attention.scale, self.attention.softcap
        return tuple(map(np.float32, (*chain.from_iterable(self.norms), *attention)))

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of `AttentionWeights.flat`."""
        heads, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        width, inner, queries = self.width, self.inner, 2 * heads if self.gated else heads
        of_heads = (self.head_dim,)
        return (
            (width,), (width,), of_heads, of_heads,
            (queries, width), (queries,), (keys, width), (keys,), (keys, width), (keys,), (width, heads), (width,),
            (inner, width), (inner,), (inner, width), (inner,), (width, inner), (width,),
        )  # fmt: skip
