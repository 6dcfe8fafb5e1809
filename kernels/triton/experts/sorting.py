"""Find the order in which experts take their rows: pairs of row and expert, sorted by expert and then by row.

Invariants: the place of a pair is counted, never compared, so the order is a function of the ids alone. No number that
depends on the ids comes to the host: what is launched depends on sizes alone, and a CUDA graph can record it.

P pairs, top_k a row.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.options import Saved
from samebit.kernels.triton.numeric import aligned, jit

_PAIRS = 2048
"""Pairs that a program looks at at once."""

_ITEMS = 128
"""Work items that a program writes at once."""

ITEM = 3
"""Numbers of a work item: the expert, the first of its pairs that the item takes, and where its pairs end."""

_ITEM = tl.constexpr(ITEM)


@dataclass(frozen=True)
class Pairs:
    """Says where the pairs of a call lie, all int32.

    Attributes:
        choice_of: ``[P]``, of each sorted pair which choice it is: ``top_k * row`` and its number among the row's.
        place_of: ``[T, top_k]``, where each choice has come to lie.
        offsets: ``[E + 1]``, where each expert's pairs begin.
    """

    choice_of: torch.Tensor
    place_of: torch.Tensor
    offsets: torch.Tensor

    @property
    def top_k(self) -> int:
        """Return how many experts a row has."""
        return self.place_of.shape[1]

    @property
    def experts(self) -> int:
        """Return how many experts the layer has."""
        return len(self.offsets) - 1

    def saved(self) -> Saved:
        """Return the tensors, for autograd."""
        return self.choice_of, self.place_of, self.offsets

    def items(self, rows: int) -> torch.Tensor:
        """List the work of a product with this count of rows a tile, ``[P // rows + E, ITEM]``; some items are empty.

        The items of an expert begin at a place that its offset alone decides, with room for all.
        """
        items = torch.empty(
            len(self.choice_of) // rows + self.experts, ITEM, dtype=torch.int32, device=self.offsets.device
        )
        _list_items[(self.experts,)](self.offsets, items, rows, _ITEMS, num_warps=1)
        return items


def sort_pairs(ids: torch.Tensor, experts: int) -> Pairs:
    """Sort the pairs of each row and the experts ``[T, top_k]`` that it chose."""
    ids = aligned(ids)
    choice_of = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    place_of = torch.empty_like(ids)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    _sort[(experts,)](ids, choice_of, place_of, offsets, ids.numel(), _PAIRS)
    return Pairs(choice_of, place_of, offsets)


@jit(do_not_specialize=["count"])
def _sort(
    ids: tensor, choice_of: tensor, place_of: tensor, offsets: tensor, count: tensor, PAIRS: tl.constexpr
) -> None:
    """Place the pairs of one expert: behind those of lower ids, in the order of their rows."""
    expert = tl.program_id(0)
    lower = tl.zeros((PAIRS,), tl.int32)
    for first in range(0, count, PAIRS):
        choice = first + tl.arange(0, PAIRS)
        chosen = tl.load(ids + choice, mask=choice < count, other=expert)
        lower += (chosen < expert).to(tl.int32)
    end = tl.sum(lower, axis=0)
    if expert == 0:
        tl.store(offsets, 0)
    for first in range(0, count, PAIRS):
        choice = first + tl.arange(0, PAIRS)
        mine = tl.load(ids + choice, mask=choice < count, other=-1) == expert
        place = end + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(choice_of + place, choice, mask=mine)
        tl.store(place_of + choice, place, mask=mine)
        end += tl.sum(mine.to(tl.int32), axis=0)
    tl.store(offsets + expert + 1, end)


@jit()
def _list_items(offsets: tensor, items: tensor, ROWS: tl.constexpr, ITEMS: tl.constexpr) -> None:
    """Write the items of one expert, and the empty ones up to those of the next."""
    expert = tl.program_id(0)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    first, last = begin // ROWS + expert, end // ROWS + expert + 1
    for done in range(first, last, ITEMS):
        item = done + tl.arange(0, ITEMS)
        at, real = items + _ITEM * item, item < last
        tl.store(at, expert, mask=real)
        tl.store(at + 1, tl.minimum(begin + (item - first) * ROWS, end), mask=real)
        tl.store(at + 2, end, mask=real)
