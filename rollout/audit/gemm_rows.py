"""Check whether a GEMM gives a row the same bits among any number of rows, on this machine and these shapes.

On the CPU it does by its source, which this row of the table shows. On a GPU it is measured: what a tensor core does
with a row of a tile is the hardware's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
import torch
from torch import nn

from samebit.kernels.openmp import num_threads
from samebit.kernels.ops.linear import linear

MOST_ROWS = 320
TILE_ROWS = 16
LARGE = 1 << 24
"""Weights of at least this count of elements are tried with only some numbers of rows."""


@torch.no_grad()
def check_gemm_rows(model: nn.Module) -> tuple[int, int, float]:
    """Return (rows compared, rows that differ, largest difference) over the shapes of the model's linear layers."""
    layers = {module.weight.shape: module for module in model.modules() if isinstance(module, nn.Linear)}
    rows, differing, worst = 0, 0, 0.0
    threads = num_threads()
    try:
        for layer in layers.values():
            draws = torch.Generator().manual_seed(0)
            x = torch.randn(MOST_ROWS, layer.in_features, generator=draws, dtype=torch.float32).to(layer.weight)
            expected = torch.cat([linear(tile, layer.weight, layer.bias) for tile in x.split(TILE_ROWS)])
            for count in _thread_counts():
                numba.set_num_threads(count)
                for found, wanted in _products(x, layer, expected):
                    rows += len(found)
                    differing += int((_bits(found) != _bits(wanted)).any(1).sum())
                    worst = max(worst, float((found.float() - wanted.float()).abs().max()))
    finally:
        numba.set_num_threads(threads)
    return rows, differing, worst


def _thread_counts() -> list[int]:
    """Return how many threads samebit's kernels are given: torch's number is not theirs."""
    most: int = numba.config.NUMBA_NUM_THREADS
    return sorted({count for count in (1, 2, 3, 4, 8, most) if count <= most})


def _products(x: torch.Tensor, layer: nn.Linear, expected: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield products of the first n rows, of the rows in another order, and of operands off their alignment."""
    weight, bias = layer.weight, layer.bias
    step = TILE_ROWS if weight.numel() < LARGE else 4 * TILE_ROWS
    for count in (*range(1, TILE_ROWS + 4), 2 * TILE_ROWS, 3 * TILE_ROWS, *range(step, MOST_ROWS + 1, step)):
        yield linear(x[:count], weight, bias), expected[:count]
    yield linear(x.flip(0), weight, bias).flip(0), expected
    shifted = _misaligned(weight)
    for count in (3, TILE_ROWS, 5 * TILE_ROWS):
        yield linear(_misaligned(x[:count]), weight, bias), expected[:count]
        yield linear(x[:count], shifted, bias), expected[:count]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def _misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose first element is one element past an aligned address."""
    copy = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return copy.copy_(tensor)
