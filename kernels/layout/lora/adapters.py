"""Say which low-rank adapter each row of a forward call goes through.

Invariants:

* The choice belongs to the context of a call (`forward_context.ForwardContext.adapters`). Who switches adapters on a
  shared module changes nothing of a call that another thread makes, nor of a recomputation.
* An adapter is what it was when it was made: other layers or another scale are another adapter. Its matrices are read
  at each call, because a trainer writes to them; those of a fixed one, which was loaded, stay what and where they are.
  Who knows when the trainer writes brings `KeptTerms` along, and forgets them then.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from samebit.kernels.layout.options import Layer
from samebit.kernels.layout.transfer import indices

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
class LowRanks:
    """Holds the terms of layers that share an input.

    Attributes:
        fixed: the matrices stay what and where they are as long as this object lives.
        worked_out: what kernels have worked out of them, for other calls with this object.
    """

    each: tuple[LowRank, ...]
    fixed: bool = False
    worked_out: dict[object, Any] = field(default_factory=dict)

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of all matrices; None of several."""
        dtypes = {term.down.dtype for term in self.each}
        return dtypes.pop() if len(dtypes) == 1 else None

    def in_parts(self, sizes: tuple[int, ...]) -> "LowRanks":
        """Return the terms of one layer as those of layers that have so many of its outputs each, worked out once."""
        if sizes not in self.worked_out:
            (term,) = self.each
            ups = term.up.split(sizes)
            self.worked_out[sizes] = LowRanks(tuple(LowRank(term.down, up, term.scale) for up in ups), self.fixed)
        found: LowRanks = self.worked_out[sizes]
        return found


class GroupTerms(NamedTuple):
    """Names what an adapter adds to some of the layers that share an input: their places among these, the terms, and
    the rows ``[n]`` int64 that go through it, None for all."""

    places: tuple[int, ...]
    terms: LowRanks
    rows: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class PlacedTerms:
    """Holds what the adapters of a call add to layers that share an input.

    Attributes:
        groups: of each adapter that changes one of the layers.
        dtype: of the layers.
        hooks: where modules of the adapters keep the hooks of their calls.
        worked_out: what kernels have worked out of it, which lasts as long as this.
    """

    groups: tuple[GroupTerms, ...]
    dtype: torch.dtype
    hooks: tuple[Mapping[int, Any], ...] = ()
    worked_out: dict[object, Any] = field(default_factory=dict)

    def in_parts(self, sizes: tuple[int, ...]) -> "PlacedTerms":
        """Return the terms of one layer as those of layers that have so many of its outputs each, worked out once."""
        if sizes not in self.worked_out:
            groups = (
                GroupTerms(tuple(range(len(sizes))), terms.in_parts(sizes), rows) for _, terms, rows in self.groups
            )
            self.worked_out[sizes] = replace(self, groups=tuple(groups), worked_out={})
        found: PlacedTerms = self.worked_out[sizes]
        return found

    @property
    def fit_one_call(self) -> bool:
        """Return whether each adapter's matrices are float32, or all of the layers' dtype."""
        return all(group.terms.dtype in (torch.float32, self.dtype) for group in self.groups)


@dataclass(frozen=True, eq=False)
class Delta:
    """Holds what an adapter adds to one linear layer: ``scale * up(down(x))``.

    Attributes:
        down: ``[r, K]``, without a bias.
        up: ``[N, r]``, without a bias, the same dtype.
        fixed: the two modules have no other owner; once written, their matrices stay what and where they are.
    """

    down: nn.Linear
    up: nn.Linear
    scale: float
    fixed: bool = False


