"""Find again what the one call of a decoder layer, or those of all layers, were made of, from step to step.

Invariant: what is found again is what another look at the modules would find. Their hooks, forwards, submodules and
parameters, and where these lie in memory, are compared at each call; where one differs, it is looked again. Those of
all layers are compared at once, before the first is computed: between two layers the caches are full of weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.layers.untouched import runs
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.experts import BlockOptions, BlockWeights
from samebit.kernels.ops.linear import some_listen, some_listen_to_all
from samebit.kernels.ops.rope import RotaryTables

_SHAPE = attrgetter("shape", "dtype")


@dataclass(frozen=True, eq=False)
class ExpertBlock:
    """Holds what the one call of a block of experts reads, and the parameters that this lies in."""

    weights: BlockWeights
    options: BlockOptions
    sources: list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Found:
    """Holds what the one call of a layer reads.

    Attributes:
        weights: the parameters of a layer of its kind, `LayerWeights`.
        terms: what the call's adapter adds to these.
        block: of experts behind it; None if it has none, or if their module must be called.
        sources: parameters that weights are a part of.
    """

    weights: Any
    terms: Any
    block: ExpertBlock | None
    sources: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class LayerFacts(ABC):
    """Knows how one kind of decoder layer is computed in one call.

    Attributes:
        options: sizes and constants; ``inner`` is 0 for another MLP behind the call.
        adapters: of peft are in the model, so that the layer may be recomputed inside a context of its own.
        returns_choice: a layer returns, behind its result, which tokens its rows have read.
        attributes: names of the layer's own that the call reads.
    """

    options: Any
    adapters: bool
    returns_choice: bool = False
    attributes: tuple[str, ...] = ()

    @property
    def apart(self) -> str:
        """Return the name of the layer's child behind that call, which has one of its own or is called by itself; empty
        for none."""
        return "" if self.options.inner else "mlp"

    def added_behind(self, layer: Any, x: torch.Tensor | None) -> torch.Tensor:
        """Return what the layer adds to the call's result, by calls of modules of the other one that the call has."""
        given = layer.get_submodule(self.apart)(x)
        added: torch.Tensor = given[0] if isinstance(given, tuple) else given
        return added

    @abstractmethod
    def find(self, layer: Any, context: ForwardContext) -> Found | None:
        """Return what the call reads; None where a call of the layer's modules does more than compute with it."""

    @abstractmethod
    def prepared(
        self, x: torch.Tensor, found: Found, tables: RotaryTables, earlier: torch.Tensor | None
    ) -> LayerCall | None:
        """Return the call that computes the layer of what is like ``x``; None where it does not fit. ``earlier``: what
        an earlier layer has chosen, if layers choose tokens."""


