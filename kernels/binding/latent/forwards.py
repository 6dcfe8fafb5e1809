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

from samebit.kernels.binding.lora.forwards import projection, projections
from samebit.kernels.binding.residual import Addend
from samebit.kernels.layout.forward_context import ForwardContext, layout_of
from samebit.kernels.layout.options import LatentOptions
from samebit.kernels.ops.latent.attention import latent_attention
from samebit.kernels.ops.latent.heads import multiply_heads
from samebit.kernels.ops.rope import RotaryTables, join_rotated


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
        reads: all tokens, those that its own ``indexer`` chooses, or those that an earlier layer's has chosen.
        returns_choice: the result has a third part, what was chosen.
    """

    heads: HeadFacts
    options: LatentOptions
    low_rank: bool
    interleaved: bool
    reads: Literal["all", "own choice", "earlier choice"] = "all"
    returns_choice: bool = False


def latent_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: RotaryTables,
    attention_mask: torch.Tensor | None = None,
    prev_topk_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Compute self-attention over latents; what remains of the arguments are Hugging Face's cache and positions, which
    hold nothing here. ``prev_topk_indices``: what an earlier layer has chosen."""
    return _attention(self, hidden_states, position_embeddings.context, position_embeddings, prev_topk_indices)


def latent_forward_without_positions(
    self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> tuple[torch.Tensor | None, ...]:
    """Do as `latent_forward` where nothing is rotated."""
    return _attention(self, hidden_states, layout_of(attention_mask), None, None)


def _attention(
    self: Any, hidden_states: torch.Tensor, context: ForwardContext, tables: RotaryTables | None,
    earlier_choice: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    facts: LatentFacts = self.samebit
    heads, options = facts.heads, facts.options
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    q, compressed, low_rank = _queries_and_latents(self, facts, x)
    chosen = None if facts.reads == "all" else earlier_choice
    if facts.reads == "own choice":
        chosen = self.indexer(x, low_rank, tables)
    q = q.view(-1, heads.heads, heads.nope + options.rope)
    absorbed = self.kv_b_proj(q[..., : heads.nope], "keys")
    latent = self.kv_a_layernorm(compressed[:, : options.rank].contiguous())
    queries = _joined(absorbed, q[..., heads.nope :], tables, facts)
    keys = _joined(latent[:, None], compressed[:, None, options.rank :], tables, facts)[:, 0]
    attended = latent_attention(queries, keys, context, options, chosen)
    out = self.kv_b_proj(attended, "values")
    projected = Addend.of(projection(out.view(*hidden_states.shape[:-1], -1), self.o_proj))
    return (projected, None, chosen) if facts.returns_choice else (projected, None)


def _queries_and_latents(
    self: Any, facts: LatentFacts, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the queries of all heads, each token's latent before its norm and rotated key before its rotation, and
    the latent of the queries behind its norm, if they have one."""
    if not facts.low_rank:
        q, compressed = projections(x, (self.q_proj, self.kv_a_proj_with_mqa))
        return q, compressed, None
    q, compressed = projections(x, (self.q_a_proj, self.kv_a_proj_with_mqa))
    low_rank = self.q_a_layernorm(q)
    return projection(low_rank, self.q_b_proj), compressed, low_rank


def _joined(x: torch.Tensor, y: torch.Tensor, tables: RotaryTables | None, facts: LatentFacts) -> torch.Tensor:
    """Put ``y`` ``[T, heads, rope]`` behind ``x`` ``[T, heads, rank]``, rotated, as halves; without tables, as it
    is."""
    return torch.cat([x, y], dim=-1) if tables is None else join_rotated(x, y, tables, facts.interleaved)


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
    weight = self.weight.contiguous().view(facts.heads, facts.nope + facts.value, -1)
    if half == "keys":
        return multiply_heads(x, weight[:, : facts.nope], transposed=True)
    return multiply_heads(x, weight[:, facts.nope :])
