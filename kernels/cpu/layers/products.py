"""Multiply inside of a kernel that computes several operations in one call, and choose it by what multiplies.

There is one kernel for each way to multiply: the way is the processor's and the dtype's, and as a part each costs
compilation. T rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from samebit.kernels.cpu.base.memory import elements, floats
from samebit.kernels.cpu.base.numeric import widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm import amx, amx_tiles, dots, dots_vectors, few_rows, many_rows

_few, _many = few_rows.multiply.part, many_rows.multiply.part
_few_pairs, _many_pairs = dots.multiply_few.part, dots.multiply.part
_tiles = amx.multiply.part

ROW_PARTS = 16
"""Count of pieces that rows are cut into: scratch memory is allocated once a piece."""

_WORTH_SHARING = 1 << 12
"""Elements from which on a second thread is worth its while: it is awake."""


@inlined_part
def shared(work: int, threads: int) -> int:
    """Return how many threads take shares of ``work`` elements."""
    return threads if work >= _WORTH_SHARING else 1


@kernel_part
def _widen_part(part: int, source_at: int, count: int, out_at: int, kind: Any) -> None:
    """Write a share of ``count`` elements as float32."""
    source, out = elements(source_at, count, kind), floats(out_at, count)
    for i in range(count * part // ROW_PARTS, count * (part + 1) // ROW_PARTS):
        out[i] = widen(source[i])


@inlined_part
def write_widened(threads: int, source_at: int, count: int, out_at: int, kind: Any) -> int:
    """Write ``count`` elements as float32; return where."""
    share_out(_widen_part, ROW_PARTS, shared(count, threads), (source_at, count, out_at, kind))
    return out_at


@kernel_part
def product(threads: int, x: int, stride: int, rows: int, inputs: int, layers: Any, kind: Any) -> None:
    """Multiply T rows with up to three layers (`gemm.layers`) in float32."""
    if rows <= few_rows.MOST_ROWS:
        _few(threads, x, stride, rows, inputs, layers, kind)
    else:
        _many(threads, x, stride, rows, inputs, layers, kind)


@kernel_part
def product_of_pairs(threads: int, x: int, stride: int, rows: int, inputs: int, layers: Any, kind: Any) -> None:
    """Multiply in bfloat16, in pairs of inputs."""
    if rows <= dots.MOST_ROWS:
        _few_pairs(threads, x, stride, rows, inputs, layers)
    else:
        _many_pairs(threads, x, stride, rows, inputs, layers)


@kernel_part
def product_by_tiles(threads: int, x: int, stride: int, rows: int, inputs: int, layers: Any, kind: Any) -> None:
    """Multiply in bfloat16 with tile instructions."""
    _tiles(threads, x, stride, rows, inputs, layers)


class Kernels(NamedTuple):
    """Holds the kernels of a layer by what multiplies in them.

    Each is a function of its module: Numba keeps a kernel on disk under the file and name of its function, and does not
    find it again for a closure.
    """

    plain: Callable[..., None]
    by_pairs: Callable[..., None]
    by_tiles: Callable[..., None]

    def of(self, dtype: torch.dtype) -> Callable[..., None]:
        """Return the kernel for elements of this type, on this processor."""
        if dtype != torch.bfloat16:
            return self.plain
        if amx_tiles.available():
            return self.by_tiles
        return self.by_pairs if dots_vectors.available() else self.plain
