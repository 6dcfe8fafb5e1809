"""Notice that the weights of a module were written.

Invariants
----------
* Weights are what a state dict holds: parameters, and buffers such as the correction bias of a router.
* A look costs O(tensors) and touches no value: 0.05 ms for the 311 of a model of 28 layers.
* What is noticed: writes in place that torch counts (a tensor's version), and a weight that is another tensor.
  What torch does not count (`.data`, fused optimizers) can not be noticed; docs/reference.md has the list.
* torch counts a write when it is done, on a GPU when it is launched: whoever accepts writes that it was not told of
  waits for the GPU, after it. One that is still going on while a step computes is noticed after that step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, getitem, is_

from torch import Tensor, nn

VERSION = attrgetter("_version")

_Place = tuple[Mapping[str, Tensor | None], str, Tensor]
"""Names a weight: where a module holds it, under which name, and the tensor."""


class WeightWatch:
    """Watches the weights of a module; without one it sees nothing."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self._modules = () if module is None else (module,)
        self._seen = _Seen()
        self.accept()

    def moved(self) -> bool:
        """Return whether the weights were written since they were accepted."""
        return self._seen.moved()

    def accept(self) -> None:
        """Take the weights as they are now."""
        self._seen = _Seen.of(self._places())

    def extend(self) -> None:
        """Watch the weights that have come to the module since, too; of the others it is still known if they moved.

        Any thread may call this: what another accepts meanwhile is noticed as a write at worst.
        """
        seen = self._seen
        known = set(zip(map(id, seen.holders), seen.names, strict=True))
        self._seen = seen.and_of([place for place in self._places() if (id(place[0]), place[1]) not in known])

    def _places(self) -> list[_Place]:
        return [
            (holder, name, tensor)
            for watched in self._modules
            for module in watched.modules()
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None and name not in module._non_persistent_buffers_set
        ]


@dataclass(frozen=True, eq=False)
class _Seen:
    """Holds weights and how often they had been written: the tensor of each name in its holder, those that torch
    counts, and the sum of their counts."""

    holders: Sequence[Mapping[str, Tensor | None]] = ()
    names: Sequence[str] = ()
    tensors: Sequence[Tensor] = ()
    counted: Sequence[Tensor] = ()
    writes: int = 0

    @staticmethod
    def of(places: list[_Place]) -> _Seen:
        """Return the weights in these places as they are now."""
        tensors = [tensor for _, _, tensor in places]
        counted = [tensor for tensor in tensors if not tensor.is_inference()]  # those are not counted
        holders, names = [holder for holder, _, _ in places], [name for _, name, _ in places]
        return _Seen(holders, names, tensors, counted, _sum(counted))

    def and_of(self, places: list[_Place]) -> _Seen:
        """Return these, and the weights in more places as they are now."""
        more = _Seen.of(places)
        return _Seen(
            [*self.holders, *more.holders],
            [*self.names, *more.names],
            [*self.tensors, *more.tensors],
            [*self.counted, *more.counted],
            self.writes + more.writes,
        )

    def moved(self) -> bool:
        """Return whether they were written since, or are other tensors."""
        if not self.tensors:
            return False
        try:
            same = all(map(is_, map(getitem, self.holders, self.names), self.tensors))
        except KeyError:  # a tensor was taken out
            return True
        return not same or _sum(self.counted) != self.writes


def _sum(counted: Sequence[Tensor]) -> int:
    return sum(map(VERSION, counted))
