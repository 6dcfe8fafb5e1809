"""Compute ``out = grad.T @ x`` on the CPU, a sum over the rows: the gradient of a float32 weight.

Invariant: an element is the sum, in order, of blocks of `SUM_BLOCK` rows, each block one chain of fused multiply-adds
from 0 ascending. The threads enter nowhere.

A work item is a panel of up to `PANEL_WIDTH` inputs, copied so that its rows lie side by side, times a share of the
outputs. A block of the panel stays in the first-level cache while all outputs of the share go by. T rows, K inputs,
N outputs.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import copy, floats, scratch
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.layers import shares
from samebit.kernels.cpu.gemm.many_rows_vectors import OUTPUTS, SUM_BLOCK, VECTORS, multiply_tile
from samebit.kernels.layout.grids import LANES

PANEL_WIDTH = 64

_SHARE = 252
"""The outputs whose sums are kept at a time; a whole number of tiles."""

_TILE, _PAIR, _ = OUTPUTS
_ZERO = np.float32(0.0)


def _multiply(
    threads: int, grad_at: int, grad_stride: int, x_at: int, x_stride: int, rows: int, inputs: int, outputs: int,
    out_at: int,
) -> None:  # fmt: skip
    """Multiply ``[T, N]`` and ``[T, K]``, each of rows a stride apart, into the contiguous ``[N, K]``."""
    panels = (inputs + PANEL_WIDTH - 1) // PANEL_WIDTH
    parts = shares(panels, outputs, _TILE, threads)
    share_out(
        _multiply_item, panels * parts, threads,
        (panels, parts, grad_at, grad_stride, x_at, x_stride, rows, inputs, outputs, out_at),
    )  # fmt: skip


@kernel_part
def _multiply_item(
    item: int, panels: int, parts: int, grad_at: int, grad_stride: int, x_at: int, x_stride: int, rows: int,
    inputs: int, outputs: int, out_at: int,
) -> None:  # fmt: skip
    """Compute one of ``parts`` shares of the outputs for a panel of inputs."""
    grad, x, out = floats(grad_at, rows * grad_stride), floats(x_at, rows * x_stride), floats(out_at, outputs * inputs)
    begin_input, part = item % panels * PANEL_WIDTH, item // panels
    count = min(PANEL_WIDTH, inputs - begin_input)
    width = (count + LANES - 1) // LANES * LANES
    size = (outputs + parts * _TILE - 1) // (parts * _TILE) * _TILE
    first, last = min(part * size, outputs), min((part + 1) * size, outputs)
    panel, sums = scratch(SUM_BLOCK * width), scratch(_SHARE * width)
    panel[:] = _ZERO
    for begin in range(first, last, _SHARE):
        end = min(begin + _SHARE, last)
        sums[:] = _ZERO
        for row in range(0, rows, SUM_BLOCK):
            depth = min(SUM_BLOCK, rows - row)
            for k in range(depth):
                at = (row + k) * x_stride + begin_input
                copy(x[at : at + count], panel[k * width : k * width + count])
            _add_products(grad, row * grad_stride, grad_stride, begin, end, panel, width, depth, sums)
        for output in range(begin, end):
            at, sums_at = output * inputs + begin_input, (output - begin) * width
            copy(sums[sums_at : sums_at + count], out[at : at + count])


@kernel_part
def _add_products(
    grad: Any, at: int, stride: int, begin: int, end: int, panel: Any, width: int, depth: int, sums: Any
) -> None:
    """Add to ``sums[output, input]`` the products of a block of rows."""
    output = begin
    while output < end:
        many = _TILE if output + _TILE <= end else (_PAIR if output + _PAIR <= end else 1)
        for lane in range(0, width, VECTORS * LANES):
            multiply_tile(
                min(VECTORS * LANES, width - lane), many, panel, lane, width,
                grad, at + output, 1, stride, 0, depth, sums, (output - begin) * width + lane, width,
            )  # fmt: skip
        output += many


multiply = SharedKernel(_multiply)
