"""Define the forwards of attention with a norm of values, of norms without a weight, and of a layer's own activation.

Invariants:

* Layers without keys of their own get those of an earlier layer of the same call as tensors, so that their gradients
  reach it, and attend in its pages: they write what lies there already, the same bits.
* The tensors are handed on in the dictionary that Hugging Face's decoder gives to its layers, anew in each call. The
  last layer that reads them cuts them off their graph there: a checkpoint keeps the dictionary, and is kept by the
  graph, in a circle that no collection sees. What is computed again is given gradients along the first graph.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from samebit.kernels.binding.attention.forwards import AttentionFacts, norms_of_heads
from samebit.kernels.binding.lora.forwards import projection, projections
from samebit.kernels.binding.modules import NormFacts
from samebit.kernels.ops.activation import gated
from samebit.kernels.ops.attention import attention, attention_of_rotated
from samebit.kernels.ops.norm import rms_norm
from samebit.kernels.ops.rope import RotaryTables, rotate


@dataclass(frozen=True)
class GemmaAttentionFacts:
    """Holds the facts of attention whose values have a norm.

    Attributes:
        attention: what it has as other families do.
        shared: the name that keys and values go by which layers share, this one's or those it reads; empty for none.
        own_values: it has a ``v_proj``; otherwise its values are its keys, before the norm of those.
        last: no later layer reads what it reads.
    """

    attention: AttentionFacts
    shared: str
    own_values: bool = True
    last: bool = False


@dataclass(frozen=True)
class ActivationFacts:
    """Holds the Hugging Face name of an activation."""

    activation: str


class SharedKeys(NamedTuple):
    """Holds keys, rotated, and values of a call's rows, ``[T, KV heads, D]`` each, which several layers read.

    recorded: they were computed where gradients are.
    """

    keys: torch.Tensor
    values: torch.Tensor
    recorded: bool

    def cut(self) -> "SharedKeys":
        """Return them as they are, without the graph that they come from."""
        keys, values = (part.detach().requires_grad_(part.requires_grad) for part in (self.keys, self.values))
        return SharedKeys(keys, values, self.recorded)


def attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: RotaryTables,
    attention_mask: Any = None,
    shared_kv_states: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute self-attention, and hand keys and values on where later layers read them; what remains of the arguments
    are Hugging Face's mask, cache and positions, which hold nothing here."""
    facts: GemmaAttentionFacts = self.samebit
    options, tables = facts.attention.options, position_embeddings
    q, k, v = _queries_keys_values(self, facts, hidden_states)
    v = self.v_norm(v)
    if facts.shared:
        q, k = rotate(self.q_norm(q), tables), rotate(self.k_norm(k), tables)
        shared_kv_states.setdefault(facts.shared, SharedKeys(k, v, torch.is_grad_enabled()))
        out = attention(q, k, v, tables.context, options)
    else:
        norms = norms_of_heads(self.q_norm, self.k_norm)
        if norms is None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attention_of_rotated(q, k, v, tables, options, norms=norms)
    return projection(out.view(*hidden_states.shape[:-1], -1), self.o_proj), None


def reading_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: RotaryTables,
    attention_mask: Any = None,
    shared_kv_states: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of a layer's own queries to the keys and values of an earlier layer.

    Raises:
        ValueError: those have no gradient, and this layer is recomputed for its own (reentrant checkpointing).
    """
    facts: GemmaAttentionFacts = self.samebit
    shared: SharedKeys = shared_kv_states[facts.shared]
    if torch.is_grad_enabled() and not shared.recorded:
        raise ValueError(
            "reentrant gradient checkpointing runs each layer without gradients first, so that layers which share keys "
            "and values (num_kv_shared_layers) would leave theirs out of the gradient; allowed: "
            'gradient_checkpointing_enable({"use_reentrant": False})'
        )
    q = _heads(projection(hidden_states, self.q_proj), facts)
    q = rotate(self.q_norm(q), position_embeddings)
    out = attention(q, shared.keys, shared.values, position_embeddings.context, facts.attention.options)
    if facts.last:
        shared_kv_states[facts.shared] = shared.cut()
    return projection(out.view(*hidden_states.shape[:-1], -1), self.o_proj), None


def _queries_keys_values(
    self: Any, facts: GemmaAttentionFacts, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values ``[T, heads, D]``, neither normalised nor rotated."""
    if facts.own_values:
        q, k, v = projections(x, (self.q_proj, self.k_proj, self.v_proj))
    else:
        q, k = projections(x, (self.q_proj, self.k_proj))
        v = k
    return _heads(q, facts), _heads(k, facts), _heads(v, facts)


def _heads(x: torch.Tensor, facts: GemmaAttentionFacts) -> torch.Tensor:
    """Return ``[T, heads, D]``."""
    size = facts.attention.head_dim
    return x.reshape(-1, x.shape[-1] // size, size)


def unscaled_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute RMSNorm over the last axis, without a weight: times 1, which changes no bit."""
    facts: NormFacts = self.samebit
    return rms_norm(x, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device), facts.eps)


def activation_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute an activation, as that of a gate whose up is 1."""
    facts: ActivationFacts = self.samebit
    return gated(facts.activation, x, torch.ones_like(x))
