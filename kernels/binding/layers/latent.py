"""Compute a decoder layer of attention over latents in one call.

`Family.layers` says of which families the layers are ``x + attention(norm(x))``, then ``x + mlp(norm(x))``. A gated MLP
is in the call; routed experts are a call of their module behind it.

An indexer is in the call too, or what an earlier layer has chosen is read. Attention whose keys are not rotated is
called module by module.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.attached import Attachments
from samebit.kernels.binding.latent.forwards import LatentFacts, expansion_forward, latent_forward
from samebit.kernels.binding.latent.indexer import IndexerFacts, indexer_forward, weights_forward
from samebit.kernels.binding.layers.experts import block_behind
from samebit.kernels.binding.layers.known import Found, LayerFacts
from samebit.kernels.binding.layers.linears import facts_of_part, is_plain_mlp, linears_of, weight_of
from samebit.kernels.binding.layers.untouched import product_of, runs
from samebit.kernels.binding.modules import NormFacts, layer_norm_forward, mlp_forward, rms_norm_forward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.latent import (
    IndexerOptions,
    IndexWeights,
    LatentLayerOptions,
    LatentTerms,
    LatentWeights,
)
from samebit.kernels.layout.layers.weights import GatedWeights
from samebit.kernels.ops.layers.latent import latent_call, sparse_call
from samebit.kernels.ops.linear import weight_and_bias
from samebit.kernels.ops.rope import RotaryTables

_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class LatentLayerFacts(LayerFacts):
    """Holds the facts of a layer of latent attention."""

    options: LatentLayerOptions

    def find(self, layer: Any, context: ForwardContext) -> Found | None:
        """Implement `known.LayerFacts`."""
        low_rank, gated = self.options.query_rank > 0, self.options.inner > 0
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
        of_index = self.options.index
        index = None if of_index is None else _index_weights(inside["indexer"], of_index)
        if not untouched or (index is None and of_index is not None):
            return None
        first = inside["q_a_proj"] if low_rank else inside["q_proj"]
        groups = [(first, inside["kv_a_proj_with_mqa"]), (inside["o_proj"],)]
        groups += [(inside["q_b_proj"],)] if low_rank else []
        groups += [(of_mlp["gate_proj"], of_mlp["up_proj"]), (of_mlp["down_proj"],)] if gated else []
        linears = linears_of(tuple(groups), context, self.adapters)
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
            index,
        )
        block = None if gated else block_behind(mlp, context, self.adapters)
        return Found(weights, LatentTerms(first_terms, query_terms, o_terms, *other_terms), block)

    def prepared(
        self, x: torch.Tensor, found: Found, tables: RotaryTables, earlier: torch.Tensor | None
    ) -> LayerCall | None:
        """Implement `known.LayerFacts`."""
        return latent_call(x, found.weights, tables, self.options, found.terms)


@dataclass(frozen=True)
class SparseLayerFacts(LatentLayerFacts):
    """Holds the facts of a sparse layer, whose rows attend only to the tokens that an indexer chose."""

    def prepared(
        self, x: torch.Tensor, found: Found, tables: RotaryTables, earlier: torch.Tensor | None
    ) -> LayerCall | None:
        """Implement `known.LayerFacts`."""
        return sparse_call(x, found.weights, tables, self.options, found.terms, earlier)


def facts_of(layer: nn.Module, parts: Attachments, adapters: bool) -> LatentLayerFacts | None:
    """Put together the facts of a layer's modules; None for one that is to call them one by one.

    Args:
        layer: as transformers has it, with ``self_attn``, ``mlp`` and the norm before each.
        parts: what `bind` gives to each module.
        adapters: of peft are in the model.
    """
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    attached = parts.get(attention)
    if attached is None or attached.forward is not latent_forward:
        return None
    of_attention: LatentFacts = attached.facts
    low_rank, reads = of_attention.low_rank, of_attention.reads
    index = _index_of(attention.get_submodule("indexer"), parts) if reads == "own choice" and low_rank else None
    if reads == "own choice" and index is None:
        return None
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
        index,
    )
    if reads != "all":
        return SparseLayerFacts(options, adapters, of_attention.returns_choice)
    return LatentLayerFacts(options, adapters)


def _index_of(indexer: nn.Module, parts: Attachments) -> IndexerOptions | None:
    """Return the options of an indexer; None for one of other modules than transformers' own has."""
    facts, norm = facts_of_part(indexer, parts), indexer.get_submodule("k_norm")
    if not isinstance(facts, IndexerFacts) or type(norm) is not nn.LayerNorm:
        return None
    return IndexerOptions(facts.options, facts.interleaved, norm.eps)


def _index_weights(indexer: Any, options: IndexerOptions) -> IndexWeights | None:
    """Return the parameters of an indexer; None where a call of its modules does more than compute with them."""
    inside = indexer._modules
    norm, factors = inside["k_norm"], inside["weights_proj"]
    products = [product_of(inside[name]) for name in ("wq_b", "wk")]
    queries, keys = (None if module is None else weight_and_bias(module) for module in products)
    untouched = (
        runs(indexer, indexer_forward)
        and runs(norm, layer_norm_forward)
        and runs(factors, weights_forward)
        and norm.eps == options.eps
    )
    if not untouched or queries is None or keys is None:
        return None
    of_norm = norm._parameters["weight"], norm._parameters["bias"]
    return IndexWeights(queries, keys, of_norm, factors._parameters["weight"])
