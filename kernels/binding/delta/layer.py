"""Compute a decoder layer of a Gated DeltaNet mixer in one call.

`Family.layers` says of which families the layers are ``x + mixer(norm(x))``, then ``x + mlp(norm(x))``. A gated MLP is
in the call; routed experts are a call of their module behind it.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.attached import Attachments
from samebit.kernels.binding.delta.mixer import DeltaFacts, delta_forward
from samebit.kernels.binding.layers.experts import block_behind
from samebit.kernels.binding.layers.known import Found, LayerFacts
from samebit.kernels.binding.layers.linears import facts_of_part, is_plain_mlp, linears_of, weight_of
from samebit.kernels.binding.layers.untouched import runs
from samebit.kernels.binding.modules import NormFacts, mlp_forward, rms_norm_forward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.delta import (
    MOST_GROUPS,
    DeltaLayerOptions,
    DeltaTerms,
    DeltaWeights,
    MixerWeights,
)
from samebit.kernels.layout.layers.weights import GatedWeights
from samebit.kernels.ops.delta.layer import delta_call
from samebit.kernels.ops.rope import RotaryTables

MIXER = "linear_attn"
"""Names the mixer in its layer."""

_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class DeltaLayerFacts(LayerFacts):
    """Holds the facts of a layer of Gated DeltaNet.

    Attributes:
        mixer: its mixer's.
    """

    options: DeltaLayerOptions
    mixer: DeltaFacts = field(kw_only=True)

    def find(self, layer: Any, context: ForwardContext) -> Found | None:
        """Implement `known.LayerFacts`."""
        gated, children = self.options.inner > 0, layer._modules
        mixer, mlp = children[MIXER], children["mlp"]
        inside, of_mlp = mixer._modules, mlp._modules
        norms = [children[name] for name in _NORMS]
        untouched = (
            runs(mixer, delta_forward)
            and all(runs(norm, rms_norm_forward) for norm in norms)
            and (not gated or runs(mlp, mlp_forward))
        )
        if not untouched:
            return None
        family = self.mixer.family
        groups = [tuple(inside[name] for name in names) for names in (*family.inputs, (family.out,))]
        groups += [(of_mlp["gate_proj"], of_mlp["up_proj"]), (of_mlp["down_proj"],)] if gated else []
        linears = linears_of(tuple(groups), context, self.adapters)
        if linears is None:
            return None
        (layers, terms), count = linears, len(family.inputs)
        of_input, ((out,), *others) = layers[:count], layers[count:]
        taps, norm = (inside[name]._parameters["weight"] for name in (self.mixer.convolutions[0], family.norm))
        gates = mixer._parameters["A_log"], mixer._parameters["dt_bias"]
        weights = DeltaWeights(
            (norms[0]._parameters["weight"], norms[1]._parameters["weight"]),
            MixerWeights(tuple(chain.from_iterable(of_input)), out, taps, norm, *gates),
            GatedWeights(*others[0], *others[1]) if gated else None,
        )
        block = None if gated else block_behind(mlp, context, self.adapters)
        return Found(weights, DeltaTerms(*terms[:count], *[None] * (MOST_GROUPS - count), *terms[count:]), block)

    def prepared(
        self, x: torch.Tensor, found: Found, tables: RotaryTables, earlier: torch.Tensor | None
    ) -> LayerCall | None:
        """Implement `known.LayerFacts`."""
        return delta_call(x, found.weights, tables.context, self.options, found.terms)


def facts_of(layer: nn.Module, parts: Attachments, adapters: bool) -> DeltaLayerFacts | None:
    """Put together the facts of a layer's modules; None for one that is to call them one by one.

    Args:
        layer: as transformers has it, with ``linear_attn``, ``mlp`` and the norm before each.
        parts: what `bind` gives to each module.
        adapters: of peft are in the model.
    """
    mixer, mlp = facts_of_part(layer.get_submodule(MIXER), parts), layer.get_submodule("mlp")
    norms = [facts_of_part(layer.get_submodule(name), parts) for name in _NORMS]
    pairs = [(norm.eps, norm.offset) for norm in norms if isinstance(norm, NormFacts)]
    if not isinstance(mixer, DeltaFacts) or mixer.one_call is None or len(pairs) != 2 or "forward" in vars(layer):
        return None
    plain = is_plain_mlp(facts_of_part(mlp, parts))
    inner = weight_of(mlp.get_submodule("gate_proj"), parts).shape[0] if plain else 0
    options = DeltaLayerOptions(mixer.one_call, inner, (pairs[0], pairs[1]))
    return DeltaLayerFacts(options, adapters, mixer=mixer)
