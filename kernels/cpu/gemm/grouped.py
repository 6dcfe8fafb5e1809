"""Multiply rows that lie in groups, each group with a weight of its own, whether a group has few rows or many.

Invariant: a row is multiplied by the code that multiplies it in a linear layer, so it has the same bits. Which rows are
beside it, in its panel or in its group, enters nowhere, nor do the threads.

Where groups have few rows, a thread has a share of the outputs, the same of every group, and with more threads than
outputs are for, a share of the rows: an even load, whatever the sizes of the groups. Where they have many, it has a
share of the rows: a panel is prepared by one thread alone. A weight that has inputs before outputs is turned over in
scratch, a block of outputs at a time. G groups, P rows, K inputs, N outputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel, called_kernel
from samebit.kernels.cpu.base.memory import NO_END, elements, integers, longs, scratch
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm import amx, dots, few_rows, many_rows
from samebit.kernels.cpu.gemm.amx_tiles import TILE_INPUTS, configure_tiles, release_tiles
from samebit.kernels.cpu.gemm.layers import Share
from samebit.kernels.cpu.gemm.many_rows import PANEL_ROWS, Panel, width_of
from samebit.kernels.cpu.gemm.many_rows_vectors import transpose_tile
from samebit.kernels.cpu.gemm.pairs import pair_rows
from samebit.kernels.layout.grids import LANES

_TILE = 48
"""Outputs that shares are a multiple of: whole tiles of every product."""

_LEAST_SHARE = 64
"""Outputs below which a thread would spend its time on the rows it has to prepare for them."""

_MANY_ROWS = PANEL_ROWS // 2
"""Rows a group, in the mean of those that have any, from which on preparing them takes longer than reading the weights
evenly saves."""

TURNED = 240
"""Outputs of a weight that are turned over at a time."""


class Product(NamedTuple):
    """Names the operands by their addresses, and their sizes; rows of x, weights and results are contiguous.

    x: ``[*, K]``. row_of: ``[P]`` int32, the row of x that each row is, 0 for their own. offsets: ``[G + 1]`` int64.
    weight: ``[G, N, K]`` or ``[G, K, N]``. bias: ``[G, N]``, 0 for none. out: ``[P, N]``.
    """

    x: int
    row_of: int
    offsets: int
    groups: int
    inputs: int
    outputs: int
    weight: int
    bias: int
    out: int
    transposed: bool


@inlined_part
def _parts(product: Product, threads: int) -> int:
    """Return how many parts the outputs are shared out into, of equally many threads each."""
    offsets, with_rows = longs(product.offsets, product.groups + 1), 0
    for group in range(product.groups):
        with_rows += int(offsets[group + 1] > offsets[group])
    if offsets[product.groups] >= with_rows * _MANY_ROWS:
        return 1
    parts = threads
    while threads % parts or (parts > 1 and product.outputs < parts * _LEAST_SHARE):
        parts -= 1
    return parts


def _multiply_rows(x: Any, stride: int, rows: int, inputs: int, share: Any) -> None:
    """Multiply up to `PANEL_ROWS` rows, ``stride`` apart, as a linear layer does."""
    if rows <= few_rows.MOST_ROWS:
        values = scratch(few_rows.MOST_ROWS * inputs)
        few_rows.copy_rows(x, stride, rows, inputs, values)
        few_rows.multiply_share(values, rows, inputs, share)
    else:
        width = width_of(rows)
        panel = Panel(scratch(min(inputs, many_rows.DEPTH) * width), width, 0, rows)
        many_rows.multiply_panel(x, stride, inputs, panel, False, share)


def _multiply_rows_by_tiles(x: Any, stride: int, rows: int, inputs: int, share: Any) -> None:
    """Multiply up to `PANEL_ROWS` rows as a linear layer does with tile instructions."""
    width = (rows + LANES - 1) // LANES * LANES
    steps = (inputs + TILE_INPUTS - 1) // TILE_INPUTS
    panel = Panel(scratch(steps * (TILE_INPUTS // 2) * width), width, 0, rows)
    pair_rows(x, stride, inputs, panel)
    configure_tiles()
    amx.multiply_panel(panel, inputs, share)
    release_tiles()


def _multiply_rows_by_pairs(x: Any, stride: int, rows: int, inputs: int, share: Any) -> None:
    """Multiply up to `PANEL_ROWS` rows as a linear layer does in pairs of inputs."""
    if rows <= dots.MOST_ROWS:
        dots.multiply_share(dots.copy_rows(x, stride, rows, inputs), rows, inputs, share)
    else:
        dots.multiply_panel(x, stride, inputs, dots.new_panel(inputs, 0, rows), False, share)


multiply_rows = called_kernel(_multiply_rows)
multiply_rows_by_tiles = called_kernel(_multiply_rows_by_tiles)
multiply_rows_by_pairs = called_kernel(_multiply_rows_by_pairs)


@kernel_part
def turn_over(weight: Any, first: int, count: int, inputs: int, outputs: int, turned: Any) -> None:
    """Write the outputs from ``first`` on of a weight ``[K, N]`` as ``turned[output, input]``."""
    whole_outputs, whole_inputs = count // LANES * LANES, inputs // LANES * LANES
    for k in range(0, whole_inputs, LANES):
        for output in range(0, whole_outputs, LANES):
            transpose_tile(weight, k * outputs + first + output, outputs, turned, output * inputs + k, inputs)
    for k in range(inputs):
        for output in range(whole_outputs if k < whole_inputs else 0, count):
            turned[output * inputs + k] = weight[k * outputs + first + output]


@kernel_part
def _weight_of(product: Any, group: int, first: int, count: int, turned: Any, kind: Any) -> Any:
    """Return the weight ``[count, K]`` and the bias of a group's outputs from ``first`` on."""
    inputs, outputs = product.inputs, product.outputs
    biases = elements(product.bias, product.groups * outputs if product.bias else 0, kind)
    bias = biases[group * outputs + first : group * outputs + first + count]
    weights = elements(product.weight, product.groups * outputs * inputs, kind)
    own = weights[group * outputs * inputs : (group + 1) * outputs * inputs]
    if not product.transposed:
        return own[first * inputs : (first + count) * inputs], bias
    turn_over(own, first, count, inputs, outputs, turned)
    return turned[: count * inputs], bias


