"""Define the forwards that `bind` gives to the indexer of sparse attention (DSA), which chooses the tokens to read.

Invariants:

* Nothing in it has a gradient, as in Hugging Face's classes: what is chosen is a constant of the backward.
* Its weights for the heads are float32 sums that are never rounded, whatever the dtype of the model, like the logits of
  routers.
* Rotated elements stand in halves, as in attention; they are the first of a query and of a key.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samebit.kernels.layout.options import IndexOptions
from samebit.kernels.ops.latent.selection import choose_keys
from samebit.kernels.ops.linear import linear
from samebit.kernels.ops.rope import RotaryTables, in_halves, rotate


@dataclass(frozen=True)
class IndexerFacts:
    """Holds the options of an indexer, the rotated elements of its queries and keys, and whether they stand side by
    side."""

    options: IndexOptions
    rope: int
    interleaved: bool


def indexers_of(model: nn.Module) -> list[nn.Module]:
    """Return the indexers of a bound model that choose, in the order of the layers."""
    return [module for module in model.modules() if isinstance(module.__dict__.get("samebit"), IndexerFacts)]


def most_chosen(model: nn.Module) -> int:
    """Return how many tokens a row of a bound model attends to at most; 0 where there is no such limit."""
    facts: list[IndexerFacts] = [module.__dict__["samebit"] for module in indexers_of(model)]
    return max((one.options.top_k for one in facts), default=0)


@torch.no_grad()
def indexer_forward(self: Any, x: torch.Tensor, low_rank: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Choose the tokens that each row attends to.

    Args:
        self: the indexer.
        x: ``[T, W]``, what attention is given.
        low_rank: ``[T, R]``, the latent of its queries.
        tables: angles and layout of the call.

    Returns:
        What `choose_keys` returns.
    """
    facts: IndexerFacts = self.samebit
    options = facts.options
    queries = self.wq_b(low_rank).view(-1, options.heads, options.size)
    keys = self.k_norm(self.wk(x))[:, None]
    queries, keys = (_rotated(part, tables, facts) for part in (queries, keys))
    weights = self.weights_proj(x) * options.heads**-0.5
    return choose_keys(queries, keys[:, 0], weights, tables.context, options)


def weights_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute a linear layer in float32, whatever the dtypes."""
    return linear(x.float(), self.weight.float())


def _rotated(x: torch.Tensor, tables: RotaryTables, facts: IndexerFacts) -> torch.Tensor:
    first = x[..., : facts.rope]
    rotated = rotate(in_halves(first) if facts.interleaved else first, tables)
    return torch.cat([rotated, x[..., facts.rope :]], dim=-1)
