"""Find the order in which experts take their rows: pairs of row and expert, sorted by expert and then by row.

Invariant: the place of a pair is counted, never compared: the order is a function of the ids alone.

E experts.
"""

from dataclasses import dataclass
from typing import Any

import torch

from samebit.kernels.cpu.base.jit import array, compile_kernel
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.layout.options import Saved


@dataclass(frozen=True)
class Pairs:
    """Says where the pairs of a call lie.

    Attributes:
        row_of: ``[T top_k]`` int32, the row of each sorted pair.
        place_of: ``[T, top_k]`` int32, where the pair of a row and its choice has come to lie.
        offsets: ``[E + 1]`` int64, where each expert's pairs begin.
    """

    row_of: torch.Tensor
    place_of: torch.Tensor
    offsets: torch.Tensor

    def saved(self) -> Saved:
        """Return the tensors, for autograd."""
        return self.row_of, self.place_of, self.offsets


def sort_pairs(ids: torch.Tensor, experts: int) -> Pairs:
    """Sort the pairs of each row and the experts ``[T, top_k]`` that it chose.

    Raises:
        ValueError: ids of no expert.
    """
    ids = ids.contiguous()
    row_of, place_of = torch.empty(ids.numel(), dtype=torch.int32, device="cpu"), torch.empty_like(ids)
    offsets = torch.empty(experts + 1, dtype=torch.int64, device="cpu")
    try:
        _sort(array(ids), array(row_of), array(place_of), array(offsets))
    except IndexError:
        raise refusal_of(ids, experts) from None
    return Pairs(row_of, place_of, offsets)


def refusal_of(ids: torch.Tensor, experts: int) -> ValueError:
    """Return what to raise where `sort` found ids of no expert."""
    lowest, highest = (int(bound) for bound in torch.aminmax(ids))
    return ValueError(f"ids are {lowest} to {highest}; allowed: 0 to {experts - 1}")


@kernel_part
def sort(ids: Any, row_of: Any, place_of: Any, offsets: Any) -> bool:
    """Write the arrays of `Pairs`, whatever was in them; return False for an id of no expert, which a caller that
    has allocated arrays raises itself: Numba frees what its own function has, and not what callers have."""
    (rows, choices), experts = ids.shape, len(offsets) - 1
    offsets[:] = 0
    for row in range(rows):
        for choice in range(choices):
            if not 0 <= ids[row, choice] < experts:
                return False
            offsets[ids[row, choice] + 1] += 1
    for expert in range(experts):
        offsets[expert + 1] += offsets[expert]
    following = offsets.copy()
    for row in range(rows):
        for choice in range(choices):
            expert = ids[row, choice]
            place = following[expert]
            row_of[place] = row
            place_of[row, choice] = place
            following[expert] = place + 1
    return True


@compile_kernel
def _sort(ids: Any, row_of: Any, place_of: Any, offsets: Any) -> None:
    if not sort(ids, row_of, place_of, offsets):
        raise IndexError("an id of no expert")
