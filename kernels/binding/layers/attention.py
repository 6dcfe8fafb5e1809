"""Compute a decoder layer of attention in one call.

`Family.layers` says of which families the layers are ``x + attention(norm(x))``, then ``x + mlp(norm(x))``. A gated MLP
is in the call; routed experts are a call of their module behind it. What each part computes stands in the facts that
`bind` gave to its module; here they are put together.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.attached import Attachments
from samebit.kernels.binding.attention.forwards import AttentionFacts, attention_forward
from samebit.kernels.binding.families.family import AttentionNames
from samebit.kernels.binding.layers.experts import block_behind
from samebit.kernels.binding.layers.known import Found, LayerFacts
from samebit.kernels.binding.layers.linears import facts_of_part, is_plain_mlp, linears_of, weight_of
from samebit.kernels.binding.layers.untouched import runs
from samebit.kernels.binding.modules import (
    NormFacts,
    mlp_forward,
    rms_norm_forward,
)
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.attention import AttentionLayerOptions, AttentionTerms, AttentionWeights
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.weights import GatedWeights
from samebit.kernels.ops.layers.attention import attention_call
from samebit.kernels.ops.rope import RotaryTables


@dataclass(frozen=True)
class AttentionLayerFacts(LayerFacts):
    """Holds the facts of a layer of attention.

    Attributes:
        head_norms: queries and keys have norms.
    """

    options: AttentionLayerOptions
    head_norms: bool = field(kw_only=True)

    def find(self, layer: Any, context: ForwardContext) -> Found | None:
        """Implement `known.LayerFacts`."""
        children, gated = layer._modules, self.options.inner > 0
        attention, mlp = children["self_attn"], children["mlp"]
        of_attention, of_mlp = attention._modules, mlp._modules
        norms = [children["input_layernorm"], children["post_attention_layernorm"]]
        if self.head_norms:
            norms += [of_attention["q_norm"], of_attention["k_norm"]]
        untouched = (
            runs(attention, attention_forward)
            and (not gated or runs(mlp, mlp_forward))
            and all(runs(norm, rms_norm_forward) for norm in norms)
        )
        if not untouched:
            return None
        groups = [(of_attention["q_proj"], of_attention["k_proj"], of_attention["v_proj"]), (of_attention["o_proj"],)]
        groups += [(of_mlp["gate_proj"], of_mlp["up_proj"]), (of_mlp["down_proj"],)] if gated else []
        linears = linears_of(tuple(groups), context, self.adapters)
        if linears is None:
            return None
        ((q, k, v), (o,), *others), terms = linears
        first, second, *of_heads = [norm._parameters["weight"] for norm in norms]
        q_norm, k_norm = of_heads or (None, None)
        weights = AttentionWeights(
            (first, second), (q_norm, k_norm), (q, k, v), o, GatedWeights(*others[0], *others[1]) if gated else None
        )
        block = None if gated else block_behind(mlp, context, self.adapters)
        return Found(weights, AttentionTerms(*terms), block)

    def prepared(
        self, x: torch.Tensor, found: Found, tables: RotaryTables, earlier: torch.Tensor | None
    ) -> LayerCall | None:
        """Implement `known.LayerFacts`."""
        return attention_call(x, found.weights, tables, self.options, found.terms)


def facts_of(layer: nn.Module, parts: Attachments, adapters: bool) -> AttentionLayerFacts | None:
    """Put together the facts of a layer's modules; None for one that is to call them one by one.

    Args:
        layer: as transformers has it, with ``self_attn``, ``mlp`` and the norm before each.
        parts: what `bind` gives to each module.
        adapters: of peft are in the model.
    """
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    norms = [layer.get_submodule(name) for name in ("input_layernorm", "post_attention_layernorm")]
    of_attention, of_mlp, *of_norms = (facts_of_part(module, parts) for module in (attention, mlp, *norms))
    if not isinstance(of_attention, AttentionFacts):
        return None
    if not _is_plain_attention(of_attention) or "forward" in vars(layer):
        return None
    of_heads = NormFacts(0.0, 0.0)
    if of_attention.qk_norm == "head":
        of_heads = facts_of_part(attention.get_submodule("q_norm"), parts)
    pairs = [(norm.eps, norm.offset) for norm in (*of_norms, of_heads) if isinstance(norm, NormFacts)]
    if len(pairs) != 3:
        return None
    size, gated = of_attention.head_dim, of_attention.gated
    outputs, width = weight_of(attention.get_submodule("q_proj"), parts).shape
    options = AttentionLayerOptions(
        of_attention.options,
        width,
        outputs // (2 * size if gated else size),
        of_attention.kv_heads,
        size,
        weight_of(mlp.get_submodule("gate_proj"), parts).shape[0] if is_plain_mlp(of_mlp) else 0,
        gated,
        (pairs[0], pairs[1], pairs[2]),
        rotated=of_attention.rotation != "none",
        neighbours=of_attention.rotation == "neighbours",
    )
    return AttentionLayerFacts(options, adapters, head_norms=of_attention.qk_norm == "head")


def _is_plain_attention(facts: AttentionFacts) -> bool:
    special = facts.fused or facts.sinks or facts.scaled_queries or facts.adapter >= 0
    special = special or facts.names != AttentionNames() or facts.qk_norm in ("full", "rotated")
    return not special and facts.key_multiplier == 1.0
