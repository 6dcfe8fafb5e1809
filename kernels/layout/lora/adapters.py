"""Say which low-rank adapter each row of a forward call goes through.

Invariants:

* The choice belongs to the context of a call (`forward_context.ForwardContext.adapters`). Who switches adapters on a
  shared module changes nothing of a call that another thread makes, nor of a recomputation.
* An adapter is what it was when it was made: other layers or another scale are another adapter. Its matrices are read
  at each call, because a trainer writes to them.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

BASE = "__base__"
"""Names the model without an adapter, as the ``adapter_names`` of peft do."""

_numbers = itertools.count(1)


def new_number() -> int:
    """Return a number that no other adapter of this process has drawn."""
    return next(_numbers)


class LowRank(NamedTuple):
    """Names what is added to a layer's result of x, ``scale * (x @ down.T) @ up.T``: ``[r, K]``, ``[N, r]``."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class Delta:
    """Holds what an adapter adds to one linear layer: ``scale * up(down(x))``.

    Attributes:
        down: ``[r, K]``, without a bias.
        up: ``[N, r]``, without a bias, the same dtype.
    """

    down: nn.Linear
    up: nn.Linear
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """Holds an adapter of a model.

    Attributes:
        deltas: by the name of the linear layer.
        version: of its matrices, where they were loaded; 0 where a trainer writes to them.
        number: of no other adapter that the same calls go through.
    """

    name: str
    deltas: Mapping[str, Delta]
    version: int = 0
    number: int = field(default_factory=new_number)


@dataclass(frozen=True, eq=False)
class RowAdapters:
    """Lists the adapters of a call, each with the rows ``[n]`` int64 that go through it, None for all; rows that none
    names go through the model alone."""

    groups: tuple[tuple[Adapter, torch.Tensor | None], ...] = ()

    @classmethod
    def all_through(cls, adapter: Adapter | None) -> "RowAdapters":
        """Return the choice of one adapter for all rows; None for the model alone."""
        return cls() if adapter is None else cls(((adapter, None),))
