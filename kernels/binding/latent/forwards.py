"""Define the forwards that `bind` gives to latent attention, in its absorbed form, and to the projection inside it.

Keys and values are never formed: a head's query is multiplied with the keys' half of its part of ``kv_b_proj``, and
what it has attended to, a mean of latents, with the values' half. The same in training, prefill and decode.

Invariants:

* ``kv_b_proj`` is called as a module, once for each half: under FSDP2 its weight is whole inside its own calls.
* Its weight is read at each call; nothing that is derived from it is kept.
* Rotated elements stand in halves here, whatever the class does: their order in a product of query and key is free.
  A family may rotate none: its states know positions.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from samebit.kernels.binding.lora.forwards import projections
from samebit.kernels.layout.forward_context import ForwardContext, layout_of
from samebit.kernels.layout.options import LatentOptions
from samebit.kernels.ops.latent.attention import latent_attention
from samebit.kernels.ops.latent.heads import multiply_heads
from samebit.kernels.ops.rope import RotaryTables, rotate


@dataclass(frozen=True)
class HeadFacts:
    """Holds the sizes of ``kv_b_proj``: heads, and the elements of a head's value and key, but for the rotated ones."""

    heads: int
    nope: int
    value: int


@dataclass(frozen=True)
class LatentFacts:
    """Holds shapes and options of a latent attention module.

    Attributes:
        heads: sizes of its heads.
        options: the operation's.
        low_rank: queries have a latent too: ``q_a_proj``, its norm and ``q_b_proj`` instead of ``q_proj``.
        interleaved: elements that are rotated together stand side by side.
    """

    heads: HeadFacts
    options: LatentOptions
    low_rank: bool
    interleaved: bool


def latent_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: RotaryTables,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute self-attention over latents; what remains of the arguments are Hugging Face's cache and positions, which
    hold nothing here."""
    return _attention(self, hidden_states, position_embeddings.context, position_embeddings)


def latent_forward_without_positions(
    self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Do as `latent_forward` where nothing is rotated."""
    return _attention(self, hidden_states, layout_of(attention_mask), None)


def _attention(
    self: Any, hidden_states: torch.Tensor, context: ForwardContext, tables: RotaryTables | None
) -> tuple[torch.Tensor, None]:
    facts: LatentFacts = self.samebit
    heads, options = facts.heads, facts.options
    q, compressed = _queries_and_latents(self, facts, hidden_states.reshape(-1, hidden_states.shape[-1]))
    q = q.view(-1, heads.heads, heads.nope + options.rope)
    absorbed = self.kv_b_proj(q[..., : heads.nope], "keys")
    rotated = _rotated(q[..., heads.nope :], tables, facts)
    key = _rotated(compressed[:, None, options.rank :], tables, facts)[:, 0]
    latent = self.kv_a_layernorm(compressed[:, : options.rank].contiguous())
    attended = latent_attention(
        torch.cat([absorbed, rotated], dim=-1), torch.cat([latent, key], dim=-1), context, options
    )
    out = self.kv_b_proj(attended, "values")
    projected: torch.Tensor = self.o_proj(out.view(*hidden_states.shape[:-1], -1))
    return projected, None


def _queries_and_latents(self: Any, facts: LatentFacts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries of all heads, and each token's latent before its norm and rotated key before its rotation."""
    if not facts.low_rank:
        q, compressed = projections(x, (self.q_proj, self.kv_a_proj_with_mqa))
        return q, compressed
    q, compressed = projections(x, (self.q_a_proj, self.kv_a_proj_with_mqa))
    return self.q_b_proj(self.q_a_layernorm(q)), compressed


def _rotated(x: torch.Tensor, tables: RotaryTables | None, facts: LatentFacts) -> torch.Tensor:
    """Rotate ``[T, heads, rope]``, as halves; without tables, leave it as it is."""
    if tables is None:
        return x
    if facts.interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(x, tables)


def expansion_forward(self: Any, x: torch.Tensor, half: Literal["keys", "values"]) -> torch.Tensor:
    """Multiply each head's row with its part of the weight: queries with that of its key, latents with that of its
    value.

    Args:
        self: the projection, its weight ``[heads * (nope + value), rank]``.
        x: ``[T, heads, nope]``, or ``[T, heads, rank]``.
        half: which.

    Returns:
        ``[T, heads, rank]``, or ``[T, heads, value]``.
    """
    facts: HeadFacts = self.samebit
    weight = self.weight.view(facts.heads, facts.nope + facts.value, -1)
    if half == "keys":
        return multiply_heads(x, weight[:, : facts.nope], transposed=True)
    return multiply_heads(x, weight[:, facts.nope :])
