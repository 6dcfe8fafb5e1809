"""Name what operations hand to a device, constants of a layer that `bind` found, and the types of what comes back."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout.grids import LANES, SCAN_CHUNK, ceil_div

Saved = tuple[torch.Tensor, ...]
"""A forward hands these tensors to its backward. Only the device that wrote it reads it."""

Layer = tuple[torch.Tensor, torch.Tensor | None]
"""A linear layer is its weight ``[N, K]`` and its bias ``[N]``."""

Reduced = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Holds, ``[T]`` float32 each, a value of every row of logits, and its normaliser: the peak, the log of the sum above
it."""


@dataclass(frozen=True)
class AttentionOptions:
    """Tells one attention layer from another.

    Attributes:
        layer: which pages of the context are its own.
        scale: factor on the scores.
        window: a token sees itself and the ``window - 1`` before it; 0 for all.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 for off.
    """

    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0


class HeadNorms(NamedTuple):
    """Holds what RMSNorm of each head has: of queries and of keys a weight ``[D]``, and of both as in `rms_norm`."""

    queries: torch.Tensor
    keys: torch.Tensor
    eps: float
    offset: float


@dataclass(frozen=True)
class LatentOptions:
    """Tells one layer of attention over latents from another.

    Attributes:
        layer: which pages of the context are its own.
        scale: factor on the scores.
        rank: elements of a latent, the first of a page's row; the value of all heads.
        rope: elements of the rotated key behind it.

    Raises:
        ValueError: sizes below 1.
    """

    layer: int
    scale: float
    rank: int
    rope: int

    def __post_init__(self) -> None:
        if min(self.rank, self.rope) < 1:
            raise ValueError(f"{self}: allowed: at least 1 element of each part")

    @property
    def width(self) -> int:
        """Return the elements of a token's row."""
        return self.rank + self.rope


@dataclass(frozen=True)
class IndexOptions:
    """Tells one indexer from another: what chooses the keys that attention reads.

    Attributes:
        layer: which pages of the context hold its keys.
        heads: of its queries; all read one key a token.
        size: elements of a key.
        scale: factor on the products of queries and keys.
        top_k: keys that are chosen for a row, all where there are no more.

    Raises:
        ValueError: sizes below 1.
    """

    layer: int
    heads: int
    size: int
    scale: float
    top_k: int

    def __post_init__(self) -> None:
        if min(self.heads, self.size, self.top_k) < 1:
            raise ValueError(f"{self}: allowed: at least 1 head of 1 element, and 1 key to choose")


@dataclass(frozen=True)
class GatedNormOptions:
    """Says how a gated RMSNorm works: each of ``groups`` parts of the axis alone, the gate before or after the norm.

    ``sigmoid``: the factor is the sigmoid of the gate, not its silu.
    """

    eps: float
    groups: int
    gate_first: bool
    sigmoid: bool = False


@dataclass(frozen=True)
class SSMOptions:
    """Tells one Mamba layer from another.

    Attributes:
        layer: which part of the state memory is its own.
        chunk: of the grid that states are kept on (``ssm_chunk``).
        groups: heads share B and C in this many groups.
        state_size: N.
        dt_limits: bounds of the time step.
    """

    layer: int
    chunk: int
    groups: int
    state_size: int
    dt_limits: tuple[float, float] = (0.0, float("inf"))


KEY_EPS = 1e-6
"""Is added to the sum of squares by whose root keys and queries of the delta rule are divided. Arithmetic."""


