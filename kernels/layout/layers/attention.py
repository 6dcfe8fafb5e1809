"""Hold what a decoder layer of attention is given where it is one call."""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from samebit.kernels.layout.layers.weights import GatedOptions, GatedWeights, LayerWeights
from samebit.kernels.layout.lora.adapters import PlacedTerms
from samebit.kernels.layout.options import AttentionOptions, Layer

HEAD_NORMS = ("none", "head", "full", "rotated")
"""Lists what norms of queries and keys may be: none, of each head, of all heads together, of each rotated head."""


@dataclass(frozen=True, eq=False)
class AttentionWeights(LayerWeights):
    """Holds the parameters of a decoder layer: the norms before attention and of what it gives, before the MLP and of
    what it gives, each None without, biases of the norms before, None without or of an RMSNorm, those of queries and
    keys, the linear layers, None for those of another MLP behind the call, and sinks, None without."""

    norms: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    norm_biases: tuple[torch.Tensor | None, torch.Tensor | None]
    head_norms: tuple[torch.Tensor | None, torch.Tensor | None]
    qkv: tuple[Layer, Layer, Layer]
    o: Layer
    mlp: GatedWeights | None
    sinks: torch.Tensor | None

    @cached_property
    def flat(self) -> tuple[torch.Tensor | None, ...]:
        """Return the parameters one by one; None for what the layer does not have."""
        (q, k, v), nothing = self.qkv, (None, None)
        gate, up, down = (nothing, nothing, nothing) if self.mlp is None else self.mlp
        return (*self.norms, *self.norm_biases, *self.head_norms, *q, *k, *v, *self.o, *gate, *up, *down, self.sinks)


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
        mlp: its MLP.
        gated: queries come with a gate each, whose sigmoid is multiplied onto what is attended to.
        norms: eps and offset of each of `AttentionWeights.norms`, and of those of the heads.
        rotated: queries and keys are.
        neighbours: elements of queries and keys that are rotated together stand side by side, not in halves.
        head_norms: one of `HEAD_NORMS`.
        factor: on what attention and the MLP give, where no norm is of it.
    """

    attention: AttentionOptions
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: GatedOptions
    gated: bool
    norms: tuple[tuple[float, float], ...]
    rotated: bool = True
    neighbours: bool = False
    head_norms: str = "none"
    factor: float = 1.0

    @property
    def inner(self) -> int:
        """Return the width of the gated MLP; 0 for another one behind the call."""
        return self.mlp.inner

    @property
    def outputs(self) -> tuple[int, int, int]:
        """Return how many numbers a row has of queries, without gates, of keys and of values."""
        keys = self.kv_heads * self.head_dim
        return self.heads * self.head_dim, keys, keys

    @cached_property
    def numbers(self) -> tuple[np.float32, ...]:
        """Return the norms', the factor, then scale and softcap of attention, as a kernel takes them."""
        attention = self.attention.scale, self.attention.softcap
        return tuple(map(np.float32, (*chain.from_iterable(self.norms), self.factor, *attention)))

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of `AttentionWeights.flat`."""
        heads, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        width, queries = self.width, 2 * heads if self.gated else heads
        of_queries, of_keys = ((heads,), (keys,)) if self.head_norms == "full" else ((self.head_dim,),) * 2
        return (
            *((width,),) * 6, of_queries, of_keys,
            (queries, width), (queries,), (keys, width), (keys,), (keys, width), (keys,), (width, heads), (width,),
            *self.mlp.shapes(width), (self.heads,),
        )  # fmt: skip
