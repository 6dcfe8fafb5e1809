"""Define what attention with keys and values computes, in the forward that `bind` gives to its modules."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from samebit.kernels.binding.families.family import AttentionNames
from samebit.kernels.binding.lora.forwards import projection, projections
from samebit.kernels.binding.modules import NormFacts
from samebit.kernels.binding.residual import Addend
from samebit.kernels.layout.forward_context import layout_of
from samebit.kernels.layout.options import AttentionOptions, HeadNorms
from samebit.kernels.ops.activation import gated
from samebit.kernels.ops.attention import attention, attention_of_rotated
from samebit.kernels.ops.linear import is_hooked
from samebit.kernels.ops.rope import RotaryTables, heads_in_halves, rotate, scale_queries


@dataclass(frozen=True)
class AttentionFacts:
    """Holds shapes and options of an attention module; `fused`, `qk_norm` and `names` as in `families.AttentionFamily`.

    Attributes:
        key_multiplier: factor on the keys.
        adapter: place in the lists of adapters that a shared attention adds to its projections; -1 for none.
        sinks: it has a parameter of one more score a head.
        gated: ``q_proj`` gives each head's query and its gate.
        scaled_queries: by the factors that come with the angles.
        rotation: of queries and keys, by the angles that reach the layer with its layout: none in a NoPE layer; of
            elements a half apart; or of neighbours, elements that stand side by side.
    """

    kv_heads: int
    head_dim: int
    fused: bool
    qk_norm: str
    options: AttentionOptions
    names: AttentionNames
    key_multiplier: float = 1.0
    adapter: int = -1
    sinks: bool = False
    gated: bool = False
    scaled_queries: bool = False
    rotation: Literal["none", "halves", "neighbours"] = "halves"


def attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: RotaryTables | None = None,
    attention_mask: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute self-attention; what remains of the arguments are Hugging Face's cache and positions, which hold nothing
    here."""
    facts: AttentionFacts = self.samebit
    tables = position_embeddings if isinstance(position_embeddings, RotaryTables) else None
    q, gate, k, v = _queries_keys_values(self, facts, hidden_states)
    q = scale_queries(q, tables) if facts.scaled_queries else q
    sinks = self.sinks.float() if facts.sinks else None
    if tables is None or facts.rotation == "none":
        layout = layout_of(attention_mask) if tables is None else tables.context
        out = attention(*_normed(self, facts, q, k), v, layout, facts.options, sinks)
    elif facts.qk_norm == "rotated":
        q, k = _normed(self, facts, rotate(q, tables), rotate(k, tables))
        out = attention(q, k, v, tables.context, facts.options, sinks)
    else:
        out = _of_rotated(self, facts, q, k, v, tables, sinks)
    out = out if gate is None else gated("sigmoid", gate, out.view(gate.shape))
    return Addend.of(projection(out.view(*hidden_states.shape[:-1], -1), self._modules[facts.names.out])), None


def _of_rotated(
    self: Any,
    facts: AttentionFacts,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: RotaryTables,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Normalise heads where they are, rotate, attend; what rotates halves of heads can normalise them on the way."""
    norms = None
    if facts.rotation == "halves" and facts.qk_norm == "head" and facts.key_multiplier == 1.0:
        norms = norms_of_heads(*_norms(self, facts))
    if norms is None:
        q, k = _normed(self, facts, q, k)
    if facts.rotation == "neighbours":
        q, k = (heads_in_halves(part, tables.cos.shape[1]) for part in (q, k))
    return attention_of_rotated(q, k, v, tables, facts.options, sinks, norms)


def _norms(self: Any, facts: AttentionFacts) -> tuple[nn.Module, nn.Module]:
    of_queries, of_keys = facts.names.norms
    return self._modules[of_queries], self._modules[of_keys]


def _normed(self: Any, facts: AttentionFacts, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys with each head normalised, where the family does that, and keys times their factor."""
    if facts.qk_norm in ("head", "rotated"):
        of_queries, of_keys = _norms(self, facts)
        q, k = of_queries(q), of_keys(k)
    return q, k if facts.key_multiplier == 1.0 else k * facts.key_multiplier


def _queries_keys_values(
    self: Any, facts: AttentionFacts, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return queries, their gates or None, keys and values ``[T, heads, D]``, neither normalised a head nor rotated."""
    if facts.fused:
        qkv = projection(x, self.qkv_proj)
        kv_width = facts.kv_heads * facts.head_dim
        q, k, v = qkv.split([qkv.shape[-1] - 2 * kv_width, kv_width, kv_width], dim=-1)
    else:
        q, k, v = projections(x, (self.q_proj, self.k_proj, self.v_proj))
    if facts.adapter >= 0:
        q = q + self.linear_q_adapter_list[facts.adapter](x)
        k = k + self.linear_k_adapter_list[facts.adapter](x)
        v = v + self.linear_v_adapter_list[facts.adapter](x)
    if facts.qk_norm == "full":
        q, k = self.q_norm(q), self.k_norm(k)
    size, gate = facts.head_dim, None
    k, v = _heads(k, size), _heads(v, size)
    if facts.gated:
        q, gate = _heads(q, 2 * size).chunk(2, dim=-1)
    else:
        q = _heads(q, size)
    return q, gate, k, v


def norms_of_heads(of_queries: Any, of_keys: Any) -> HeadNorms | None:
    """Return what normalises the heads of queries and keys; None if a call of either norm does more than that."""
    facts, others = (vars(norm).get("samebit") for norm in (of_queries, of_keys))
    if not isinstance(facts, NormFacts) or facts != others or is_hooked(of_queries) or is_hooked(of_keys):
        return None
    return HeadNorms(of_queries.weight, of_keys.weight, facts.eps, facts.offset)


def _heads(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``[T, heads, size]``."""
    return x.reshape(-1, x.shape[-1] // size, size)