@dataclass(frozen=True)
class DeltaOptions:
    """Tells one Gated DeltaNet layer from another.

    Attributes:
        layer: which part of the state memory is its own.
        chunk: of the grid that states are kept on (``ssm_chunk``).
        key_heads: Hk; each is that of ``Hv / Hk`` value heads side by side.
        value_heads: Hv.
        key_dim: K.
        value_dim: V.
        by_channel: each channel of a key decays by itself (Kimi Delta Attention), not the head as a whole; each key
            head then has one value head.

    Raises:
        ValueError: sizes below 1, or key heads that do not divide the value heads, or are not as many, by channel.
    """

    layer: int
    chunk: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    by_channel: bool = False

    def __post_init__(self) -> None:
        if min(self.sizes) < 1 or self.value_heads % self.key_heads:
            raise ValueError(f"{self}: allowed: at least 1 of each, and key heads that divide the value heads")
        if self.by_channel and self.key_heads != self.value_heads:
            raise ValueError(f"{self}: allowed by channel: as many key heads as value heads")

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return Hk, Hv, K and V."""
        return self.key_heads, self.value_heads, self.key_dim, self.value_dim

    @cached_property
    def numbers(self) -> tuple[int, int, int, int, bool]:
        """Return the sizes and whether each channel decays by itself, as a kernel takes them."""
        return (*self.sizes, self.by_channel)

    @cached_property
    def decays(self) -> int:
        """Return how many numbers a token's decay is."""
        return self.value_heads * self.key_dim if self.by_channel else self.value_heads

    @cached_property
    def inner(self) -> int:
        """Return the width of the values."""
        return self.value_heads * self.value_dim

    @cached_property
    def width(self) -> int:
        """Return the width of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @cached_property
    def shapes_of_slot(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return the shapes of a slot's state, and of the keys of its tail."""
        deep, wide = (ceil_div(size, LANES) * LANES for size in (self.key_dim, self.value_dim))
        return (self.value_heads, self.key_dim, wide), (self.key_heads, SCAN_CHUNK, deep)


@dataclass(frozen=True)
class RoutingOptions:
    """Says how a router makes weights of its logits, and how many experts it chooses for a row.

    Attributes:
        scores: of an expert: its part of the softmax over all experts, its part of the softmax over those chosen, or
            the sigmoid of its logit.
        top_k: experts that are chosen for a row.
        normalised: the weights of a row are divided by their sum (those of ``softmax_of_chosen`` always add up to 1).
        scale: factor on the weights.
        groups: of experts, of equal size and side by side; only experts of the best groups can be chosen.
        kept_groups: how many those are.
        group_score: what groups are compared by, the best score in them or the sum of the two best.
        floor: added to the sum of sigmoids that weights are divided by.
    """

    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"]
    top_k: int
    normalised: bool
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["best", "best_two"] = "best_two"
    floor: float = 1e-20


@dataclass(frozen=True)
class ExpertOptions:
    """Says what an expert computes between its two products, and how its weights lie.

    Attributes:
        activation: its Hugging Face name.
        form: ``gated``: ``act(gate) * up`` of the halves of the first product; ``plain``: ``act`` of it, no gate;
            ``interleaved``: gates are its even outputs, ups the odd ones, and the result is
            ``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)`` with ``g = min(gate, limit)``.
        transposed: the weights have inputs before outputs.
        limit, alpha: of the interleaved form alone.
    """

    activation: str
    form: Literal["gated", "plain", "interleaved"]
    transposed: bool = False
    limit: float | None = None
    alpha: float | None = None

    @property
    def products(self) -> int:
        """Return how many outputs of the first product make an input of the second."""
        return 1 if self.form == "plain" else 2


@dataclass(frozen=True)
class ExpertWeights:
    """Holds the weights of E experts of width I on rows of width W, all of one dtype.

    Attributes:
        up: the first product, ``[E, 2 I, W]``, without a gate ``[E, I, W]``; transposed ``[E, W, 2 I]``.
        down: the second, ``[E, W, I]``; transposed ``[E, I, W]``.
        up_bias: ``[E, 2 I]``, without a gate ``[E, I]``, or None.
        down_bias: ``[E, W]`` or None.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Filters:
    """Says of some rows of logits which tokens are too unlikely to be drawn, one entry a row, on the host.

    rows: int64. temperatures: float64, above 0. top_k: int64, 0 or less for all tokens. top_p: float64, 1 for all.
    min_p: float64, 0 for all.
    """

    rows: npt.NDArray[np.int64]
    temperatures: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