@dataclass(frozen=True, eq=False)
class Deltas:
    """Holds what an adapter adds to layers that share an input."""

    each: tuple[Delta, ...]

    @cached_property
    def hooks(self) -> tuple[Mapping[int, Any], ...]:
        """Return where the modules keep the hooks of their calls; there are no hooks while all are empty."""
        modules = [module for delta in self.each for module in (delta.down, delta.up)]
        return tuple(
            hooks
            for module in modules
            for hooks in (
                module._forward_hooks,
                module._forward_pre_hooks,
                module._backward_hooks,
                module._backward_pre_hooks,
            )
        )

    @cached_property
    def fixed(self) -> LowRanks | None:
        """Return the matrices of fixed deltas; None of others, which are read at each call."""
        if not all(delta.fixed for delta in self.each):
            return None
        terms = (LowRank(delta.down.weight, delta.up.weight, delta.scale) for delta in self.each)
        return LowRanks(tuple(terms), fixed=True)


@dataclass(frozen=True, eq=False)
class Site:
    """Holds what a call of layers that share an input computes through one adapter, found once.

    Attributes:
        layers: weights and biases.
        places: of the layers that the adapter changes.
        terms: what it adds to these; None for nothing.
        hooks: where all modules concerned keep the hooks of their calls; while one is not empty, call them.
    """

    layers: tuple[Layer, ...]
    places: tuple[int, ...]
    terms: LowRanks | None
    hooks: tuple[Mapping[int, Any], ...]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the layers."""
        return self.layers[0][0].dtype

    @cached_property
    def placed(self) -> PlacedTerms | None:
        """Return what is added to all rows; None for nothing."""
        if self.terms is None:
            return None
        return PlacedTerms((GroupTerms(self.places, self.terms),), self.dtype, self.hooks)


Sites = dict[tuple[nn.Module, ...], Site]
"""Holds the sites of one adapter by the modules that are called."""


Groups = tuple[tuple["Adapter", torch.Tensor | None], ...]
"""Lists adapters, each with the rows ``[n]`` int64 that go through it, None for all."""


class _Mixture:
    """Holds what calls of layers are made of for rows of several kinds, as long as all their adapters are there."""

    def __init__(self, groups: Groups, on_end: Callable[[Any], None]) -> None:
        self.calls: dict[nn.Module, Any] = {}
        self._groups = [(ref(adapter, on_end), rows) for adapter, rows in groups]

    def is_of(self, groups: Groups) -> bool:
        """Return whether these are the adapters, and the rows."""
        return len(groups) == len(self._groups) and all(
            mine() is adapter and (rows is its if rows is None or its is None else torch.equal(rows, its))
            for (mine, its), (adapter, rows) in zip(self._groups, groups, strict=True)
        )


class KeptTerms:
    """Keeps terms of adapters that a trainer writes to, as fixed ones, from one change of the weights to the next.

    Beside them it keeps sites, and what calls of layers are made of, of any adapter, as long as the adapter is there;
    ``calls`` of layers without an adapter.
    """

    def __init__(self) -> None:
        self._terms: dict[Deltas, LowRanks] = {}
        self._sites: WeakKeyDictionary[Adapter, Sites] = WeakKeyDictionary()
        self._calls: WeakKeyDictionary[Adapter, dict[nn.Module, Any]] = WeakKeyDictionary()
        self._mixture: _Mixture | None = None
        self.calls: dict[nn.Module, Any] = {}

    def of(self, deltas: Deltas) -> LowRanks | None:
        """Return the terms that are kept for these deltas, if any are."""
        return self._terms.get(deltas)

    def keep(self, deltas: Deltas, terms: tuple[LowRank, ...]) -> LowRanks:
        """Keep the terms of these deltas."""
        self._terms[deltas] = fixed = LowRanks(terms, fixed=True)
        return fixed

    def sites_of(self, adapter: "Adapter") -> Sites:
        """Return the sites of an adapter, to which calls through it add."""
        return self._sites.setdefault(adapter, {})

    def calls_of(self, adapter: "Adapter") -> dict[nn.Module, Any]:
        """Return what calls of layers are made of all whose rows go through this adapter."""
        return self._calls.setdefault(adapter, {})

    def calls_of_rows(self, groups: Groups) -> dict[nn.Module, Any] | None:
        """Return what calls of layers are made of whose rows are of several kinds, as in the step before; None in the
        first step of such rows, as the next may have others."""
        mixture = self._mixture
        if mixture is not None and mixture.is_of(groups):
            return mixture.calls
        this = ref(self)

        def end(_: object) -> None:
            kept = this()
            if kept is not None:
                kept._mixture = None

        self._mixture = _Mixture(groups, end)
        return None

    def forget(self) -> None:
        """Keep nothing: the weights change."""
        self._terms.clear()
        self._sites.clear()
        self._calls.clear()
        self._mixture = None
        self.calls.clear()


@dataclass(frozen=True, eq=False)
class Adapter:
    """Holds an adapter of a model.

    Attributes:
        deltas: by the name of the linear layer.
        version: of its matrices, where they were loaded; 0 where a trainer writes to them.
        number: of no other adapter that the same calls go through.
        alias: the name that requests and results give, where it is not its own.
    """

    name: str
    deltas: Mapping[str, Delta]
    version: int = 0
    number: int = field(default_factory=new_number)
    alias: str | None = None
    _joined: dict[tuple[str, ...], tuple[Deltas, tuple[int, ...]]] = field(default_factory=dict, repr=False)

    @property
    def public_name(self) -> str:
        """Return the name that results give, which a later version has too."""
        return self.name if self.alias is None else self.alias

    def of_layers(self, layers: tuple[str, ...]) -> tuple[Deltas, tuple[int, ...]]:
        """Return what is added to those of the layers that the adapter changes, and their places among the layers."""
        found = self._joined.get(layers)
        if found is None:
            places = tuple(place for place, layer in enumerate(layers) if layer in self.deltas)
            found = Deltas(tuple(self.deltas[layers[place]] for place in places)), places
            self._joined[layers] = found
        return found


@dataclass(frozen=True, eq=False)
class RowAdapters:
    """Lists the adapters of a call, each with the rows ``[n]`` int64 that go through it, None for all; rows that none
    names go through the model alone.

    Attributes:
        kept: what earlier calls with the same weights have kept; None where changes are not announced.
    """

    groups: Groups = ()
    kept: KeptTerms | None = None

    @classmethod
    def all_through(cls, adapter: Adapter | None, kept: KeptTerms | None = None) -> "RowAdapters":
        """Return the choice of one adapter for all rows; None for the model alone."""
        return cls(() if adapter is None else ((adapter, None),), kept)

    @cached_property
    def sites(self) -> tuple[Sites, ...]:
        """Return the sites of each group's adapter, as long as the weights stay; none if nobody announces changes."""
        return () if self.kept is None else tuple(self.kept.sites_of(adapter) for adapter, _ in self.groups)

    @cached_property
    def calls(self) -> dict[nn.Module, Any] | None:
        """Return where it is kept what calls of layers are made of; None in the first step of rows of several kinds,
        and if nobody announces changes."""
        kept = self.kept
        if kept is None or not self.groups:
            return None if kept is None else kept.calls
        if self.one_for_all:
            return kept.calls_of(self.groups[0][0])
        return kept.calls_of_rows(self.groups) if self.on_host else None

    @property
    def on_host(self) -> bool:
        """Return whether the rows of groups are named on the host, or not at all."""
        return all(rows is None or rows.is_cpu for _, rows in self.groups)

    @property
    def one_for_all(self) -> bool:
        """Return whether all rows go through one adapter."""
        return len(self.groups) == 1 and self.groups[0][1] is None

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Return the lowest and the highest row that a group names; zeros where none names any."""
        named = [rows for _, rows in self.groups if rows is not None and len(rows)]
        if not named:
            return 0, 0
        return min(int(rows.min()) for rows in named), max(int(rows.max()) for rows in named)

    def on(self, device: torch.device) -> "RowAdapters":
        """Return the choice with its rows on the device, once for all layers, without waiting for it."""
        if all(rows is None for _, rows in self.groups):
            return self
        return replace(
            self,
            groups=tuple(
                (adapter, None if rows is None else indices(rows.numpy(), device)) for adapter, rows in self.groups
            ),
        )