@kernel_part
def _rows_of(product: Any, first: int, rows: int, gathered: Any, kind: Any) -> Any:
    """Return rows from ``first`` on, side by side."""
    inputs = product.inputs
    if not product.row_of:
        return elements(product.x, (first + rows) * inputs, kind)[first * inputs :]
    places = integers(product.row_of, first + rows)
    x = elements(product.x, NO_END, kind)
    for row in range(rows):
        at = np.int64(places[first + row]) * inputs
        source, target = x[at : at + inputs], gathered[row * inputs : (row + 1) * inputs]
        for i in range(inputs):  # assigning the slice takes four times as long
            target[i] = source[i]
    return gathered


def _with_rows(rows_of_group: Callable[..., None]) -> Callable[..., None]:
    """Make the work of a thread from the product of a panel of rows."""

    @kernel_part
    def multiply_share(item: int, product: Any, parts: int, columns: int, kind: Any) -> None:
        """Compute a thread's part of the outputs, for its part of the rows."""
        inputs, outputs, groups = product.inputs, product.outputs, product.groups
        offsets = longs(product.offsets, groups + 1)
        size = (outputs + parts * _TILE - 1) // (parts * _TILE) * _TILE
        first = min(item % parts * size, outputs)
        last = min(first + size, outputs)
        step = min(TURNED, size) if product.transposed else size
        first_row = offsets[groups] * (item // parts) // columns
        last_row = offsets[groups] * (item // parts + 1) // columns
        turned = np.empty(step * inputs if product.transposed else 0, np.array(kind).dtype)
        gathered = np.empty(PANEL_ROWS * inputs if product.row_of else 0, np.array(kind).dtype)
        for group in range(groups):
            begin, end = max(offsets[group], first_row), min(offsets[group + 1], last_row)
            for output in range(first, last if begin < end else first, step):
                count = min(step, last - output)
                weight, bias = _weight_of(product, group, output, count, turned, kind)
                for row in range(begin, end, PANEL_ROWS):
                    rows = min(PANEL_ROWS, end - row)
                    at = row * outputs + output
                    out = elements(product.out, offsets[groups] * outputs, kind)[at:]
                    x = _rows_of(product, row, rows, gathered, kind)
                    rows_of_group(x, inputs, rows, inputs, Share(weight, bias, out, outputs, 0, count))

    computed: Callable[..., None] = multiply_share
    return computed


_multiply_share = _with_rows(multiply_rows)
_multiply_share_by_pairs = _with_rows(multiply_rows_by_pairs)
_multiply_share_by_tiles = _with_rows(multiply_rows_by_tiles)


def _multiply(threads: int, product: Product, kind: Any) -> None:
    """Multiply each group's rows with its weight, in float32 or widened to it."""
    parts = _parts(product, threads)
    share_out(_multiply_share, threads, threads, (product, parts, threads // parts, kind))


def _multiply_by_pairs(threads: int, product: Product, kind: Any) -> None:
    """Do so in bfloat16 in pairs of inputs."""
    parts = _parts(product, threads)
    share_out(_multiply_share_by_pairs, threads, threads, (product, parts, threads // parts, kind))


def _multiply_by_tiles(threads: int, product: Product, kind: Any) -> None:
    """Do so in bfloat16 with tile instructions."""
    parts = _parts(product, threads)
    share_out(_multiply_share_by_tiles, threads, threads, (product, parts, threads // parts, kind))


multiply = SharedKernel(_multiply)
multiply_by_pairs = SharedKernel(_multiply_by_pairs)
multiply_by_tiles = SharedKernel(_multiply_by_tiles)
