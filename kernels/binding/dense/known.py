"""Find again what a decoder layer's one call was made of, from step to step.

Invariant: what is found again is what another look at the layer's modules would find. Their hooks, forwards, submodules
and parameters, and where these lie in memory, are compared at each call; where one differs, it is looked again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

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
    def of(cls, layer: nn.Module, found: Any, weights: Sequence[torch.Tensor]) -> "KnownCall":
        """Note what stands in the modules of a layer now."""
        inside = [module for module in layer.modules() if module is not layer]
        hooks = [
            hooks
            for module in inside
            for hooks in (
                module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
            )
        ]  # fmt: skip
        places: list[tuple[dict[str, Any], str]] = [(module.__dict__, "forward") for module in inside]
        places += [(module._modules, name) for module in layer.modules() for name in module._modules]
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


def _marks(weights: Sequence[torch.Tensor]) -> list[Any]:
    return [*map(torch.Tensor.data_ptr, weights), *map(torch.Tensor.stride, weights), *map(_SHAPE, weights)]
