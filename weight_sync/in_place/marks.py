"""Record what the tensors of a shared module looked like, to tell later which of them have changed.

Invariants
----------
* What differs has changed. What does not differ proves nothing: fused optimizers and `.data` write without torch's
  counting it, and of the values only a sample is kept.
* It costs a few microseconds a tensor, whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

SAMPLED = 256
"""The values of a tensor that are kept, evenly spread; of a smaller one all."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Mark:
    """Says where a tensor is, how often torch saw it written (-1: it does not count), and some of its bits."""

    address: int
    writes: int
    sample: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Mark:
        writes = -1 if tensor.is_inference() else tensor._version
        return cls(tensor.data_ptr(), writes, _sample(tensor.detach()))

    def differs(self, other: Mark) -> bool:
        """Tell whether the tensor has certainly been written between the two."""
        if (self.address, self.writes, self.sample.dtype) != (other.address, other.writes, other.sample.dtype):
            return True
        return not torch.equal(self.sample, other.sample)


class Marks:
    """Holds the marks of some tensors, by name."""

    @torch.no_grad()
    def __init__(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        self._marks = {name: Mark.of(tensors[name]) for name in names}

    def changed_since(self, before: Marks) -> tuple[str, ...]:
        """Return the tensors that are seen to have changed, with those that have come; different ones may have."""
        seen = before._marks
        return tuple(name for name, mark in self._marks.items() if name not in seen or mark.differs(seen[name]))


def _sample(tensor: Tensor) -> Tensor:
    bits = tensor.view(_INTEGERS[tensor.element_size()]) if tensor.element_size() in _INTEGERS else tensor
    return bits.take(_places(tensor.numel(), tensor.device))


@lru_cache(maxsize=1024)
def _places(count: int, device: torch.device) -> Tensor:
    kept = min(count, SAMPLED)
    return torch.arange(kept, device=device) * (count - 1) // max(kept - 1, 1)
