"""Compute the matrix product ``out = x @ weight.T + bias`` on the CPU for a few rows, as of a decode step, with the
bits of `many_rows`.

Invariant: an output is summed as `many_rows` does it, in chains of `SUM_BLOCK` inputs; only the lanes of the
vectors are others (see `few_rows_vectors`). T rows, K inputs, N outputs.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import elements, scratch
from samebit.kernels.cpu.base.numeric import narrow, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.few_rows_vectors import ROWS, multiply_few
from samebit.kernels.cpu.gemm.layers import MOST_LAYERS, Layers, most_outputs, share_of, shares
from samebit.kernels.cpu.gemm.many_rows_vectors import HALF, HALVES_ARE_FASTER, SUM_BLOCK, fetch
from samebit.kernels.layout.grids import CACHE_LINE, LANES

MOST_ROWS = HALF // 2 if HALVES_ARE_FASTER else ROWS[-1]
"""The most rows for which this kernel is faster: more fill a half vector of `many_rows`, where that is worth it."""

READING = 4
"""Count of rows whose products take the time of reading the weight."""

_ZERO = np.float32(0.0)


def _multiply(threads: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Layers, kind: Any) -> None:
    """Multiply as `many_rows.multiply` does, up to `MOST_ROWS` rows; an item is a share of each layer's outputs."""
    parts = shares(1, most_outputs(layers), LANES, threads) if rows > 0 else 0
    share_out(_multiply_part, parts, threads, (parts, x_address, x_stride, rows, inputs, layers, kind))


multiply = SharedKernel(_multiply)


@kernel_part
def _multiply_part(
    part: int, parts: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Layers, kind: Any
) -> None:
    """Compute one of ``parts`` shares of each layer's outputs."""
    panel = scratch(MOST_ROWS * inputs)
    copy_rows(elements(x_address, rows * x_stride, kind), x_stride, rows, inputs, panel)
    for place in range(MOST_LAYERS):
        share = share_of(layers, place, part, parts, LANES, rows, inputs, kind)
        multiply_share(panel, rows, inputs, share)


@inlined_part
def tile_rows(rows: int) -> int:
    """Return the rows of the smallest tile that these fit in."""
    return 1 << int(rows > 1) + int(rows > 2) + int(rows > 4) + int(rows > 8)


@kernel_part
def copy_rows(x: Any, x_stride: int, rows: int, inputs: int, panel: Any) -> None:
    """Write ``panel[row, k] = x[row, k]`` in float32; the last row also stands for those that a tile has beyond."""
    for row in range(tile_rows(rows)):
        at = min(row, rows - 1) * x_stride
        for k in range(inputs):
            panel[row * inputs + k] = widen(x[at + k])


@kernel_part
def multiply_share(panel: Any, rows: int, inputs: int, share: Any) -> None:
    """Compute a share of the outputs for the rows of a panel."""
    weight, first, last = share.weight, share.first, share.last
    many = tile_rows(rows)
    sums = scratch(many * LANES)
    for begin in range(first, last, LANES):
        count = min(LANES, last - begin)
        sums[:] = _ZERO
        for k in range(0, inputs, SUM_BLOCK):
            depth = min(SUM_BLOCK, inputs - k)
            fetch_next(weight, begin, last, inputs, k, depth)
            multiply_few(many, panel, k, inputs, count, weight, begin * inputs + k, inputs, depth, sums)
        write_few(sums, rows, begin, count, share)


@inlined_part
def fetch_next(weight: Any, begin: int, last: int, inputs: int, k: int, depth: int) -> None:
    """Ask for ``depth`` inputs from ``k`` on of the weights that come after those of sixteen outputs."""
    for coming in range(begin + LANES, min(begin + 2 * LANES, last)):
        for i in range(k, k + depth, CACHE_LINE // weight.itemsize):
            fetch(weight, coming * inputs + i)


@inlined_part
def write_few(sums: Any, rows: int, begin: int, count: int, share: Any) -> None:
    """Write ``out[row, begin + lane] = sums[row, lane] + bias[begin + lane]``, rounded once; an empty bias is none."""
    for row in range(rows):
        for lane in range(count):
            total = sums[row * LANES + lane]
            if len(share.bias) > 0:
                total += widen(share.bias[begin + lane])
            share.out[row * share.outputs + begin + lane] = narrow(total, share.out[0])
