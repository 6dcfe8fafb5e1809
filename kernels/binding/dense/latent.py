"""Compute a decoder layer of attention over latents in one call.

`Family.layers` says of which families the layers are ``x + attention(norm(x))``, then ``x + mlp(norm(x))``. A gated MLP
is in the call; routed experts are a call of their module behind it.

Attention to chosen tokens, and attention whose keys are not rotated, are called module by module.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from samebit.kernels.binding.dense.linears import facts_of_part, is_plain_mlp, linears_of, weight_of
from samebit.kernels.binding.dense.untouched import runs
from samebit.kernels.binding.latent.forwards import LatentFacts, expansion_forward, latent_forward
from samebit.kernels.binding.modules import NormFacts, mlp_forward, rms_norm_forward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.latent import GatedWeights, LatentLayerOptions, LatentTerms, LatentWeights
from samebit.kernels.ops.dense.latent import latent_layer
from samebit.kernels.ops.rope import RotaryTables

_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class LatentLayerFacts:
    """Holds what the layer's call needs to know beside its parameters.

    Attributes:
        options: sizes and constants.
        adapters: of peft are in the model, so that the layer may be recomputed inside a context of its own.
    """

    options: LatentLayerOptions
    adapters: bool

    @property
    def apart(self) -> str:
        """Implement `known.LayerFacts`."""
        return "" if self.options.inner else "mlp"

    def find(self, layer: Any, context: ForwardContext) -> tuple[LatentWeights, LatentTerms] | None:
        """Implement `known.LayerFacts`."""
        return _weights(layer, self, context)

    def compute(
        self, x: torch.Tensor, found: tuple[LatentWeights, LatentTerms], tables: RotaryTables
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Implement `known.LayerFacts`."""
        return latent_layer(x, found[0], tables, self.options, found[1])


def facts_of(layer: nn.Module, parts: dict[nn.Module, Any], adapters: bool) -> LatentLayerFacts | None:
    """Put together the facts of a layer's modules; None for one that is to call them one by one.

    Args:
        layer: as transformers has it, with ``self_attn``, ``mlp`` and the norm before each.
        parts: what `bind` gives to each module, its forward and its facts.
        adapters: of peft are in the model.
    """
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    of_attention = facts_of_part(attention, parts)
    rotated = (parts.get(attention) or (None,))[0] is latent_forward
    if not rotated or not isinstance(of_attention, LatentFacts) or of_attention.reads != "all":
        return None
    low_rank = of_attention.low_rank
    norms = [layer.get_submodule(name) for name in _NORMS]
    norms += [attention.get_submodule("q_a_layernorm")] if low_rank else []
    norms += [attention.get_submodule("kv_a_layernorm")]
    of_norms = [facts_of_part(norm, parts) for norm in norms]
    pairs = [(norm.eps, norm.offset) for norm in of_norms if isinstance(norm, NormFacts)]
    if len(pairs) != len(norms) or "forward" in vars(layer):
        return None
    heads, plain = of_attention.heads, is_plain_mlp(facts_of_part(mlp, parts))
    first = weight_of(attention.get_submodule("q_a_proj" if low_rank else "q_proj"), parts)
    options = LatentLayerOptions(
        of_attention.options,
        first.shape[1],
        heads.heads,
        heads.nope,
        heads.value,
        first.shape[0] if low_rank else 0,
        weight_of(mlp.get_submodule("gate_proj"), parts).shape[0] if plain else 0,
        of_attention.interleaved,
        tuple(pairs if low_rank else (*pairs[:2], (0.0, 0.0), *pairs[2:])),
    )
    return LatentLayerFacts(options, adapters)


def _weights(layer: Any, facts: LatentLayerFacts, context: ForwardContext) -> tuple[LatentWeights, LatentTerms] | None:
    """Return the layer's parameters, and what the call's adapter adds; None where a call of its modules does more than
    compute with them."""
    if torch_modules._has_any_global_hook():
        return None
    low_rank, gated = facts.options.query_rank > 0, facts.options.inner > 0
    children = layer._modules
    attention, mlp = children["self_attn"], children["mlp"]
    inside, of_mlp = attention._modules, mlp._modules
    norms = [children[name] for name in _NORMS]
    norms += [inside["q_a_layernorm"] if low_rank else None, inside["kv_a_layernorm"]]
    expansion = inside["kv_b_proj"]
    untouched = (
        runs(attention, latent_forward)
        and runs(expansion, expansion_forward)
        and all(norm is None or runs(norm, rms_norm_forward) for norm in norms)
        and (not gated or runs(mlp, mlp_forward))
    )
    if not untouched:
        return None
    first = inside["q_a_proj"] if low_rank else inside["q_proj"]
    groups = [(first, inside["kv_a_proj_with_mqa"]), (inside["o_proj"],)]
    groups += [(inside["q_b_proj"],)] if low_rank else []
    groups += [(of_mlp["gate_proj"], of_mlp["up_proj"]), (of_mlp["down_proj"],)] if gated else []
    linears = linears_of(tuple(groups), context, facts.adapters)
    if linears is None:
        return None
    (both, (o,), *others), (first_terms, o_terms, *other_terms) = linears
    queries, query_terms = (others.pop(0)[0], other_terms.pop(0)) if low_rank else (None, None)
    weights = LatentWeights(
        tuple(None if norm is None else norm._parameters["weight"] for norm in norms),  # type: ignore[arg-type]
        both,  # type: ignore[arg-type]
        queries,
        expansion._parameters["weight"],
        o,
        GatedWeights(*others[0], *others[1]) if gated else None,
    )
    return weights, LatentTerms(first_terms, query_terms, o_terms, *other_terms)