@dataclass(frozen=True, eq=False)
class KnownCall:
    """Holds what a layer's call was made of, ``found``, and what that was read from.

    Attributes:
        hooks: where its modules keep the hooks of their calls, of which none listens.
        holders, names, things: dictionaries of its modules, a name of each, and what was found there.
        weights, marks: the parameters that the call reads, and where and how each lies in memory.
    """

    found: Any
    hooks: Sequence[Mapping[int, Any]]
    holders: Sequence[dict[str, Any]]
    names: Sequence[str]
    things: Sequence[Any]
    weights: Sequence[torch.Tensor]
    marks: list[Any]

    @classmethod
    def of(
        cls, layer: nn.Module, found: Any, weights: Sequence[torch.Tensor], apart: str = "",
        attributes: Sequence[str] = (), hooks: Sequence[Mapping[int, Any]] = (),
    ) -> "KnownCall":  # fmt: skip
        """Note what stands in the modules of a layer now, but for those of a child that is called by itself, these
        attributes of its own, and hooks of adapters that live beside it."""
        inside = [one for name, child in layer.named_children() if name != apart for one in child.modules()]
        return cls.of_modules((layer, *inside), inside, found, weights, [(layer, name) for name in attributes], hooks)

    @classmethod
    def of_modules(
        cls, parents: Iterable[nn.Module], modules: Sequence[nn.Module], found: Any,
        weights: Sequence[torch.Tensor] = (), attributes: Iterable[tuple[nn.Module, str]] = (),
        hooks: Sequence[Mapping[int, Any]] = (),
    ) -> "KnownCall":  # fmt: skip
        """Note what the children of the parents are now, what else stands in the modules, attributes of some, and other
        hooks."""
        places: list[tuple[dict[str, Any], str]] = [(module.__dict__, "forward") for module in modules]
        places += [(module._modules, name) for module in parents for name in module._modules]
        places += [(module.__dict__, name) for module, name in attributes]
        kept = [holder for module in modules for holder in (module._parameters, module._buffers)]
        places += [(holder, name) for holder in kept for name in holder]
        holders, names = zip(*places, strict=True)
        things = [holder.get(name) for holder, name in places]
        return cls(found, [*_hooks_of(modules), *hooks], holders, names, things, weights, _marks(weights))

    @classmethod
    def of_all(cls, layers: nn.ModuleList, calls: Sequence["KnownCall"]) -> "KnownCall":
        """Join those of all layers; hooks and forwards of the layers themselves are compared too."""
        return cls.joined([call.found for call in calls], [cls.of_modules((layers,), list(layers), None), *calls])

    @classmethod
    def joined(cls, found: Any, calls: Sequence["KnownCall"]) -> "KnownCall":
        """Note what several have noted, to compare it at once."""
        weights = list(chain.from_iterable(call.weights for call in calls))
        return cls(
            found,
            list(chain.from_iterable(call.hooks for call in calls)),
            list(chain.from_iterable(call.holders for call in calls)),
            list(chain.from_iterable(call.names for call in calls)),
            list(chain.from_iterable(call.things for call in calls)),
            weights,
            _marks(weights),
        )

    def holds(self) -> bool:
        """Return whether all of it stands as it stood."""
        return (
            not any(map(some_listen, filter(None, self.hooks)))
            and all(map(is_, map(dict.get, self.holders, self.names), self.things))
            and _marks(self.weights) == self.marks
            and not some_listen_to_all()
        )


def known_weights(layer: nn.Module, facts: LayerFacts, context: ForwardContext) -> Found | None:
    """Return what the layer's one call reads: found again where nothing has changed."""
    calls = kept_calls(context)
    if calls is None:
        return facts.find(layer, context)
    known = calls.get(layer)
    if known is None or not known.holds():
        found = facts.find(layer, context)
        if found is None:
            return None
        read, apart = [*found.weights.present, *found.sources], facts.apart
        if found.block is not None:
            read, apart = read + found.block.sources, ""
        hooks = [hooks for placed in found.terms if placed is not None for hooks in placed.hooks]
        known = calls[layer] = KnownCall.of(layer, found, read, apart, facts.attributes, hooks)
    again: Found = known.found
    return again


def known_layers(layers: nn.ModuleList, forward: Any, context: ForwardContext) -> list[Found] | None:
    """Return what the one call of each layer reads, where all may be computed one after the other without calling
    them: each has this forward, and nobody listens to a layer."""
    calls = kept_calls(context)
    known = None if calls is None else calls.get(layers)
    if known is None or not known.holds():
        found = _found_now(layers, forward, context)
        if calls is None or found is None:
            return found
        known = calls[layers] = KnownCall.of_all(layers, [calls[layer] for layer in layers])
    again: list[Found] = known.found
    return again


def _found_now(layers: nn.ModuleList, forward: Any, context: ForwardContext) -> list[Found] | None:
    if not all(runs(layer, forward) for layer in layers):
        return None
    all_found: list[Found] = []
    for layer in layers:
        found = known_weights(layer, layer.__dict__["samebit"], context)
        if found is None:
            return None
        all_found.append(found)
    return all_found


def kept_calls(context: ForwardContext) -> dict[nn.Module, Any] | None:
    """Return where it is kept what calls are made of; None in the first step of rows of several kinds, or where nobody
    announces changes."""
    return None if context.adapters is None else context.adapters.calls


def _hooks_of(modules: Iterable[nn.Module]) -> list[Mapping[int, Any]]:
    return [
        hooks
        for module in modules
        for hooks in (
            module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        )
    ]  # fmt: skip


def _marks(weights: Sequence[torch.Tensor]) -> list[Any]:
    """Return where weights lie and how; the strides of one that is not contiguous do not matter: no call reads it."""
    return [*map(torch.Tensor.data_ptr, weights), *map(torch.Tensor.is_contiguous, weights), *map(_SHAPE, weights)]
