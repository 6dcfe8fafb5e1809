"""Find again what a decoder layer's one call was made of, from step to step.

Invariant: what is found again is what another look at the layer's modules would find. Their hooks, forwards, submodules
and parameters, and where these lie in memory, are compared at each call; where one differs, it is looked again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.weights import LayerWeights

Weights = TypeVar("Weights", bound=LayerWeights)
Terms = TypeVar("Terms")

_SHAPE = attrgetter("shape", "dtype")


@dataclass(frozen=True, eq=False)
class KnownCall:
    """Holds what a layer's call was made of, ``found``, and what that was read from.

    Attributes:
        hooks: where its modules keep the hooks of their calls: all are empty.
        holders, names, things: dictionaries of its modules, a name of each, and what was found there.
        weights, marks: the parameters that the call reads, and how each lies in memory.
    """

    found: Any
    hooks: Sequence[Mapping[int, Any]]
    holders: Sequence[dict[str, Any]]
    names: Sequence[str]
    things: Sequence[Any]
    weights: Sequence[torch.Tensor]
    marks: list[Any]

    @classmethod
    def of(cls, layer: nn.Module, found: Any, weights: Sequence[torch.Tensor], apart: str = "") -> "KnownCall":
        """Note what stands in the modules of a layer now, but for those of the child that is called by itself."""
        inside = [one for name, child in layer.named_children() if name != apart for one in child.modules()]
        hooks = [
            hooks
            for module in inside
            for hooks in (
                module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
            )
        ]  # fmt: skip
        places: list[tuple[dict[str, Any], str]] = [(module.__dict__, "forward") for module in inside]
        places += [(module._modules, name) for module in (layer, *inside) for name in module._modules]
        places += [(module._parameters, name) for module in inside for name in module._parameters]
        holders, names = zip(*places, strict=True)
        things = [holder.get(name) for holder, name in places]
        return cls(found, hooks, holders, names, things, weights, _marks(weights))

    def holds(self) -> bool:
        """Return whether all of it stands as it stood."""
        return (
            not any(self.hooks)
            and all(map(is_, map(dict.get, self.holders, self.names), self.things))
            and _marks(self.weights) == self.marks
            and not torch_modules._has_any_global_hook()
        )


def known_weights(
    layer: nn.Module, context: ForwardContext, find: Callable[[], tuple[Weights, Terms] | None], apart: str = ""
) -> tuple[Weights, Terms] | None:
    """Return what ``find`` gives, a layer's parameters and what an adapter adds: found again where no adapter is asked
    for and nothing has changed. ``apart``: the child of the layer that is called by itself."""
    adapters = context.adapters
    kept = None if adapters is None or adapters.groups else adapters.kept
    if kept is None:
        return find()
    known = kept.calls.get(layer)
    if known is None or not known.holds():
        found = find()
        if found is None:
            return None
        known = kept.calls[layer] = KnownCall.of(layer, found, found[0].present, apart)
    weights: tuple[Weights, Terms] = known.found
    return weights


def _marks(weights: Sequence[torch.Tensor]) -> list[Any]:
    return [*map(torch.Tensor.data_ptr, weights), *map(torch.Tensor.stride, weights), *map(_SHAPE, weights)]
