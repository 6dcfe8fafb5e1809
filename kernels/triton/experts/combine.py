"""Add up what lies at a row's places: the outputs of its experts by their weights, or the gradients of its pairs.

Invariant: one chain of fused multiply-adds in float32 from 0, in the order of the row's ids, rounded once. T rows, W
elements.
"""

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.triton.experts.sorting import Pairs
from samebit.kernels.triton.numeric import aligned, jit
from samebit.kernels.triton.tiles.table import ELEMENTS


def combine(outputs: torch.Tensor, pairs: Pairs, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums ``[T, W]`` of the outputs ``[P, W]`` at each row's places."""
    return _add_up(outputs, pairs, aligned(weights), weighted=True)


def add_up(values: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Return the sums ``[T, W]`` of what lies at each row's places."""
    return _add_up(values, pairs, values, weighted=False)


def _add_up(values: torch.Tensor, pairs: Pairs, weights: torch.Tensor, *, weighted: bool) -> torch.Tensor:
    rows, width = len(pairs.place_of), values.shape[1]
    out = torch.empty(rows, width, dtype=values.dtype, device=values.device)
    if out.numel():
        _add_rows[(rows, ceil_div(width, ELEMENTS))](
            values, pairs.place_of, weights, out, width, pairs.top_k, weighted, ELEMENTS
        )
    return out


@jit()
def _add_rows(
    values: tensor, place_of: tensor, weights: tensor, out: tensor, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    real = column < WIDTH
    acc = tl.zeros((SIZE,), tl.float32)
    weight = tl.full((SIZE,), 1.0, tl.float32)
    for choice in range(row * TOP_K, row * TOP_K + TOP_K):
        place = tl.load(place_of + choice).to(tl.int64)
        value = tl.load(values + place * WIDTH + column, mask=real, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.broadcast_to(tl.load(weights + choice), (SIZE,))
        acc = tl.fma(weight, value, acc)
    tl.store(out + row * WIDTH + column, acc.to(out.dtype.element_ty), mask=real)
