"""Multiply each head's part of a row with that head's weight.

Invariant: as in `grouped`, a row is multiplied by the code that multiplies it in a linear layer, so it has the same
bits, whatever rows and heads are beside it and however many threads there are.

Nothing is copied but for a weight that has inputs before outputs, which is turned over in scratch: operands are read
where they lie, as parts of wider rows. A work item is a head and a share of the rows. T rows, H heads, K inputs, N
outputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import NO_END, elements
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.grouped import (
    TURNED,
    multiply_rows,
    multiply_rows_by_pairs,
    multiply_rows_by_tiles,
    turn_over,
)
from samebit.kernels.cpu.gemm.layers import Share
from samebit.kernels.cpu.gemm.many_rows import PANEL_ROWS


class Rows(NamedTuple):
    """Names rows of heads by their address; ``stride`` from row to row, ``step`` from head to head."""

    address: int
    stride: int
    step: int


class Product(NamedTuple):
    """Names the operands by their addresses; strides are in elements, and the last axis of each lies side by side.

    x: ``[T, H, K]``. out: ``[T, H, N]``. weight: ``[H, N, K]``, transposed ``[H, K, N]``, heads ``weight_step`` apart.
    """

    x: Rows
    out: Rows
    rows: int
    heads: int
    inputs: int
    outputs: int
    weight: int
    weight_step: int
    transposed: bool


def _with_rows(rows_of_head: Callable[..., None]) -> Callable[..., None]:
    """Make the work of an item from the product of a panel of rows."""

    @kernel_part
    def multiply_item(item: int, parts: int, product: Any, kind: Any) -> None:
        """Compute one of ``parts`` shares of the rows of one head."""
        head, part = item // parts, item % parts
        first, last = product.rows * part // parts, product.rows * (part + 1) // parts
        inputs, outputs = product.inputs, product.outputs
        x = elements(product.x.address, NO_END, kind)[head * product.x.step :]
        own = elements(product.weight, NO_END, kind)[head * product.weight_step :]
        out = elements(product.out.address, NO_END, kind)[head * product.out.step :]
        step = min(TURNED, outputs) if product.transposed else outputs
        turned = np.empty(step * inputs if product.transposed else 0, np.array(kind).dtype)
        no_bias = own[:0]
        for output in range(0, outputs, step):
            count = min(step, outputs - output)
            weight = own[output * inputs : (output + count) * inputs]
            if product.transposed:
                turn_over(own, output, count, inputs, outputs, turned)
                weight = turned[: count * inputs]
            for row in range(first, last, PANEL_ROWS):
                rows = min(PANEL_ROWS, last - row)
                share = Share(weight, no_bias, out[row * product.out.stride + output :], product.out.stride, 0, count)
                rows_of_head(x[row * product.x.stride :], product.x.stride, rows, inputs, share)

    computed: Callable[..., None] = multiply_item
    return computed


_multiply_item = _with_rows(multiply_rows)
_multiply_item_by_pairs = _with_rows(multiply_rows_by_pairs)
_multiply_item_by_tiles = _with_rows(multiply_rows_by_tiles)


@inlined_part
def _parts(product: Any, threads: int) -> Any:
    """Return into how many parts rows are shared out, so that few heads keep all threads at work."""
    return max(1, min((threads + product.heads - 1) // product.heads, product.rows // PANEL_ROWS))


def _multiply(threads: int, product: Product, kind: Any) -> None:
    """Multiply in float32, or widened to it."""
    parts = _parts(product, threads)
    share_out(_multiply_item, product.heads * parts, threads, (parts, product, kind))


def _multiply_by_pairs(threads: int, product: Product, kind: Any) -> None:
    """Do so in bfloat16 in pairs of inputs."""
    parts = _parts(product, threads)
    share_out(_multiply_item_by_pairs, product.heads * parts, threads, (parts, product, kind))


def _multiply_by_tiles(threads: int, product: Product, kind: Any) -> None:
    """Do so in bfloat16 with tile instructions."""
    parts = _parts(product, threads)
    share_out(_multiply_item_by_tiles, product.heads * parts, threads, (parts, product, kind))


multiply = SharedKernel(_multiply)
multiply_by_pairs = SharedKernel(_multiply_by_pairs)
multiply_by_tiles = SharedKernel(_multiply_by_tiles)
