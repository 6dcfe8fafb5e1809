"""Turn a float32 matrix over on the CPU, in tiles that write whole cache lines.

torch's copy of a turned matrix takes two to four times as long. T rows of width W.
"""

import torch

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import floats
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.many_rows_vectors import transpose_tile
from samebit.kernels.layout.grids import LANES


def _transpose(threads: int, source_at: int, rows: int, width: int, target_at: int) -> None:
    """Write ``[W, T]`` from ``[T, W]``, both contiguous."""
    share_out(_transpose_strip, (width + LANES - 1) // LANES, threads, (source_at, rows, width, target_at))


@kernel_part
def _transpose_strip(strip: int, source_at: int, rows: int, width: int, target_at: int) -> None:
    """Write a strip of sixteen rows of the result, or of as many as are left."""
    source, target = floats(source_at, rows * width), floats(target_at, rows * width)
    first, last = strip * LANES, min((strip + 1) * LANES, width)
    whole = rows // LANES * LANES if last - first == LANES else 0
    for row in range(0, whole, LANES):
        transpose_tile(source, row * width + first, width, target, first * rows + row, rows)
    for column in range(first, last):
        for row in range(whole, rows):
            target[column * rows + row] = source[row * width + column]


_COPIES_AN_ELEMENT = 32
"""Copies that take the time of one element of a row-wise kernel: other threads are woken for a large matrix alone."""

_transposed = SharedKernel(_transpose)


def transposed(matrix: torch.Tensor) -> torch.Tensor:
    """Return ``matrix.t()`` of a float32 one ``[T, W]``, contiguous: a copy, unless it lies so."""
    if matrix.t().is_contiguous():
        return matrix.t()
    matrix = matrix.contiguous()
    rows, width = matrix.shape
    out = torch.empty(width, rows, dtype=torch.float32, device="cpu")
    _transposed(matrix.numel() // _COPIES_AN_ELEMENT, matrix.data_ptr(), rows, width, out.data_ptr())
    return out
