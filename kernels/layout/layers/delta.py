"""Hold what a decoder layer of a Gated DeltaNet mixer is given where it is one call.

The gates' parameters, ``a_log`` and ``dt_bias``, are of the other parameters' dtype or float32, both alike. W hidden
size, F width of the MLP.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from samebit.kernels.layout.layers.weights import GatedWeights, LayerWeights
from samebit.kernels.layout.lora.adapters import PlacedTerms
from samebit.kernels.layout.options import DeltaOptions, GatedNormOptions, Layer

MOST_INPUTS, MOST_GROUPS = 4, 2
"""Count the linear layers of a mixer's input, and the groups of them that are multiplied together, at most."""


class MixerWeights(NamedTuple):
    """Holds the parameters of a Gated DeltaNet mixer: the linear layers of its input, which `MixerOptions.outputs`
    lists, that of its result, and the others."""

    inputs: tuple[Layer, ...]
    out: Layer
    taps: torch.Tensor
    norm: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeltaWeights(LayerWeights):
    """Holds the parameters of a decoder layer: the norms before its mixer and before its MLP, and both; None for
    another MLP behind the call. Those of the gates stand at the end."""

    norms: tuple[torch.Tensor, torch.Tensor]
    mixer: MixerWeights
    mlp: GatedWeights | None

    @cached_property
    def flat(self) -> tuple[torch.Tensor | None, ...]:
        """Return the parameters one by one; None for what the layer does not have."""
        mixer, nothing = self.mixer, (None, None)
        inputs = chain.from_iterable((*mixer.inputs, *(nothing,) * (MOST_INPUTS - len(mixer.inputs))))
        gate, up, down = (nothing, nothing, nothing) if self.mlp is None else self.mlp
        return (*self.norms, *inputs, *mixer.out, *gate, *up, *down, *mixer[2:])


class DeltaTerms(NamedTuple):
    """Holds what an adapter adds to the linear layers of `DeltaWeights`; None for nothing."""

    first: PlacedTerms | None = None
    second: PlacedTerms | None = None
    out: PlacedTerms | None = None
    gate_up: PlacedTerms | None = None
    down: PlacedTerms | None = None


@dataclass(frozen=True)
class MixerOptions:
    """Tells one whole Gated DeltaNet mixer from another.

    Attributes:
        rule: of its delta rule.
        norm: of its norm; the weight is that of one head, which all heads share.
        width: W.
        taps: of its convolution.
        beta_scale: beta is at most this.
        by_key_head: the outputs of its projections stand together per key head: its query, its key, its values, their
            gates; and what its betas and what its decays are of.
    """

    rule: DeltaOptions
    norm: GatedNormOptions
    width: int
    taps: int
    beta_scale: float
    by_key_head: bool

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """Return how many outputs each linear layer of its input has: that of queries, keys and values, those of the
        gate, of beta and of the decays; by key head that of the first four, and that of beta and decays."""
        rule, heads = self.rule, self.rule.value_heads
        return (rule.width + rule.inner, 2 * heads) if self.by_key_head else (rule.width, rule.inner, heads, heads)


@dataclass(frozen=True)
class DeltaLayerOptions:
    """Tells one decoder layer of a Gated DeltaNet mixer from another.

    Attributes:
        mixer: of its mixer.
        inner: width of the gated MLP; 0 for another one behind the call.
        norms: eps and offset of each of `DeltaWeights.norms`.
    """

    mixer: MixerOptions
    inner: int
    norms: tuple[tuple[float, float], tuple[float, float]]

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of `DeltaWeights.flat`."""
        rule, width, taps, inner = self.mixer.rule, self.mixer.width, self.mixer.taps, self.inner
        outputs, heads = self.mixer.outputs, (rule.value_heads,)
        outputs += (0,) * (MOST_INPUTS - len(outputs))
        return (
            (width,), (width,), *chain.from_iterable(((count, width), (count,)) for count in outputs),
            (width, rule.inner), (width,),
            (inner, width), (inner,), (inner, width), (inner,), (width, inner), (width,),
            (rule.width, 1, taps), (rule.value_dim,), heads, heads,
        )  # fmt: skip

    @cached_property
    def numbers(self) -> tuple[np.float32, ...]:
        """Return, as a kernel takes them, the norms', then the eps of the mixer's, and the most of beta."""
        of_mixer = self.mixer.norm.eps, self.mixer.beta_scale
        return tuple(map(np.float32, (*chain.from_iterable(self.norms), *of_mixer)))
