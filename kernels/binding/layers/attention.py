"""Compute a decoder layer of attention in one call.

`Family.layers` says of which families the layers are ``x + attention(norm(x))``, then ``x + mlp(norm(x))``, or norms of
what is added, or both, or a factor on that. A gated MLP is in the call; routed experts are a call of their module
behind it. What each part computes stands in the facts that `bind` gave to its module; here they are put together.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.attached import Attachments
from samebit.kernels.binding.attention.forwards import AttentionFacts, attention_forward
from samebit.kernels.binding.families.family import LayerFamily, LayerNorms
from samebit.kernels.binding.layers.experts import block_behind
from samebit.kernels.binding.layers.known import Found, LayerFacts
from samebit.kernels.binding.layers.linears import facts_of_part, in_parts, is_gated_mlp, linears_of, weight_of
from samebit.kernels.binding.layers.norms import bias_of, computes_norm, numbers_of
from samebit.kernels.binding.layers.untouched import passes_on, runs
from samebit.kernels.binding.modules import (
    MLPFacts,
    mlp_forward,
)
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.attention import AttentionLayerOptions, AttentionTerms, AttentionWeights
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.weights import GatedOptions, GatedWeights
from samebit.kernels.layout.options import Layer
from samebit.kernels.ops.layers.attention import attention_call
from samebit.kernels.ops.rope import RotaryTables


@dataclass(frozen=True)
class AttentionLayerFacts(LayerFacts):
    """Holds the facts of a layer of attention.

    Attributes:
        family: names of its modules.
        norms: names of the norms around attention and the MLP.
        attention: of its attention.
        dropouts: names of the layer's own, which pass on what they are given.
    """

    options: AttentionLayerOptions
    family: LayerFamily = field(kw_only=True)
    norms: LayerNorms = field(kw_only=True)
    attention: AttentionFacts = field(kw_only=True)
    dropouts: tuple[str, ...] = field(kw_only=True)

    @property
    def apart(self) -> str:
        """Implement `known.LayerFacts`."""
        return "" if self.options.inner else self.family.mlp

    def added_behind(self, layer: Any, x: torch.Tensor | None) -> torch.Tensor:
        """Implement `known.LayerFacts`."""
        added, beside = super().added_behind(layer, x), self._beside(layer)
        added = added if beside is None else added + beside(x)
        return added * self.options.factor if self.attributes else added

    def _beside(self, layer: Any) -> Any:
        """Return the MLP that computes every row beside a block of experts; None without."""
        return layer._modules.get(self.family.beside) if self.family.beside else None

    def find(self, layer: Any, context: ForwardContext) -> Found | None:
        """Implement `known.LayerFacts`."""
        children, gated = layer._modules, self.options.inner > 0
        attention, mlp, facts = children["self_attn"], children[self.family.mlp], self.attention
        of_attention, of_mlp = attention._modules, mlp._modules
        norms = [children[name] if name else None for name in self.norms.names]
        norms += [None if facts.qk_norm == "none" else of_attention[name] for name in facts.names.norms]
        untouched = (
            runs(attention, attention_forward)
            and (not gated or runs(mlp, mlp_forward))
            and all(norm is None or computes_norm(norm) for norm in norms)
            and all(passes_on(children[name]) for name in self.dropouts)
            and all(layer.__dict__[name] == self.options.factor for name in self.attributes)
        )
        if not untouched:
            return None
        names = ("qkv_proj",) if facts.fused else ("q_proj", "k_proj", "v_proj")
        groups = [tuple(of_attention[name] for name in names), (of_attention[facts.names.out],)]
        groups += _groups_of_mlp(of_mlp, mlp.samebit) if gated else []
        linears = whole = linears_of(tuple(groups), context, self.adapters)
        if whole is not None and facts.fused:
            linears = in_parts(whole, self.options.outputs)
        if linears is None or whole is None:
            return None
        ((q, k, v), (o,), *others), terms = linears
        first, attended, second, last, *of_heads = [
            None if norm is None else norm._parameters["weight"] for norm in norms
        ]
        weights = AttentionWeights(
            (first, attended, second, last), (bias_of(norms[0]), bias_of(norms[2])),
            (of_heads[0], of_heads[1]), (q, k, v), o,
            _gated_weights(*others) if gated else None,
            attention._parameters["sinks"] if facts.sinks else None,
        )  # fmt: skip
        block = None if gated else block_behind(mlp, context, self.adapters, self._beside(layer), self.options.factor)
        sources = [part for part in whole[0][0][0] if part is not None] if facts.fused else []
        return Found(weights, AttentionTerms(*terms), block, sources)

    def prepared(
        self, x: torch.Tensor, found: Found, tables: RotaryTables, earlier: torch.Tensor | None
    ) -> LayerCall | None:
        """Implement `known.LayerFacts`."""
        return attention_call(x, found.weights, tables, self.options, found.terms)


def facts_of(
    layer: nn.Module, parts: Attachments, adapters: bool, family: LayerFamily, norms: LayerNorms
) -> AttentionLayerFacts | None:
    """Put together the facts of a layer's modules; None for one that is to call them one by one.

    Args:
        layer: as transformers has it, with an MLP behind attention or another mixer, and norms around them.
        parts: what `bind` gives to each module.
        adapters: of peft are in the model.
        family: names of its modules.
        norms: those of its norms.
    """
    if "self_attn" not in layer._modules:
        return None
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule(family.mlp)
    of_attention, of_mlp = (facts_of_part(module, parts) for module in (attention, mlp))
    if not isinstance(of_attention, AttentionFacts):
        return None
    if not _is_plain_attention(of_attention) or "forward" in vars(layer):
        return None
    head_norms, gated, factor = of_attention.qk_norm != "none", is_gated_mlp(of_mlp), family.factor
    before = norms.before_attention, norms.before_mlp
    pairs = [numbers_of(layer, name, parts, biased=name in before) for name in norms.names]
    of_heads = [numbers_of(attention, name if head_norms else "", parts) for name in of_attention.names.norms]
    factor_of_layer = vars(layer)[factor] if factor else 1.0
    if None in (*pairs, *of_heads) or of_heads[0] != of_heads[1] or (norms.after_mlp and not gated):
        return None
    size = of_attention.head_dim
    first = "qkv_proj" if of_attention.fused else "q_proj"
    outputs, width = weight_of(attention.get_submodule(first), parts).shape
    outputs -= 2 * of_attention.kv_heads * size if of_attention.fused else 0
    options = AttentionLayerOptions(
        of_attention.options,
        width,
        outputs // (2 * size if of_attention.gated else size),
        of_attention.kv_heads,
        size,
        _options_of_mlp(of_mlp, mlp, parts) if gated else GatedOptions(0),
        of_attention.gated,
        tuple(pair for pair in (*pairs, of_heads[0]) if pair is not None),
        rotated=of_attention.rotation != "none",
        neighbours=of_attention.rotation == "neighbours",
        head_norms=of_attention.qk_norm,
        factor=factor_of_layer,
    )
    attributes = (factor,) if factor else ()
    dropouts = tuple(name for name, child in layer.named_children() if isinstance(child, nn.Dropout))
    return AttentionLayerFacts(
        options, adapters, attributes=attributes, family=family, norms=norms, attention=of_attention,
        dropouts=dropouts,
    )  # fmt: skip


def _options_of_mlp(facts: MLPFacts, mlp: nn.Module, parts: Attachments) -> GatedOptions:
    inner = weight_of(mlp.get_submodule(facts.names[2]), parts).shape[1]
    return GatedOptions(inner, facts.activation, facts.form == "fused")


def _groups_of_mlp(modules: Any, facts: MLPFacts) -> list[tuple[Any, ...]]:
    """Return the linear layers of a gated MLP, those of one input together."""
    *both, last = facts.names
    first = ("gate_up_proj",) if facts.form == "fused" else both
    return [tuple(modules[name] for name in first), (modules[last],)]


def _gated_weights(first: tuple[Layer, ...], second: tuple[Layer, ...]) -> GatedWeights:
    """Return what the groups of a gated MLP multiply with."""
    gate, up = (*first, (None, None))[:2]
    return GatedWeights(gate, up, *second)  # type: ignore[arg-type]


def _is_plain_attention(facts: AttentionFacts) -> bool:
    special = facts.scaled_queries or facts.adapter >= 0
    special = special or (facts.gated and (facts.fused or facts.qk_norm == "full"))
    special = special or (facts.qk_norm == "rotated" and facts.rotation == "neighbours")
    return not special and facts.key_multiplier == 1.0
