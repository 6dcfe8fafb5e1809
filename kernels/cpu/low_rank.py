"""Add products of low rank to the results of linear layers on the CPU: one kernel for up to three layers of one input.

Invariant: the bits are those of the steps apart: products are summed as `gemm.many_rows` sums them, block of inputs
after block, and to scale and to add are operations of their own. Only the lanes of the vectors are others: the matrices
are turned over, a part at a time, so that lanes are their outputs, and rows are read and written where they lie. That
saves turning x and the results over, which for so few outputs, or inputs, would take as long as to multiply. Fixed
matrices, those of a loaded adapter, are turned over once: a copy of them is kept as the tiles read it.

An item is some rows, in all layers. Matrices in bfloat16 are multiplied by the linear layer's own kernels, which sum
otherwise, and a kernel for what is left. T rows, K inputs, N outputs, r the rank.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import NO_END, copy, elements, floats, kind_of, longs, scratch, with_unit_stride
from samebit.kernels.cpu.base.numeric import narrow, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.rows import Rows
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.layers import MOST_LAYERS
from samebit.kernels.cpu.gemm.many_rows_vectors import OUTPUTS, SUM_BLOCK, VECTORS, multiply_tile, transpose_tile
from samebit.kernels.cpu.linear import multiply
from samebit.kernels.cpu.low_rank_vectors import add_term_tile
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.lora.adapters import LowRank, LowRanks

_MOST_ROWS = 64
"""The most rows of an item: their sums stay in the first-level cache."""

_LEAST_ROWS = 8
"""With fewer rows an item would spend its time on turning the matrices over."""

_WIDTH = VECTORS * LANES
"""Outputs that are computed at a time."""

PRODUCTS = 64
"""Products that take the time of one element of a row-wise kernel."""

_ROOM = 1 << 15
"""Elements of a turned matrix that are kept: they stay in the second-level cache."""

_LITTLE_ROOM = 1 << 12
"""Limits what is kept for few rows, which do not read them again from there, to the first-level cache."""

_KEY = "matrices on the CPU"
_FIELDS = 4
_ADDED_FIELDS = 3
_TILE, _PAIR, _ = OUTPUTS
_ZERO = np.float32(0.0)


class Matrices(NamedTuple):
    """Holds what the kernel is told of the matrices.

    held: what the addresses point to. layers: of each the address of its first matrix (0 with a panel), rank, address
    of the second, and outputs. panel: address of all first matrices as `_panel` makes them, the second ones then are
    `_blocks`; 0 where they lie as they were given. work: products a row.
    """

    held: tuple[torch.Tensor, ...]
    layers: tuple[int, ...]
    panel: int
    scales: tuple[float, ...]
    work: int

    @staticmethod
    def of(terms: LowRanks) -> "Matrices | None":
        """Return that of float32 matrices, worked out once; None of others."""
        if terms.dtype is not torch.float32:
            return None
        if _KEY not in terms.worked_out:
            terms.worked_out[_KEY] = Matrices._worked_out(terms)
        found: Matrices = terms.worked_out[_KEY]
        return found

    @staticmethod
    def _worked_out(terms: LowRanks) -> "Matrices":
        downs, ups = [term.down for term in terms.each], [term.up for term in terms.each]
        held = (
            (_panel(downs), *(_blocks(up) for up in ups))
            if terms.fixed
            else tuple(matrix.contiguous() for matrix in (*downs, *ups))
        )
        addresses = [matrix.data_ptr() for matrix in held]
        panel, firsts = (addresses[0], [0] * len(downs)) if terms.fixed else (0, addresses[: len(downs)])
        fields, work = list[int](), 0
        for first, second, down, up in zip(firsts, addresses[-len(ups) :], downs, ups, strict=True):
            (rank, inputs), outputs = down.shape, up.shape[0]
            fields += first, rank, second, outputs
            work += rank * (inputs + outputs)
        layers = (*fields, *(0,) * (MOST_LAYERS * _FIELDS - len(fields)))
        return Matrices(held, layers, panel, scales_of(terms.each), work)


def _panel(downs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``[K, lanes]``, the matrices turned over side by side, each from a whole vector on."""
    return torch.cat([_padded(down, LANES).t() for down in downs], dim=1).contiguous()


def _blocks(up: torch.Tensor) -> torch.Tensor:
    """Return ``[blocks, r, _WIDTH]``, the matrix turned over, a block of outputs after the other."""
    return _padded(up, _WIDTH).view(-1, _WIDTH, up.shape[1]).transpose(1, 2).contiguous()


def _padded(matrix: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[0] % multiple))


def add_low_rank(bases: Sequence[torch.Tensor], x: torch.Tensor, terms: LowRanks) -> list[torch.Tensor]:
    """Implement `Operations.add_low_rank`."""
    inputs = x.size(-1)
    rows, stride = with_unit_stride(x.reshape(-1, inputs))
    count = rows.size(0)
    results = [base.contiguous() for base in bases]
    matrices = Matrices.of(terms)
    if matrices is None:
        _add_products_of_linear(results, rows, terms.each)
        return results
    addresses = [out.data_ptr() for out in results]
    add_terms(
        count * matrices.work // PRODUCTS,
        rows.data_ptr(), stride, count, inputs, matrices.layers, matrices.panel,
        matrices.scales, (*addresses, *(0,) * (MOST_LAYERS - len(addresses))), 0, kind_of(x.dtype),
    )  # fmt: skip
    return results


def scales_of(terms: Sequence[LowRank]) -> tuple[float, ...]:
    """Return the factors of up to three layers, zeros behind them."""
    return (*(term.scale for term in terms), *(0.0,) * (MOST_LAYERS - len(terms)))


def _add_to_rows(
    threads: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Any, panel: int, scales: Any,
    outs: Any, chosen: int, kind: Any,
) -> None:  # fmt: skip
    """Add the terms of all layers to the results, which lie at ``outs``, each ``[T, N]``; to ``rows`` of them, whose
    numbers are at ``chosen``, or to the first with 0 there."""
    fewest = (rows + _MOST_ROWS - 1) // _MOST_ROWS
    even = (fewest + threads - 1) // threads * threads
    items = max(fewest, min(even, rows // _LEAST_ROWS), min(rows, 1))
    share_out(
        _add_to_some, items, threads,
        (items, x_address, x_stride, rows, inputs, layers, panel, scales, outs, chosen, kind),
    )  # fmt: skip


add_terms = SharedKernel(_add_to_rows)


@kernel_part
def _add_to_some(
    item: int, items: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Any, panel: int, scales: Any,
    outs: Any, chosen: int, kind: Any,
) -> None:  # fmt: skip
    """Add the terms to one of ``items`` parts of the rows."""
    first, last = rows * item // items, rows * (item + 1) // items
    lines = longs(chosen + 8 * first, last - first if chosen else 0)
    width = _column_of(layers, MOST_LAYERS)
    lows = scratch((last - first) * width)
    lows[:] = _ZERO
    given = _part_of(x_address, x_stride, first, last, lines, kind)
    if panel != 0:
        turned = floats(panel, inputs * width)
        for k in range(0, inputs, SUM_BLOCK):
            depth = min(SUM_BLOCK, inputs - k)
            _add_tiles(given, k, x_stride, last - first, turned[k * width :], width, depth, lows)
    else:
        _multiply_down(given, x_stride, last - first, inputs, layers, lows, width)
    for place in range(MOST_LAYERS):
        at = place * _FIELDS
        rank, outputs = layers[at + 1], layers[at + 3]
        out = _part_of(outs[place], outputs, first, last, lines, kind)
        low = Rows(lows, _column_of(layers, place), width)
        scale = np.float32(scales[place])
        if panel != 0:
            blocks = floats(layers[at + 2], (outputs + _WIDTH - 1) // _WIDTH * _WIDTH * rank)
            _add_columns(low, last - first, blocks, 0, outputs, rank, scale, out, outputs)
        else:
            _add_up(low, last - first, floats(layers[at + 2], outputs * rank), rank, scale, out, outputs)
        write_lines(out, lines, elements(outs[place], NO_END, kind), outputs)


@kernel_part
def _part_of(address: int, width: int, first: int, last: int, lines: Any, kind: Any) -> Any:
    """Return the rows ``first`` to ``last`` where they lie, or a copy of the rows that ``lines`` names, if any."""
    source = elements(address, NO_END, kind)
    if len(lines) == 0:
        return source[first * width : last * width]
    copied = np.empty(len(lines) * width, source.dtype)
    for place in range(len(lines)):
        at = lines[place] * width
        copy(source[at : at + width], copied[place * width :])
    return copied


@kernel_part
def write_lines(rows: Any, lines: Any, out: Any, width: int) -> None:
    """Write rows to where ``lines`` says."""
    for place in range(len(lines)):
        at = lines[place] * width
        copy(rows[place * width : (place + 1) * width], out[at : at + width])


@inlined_part
def _column_of(layers: Any, place: int) -> int:
    """Return where the products of a layer's first matrix begin in a row of all layers', on a whole vector."""
    column = 0
    for before in range(place):
        column += (layers[before * _FIELDS + 1] + LANES - 1) // LANES * LANES
    return column


@kernel_part
def _multiply_down(x: Any, x_stride: int, rows: int, inputs: int, layers: Any, lows: Any, width: int) -> None:
    """Write ``lows[row, column + j] = x[row] . down[j]`` for all layers."""
    panel = scratch(SUM_BLOCK * width)
    panel[:] = _ZERO
    for k in range(0, inputs, SUM_BLOCK):
        depth = min(SUM_BLOCK, inputs - k)
        for place in range(MOST_LAYERS):
            rank = layers[place * _FIELDS + 1]
            down = floats(layers[place * _FIELDS], rank * inputs)
            _turn_over(down, k, inputs, rank, depth, panel[_column_of(layers, place) :], width)
        _add_tiles(x, k, x_stride, rows, panel, width, depth, lows)


@kernel_part
def _add_up(lows: Any, rows: int, up: Any, rank: int, scale: Any, out: Any, outputs: int) -> None:
    """Add ``scale * lows[row] . up[output]`` to ``out[row, output]``, rounded once; ``lows`` are `Rows`."""
    room = max(1, (_ROOM if rows >= _LEAST_ROWS else _LITTLE_ROOM) // (rank * _WIDTH)) * _WIDTH
    kept = scratch(min(room, outputs + _WIDTH) * rank)
    kept[:] = _ZERO
    for begin in range(0, outputs, room):
        last = min(begin + room, outputs)
        for output in range(begin, last, _WIDTH):
            block = kept[(output - begin) * rank :]
            _turn_over(up, output * rank, rank, min(_WIDTH, last - output), rank, block, _WIDTH)
        _add_columns(lows, rows, kept, begin, last, rank, scale, out, outputs)


@kernel_part
def _add_columns(
    lows: Any, rows: int, blocks: Any, begin: int, last: int, rank: int, scale: Any, out: Any, outputs: int
) -> None:
    """Add to the outputs from ``begin`` to ``last``, whose weights are in `_blocks`, the first in the first."""
    patch = np.zeros(_TILE * LANES, out.dtype)
    row = 0
    while row < rows:
        many = _tile_of(rows - row)
        low = Rows(lows.array, lows.at + row * lows.stride, lows.stride)
        for output in range(begin, last, _WIDTH):
            columns = Rows(blocks, (output - begin) * rank, _WIDTH)
            target = Rows(out, row * outputs + output, outputs)
            _add_block(min(_WIDTH, last - output), many, columns, low, rank, scale, target, patch)
        row += many


@inlined_part
def _tile_of(rows: int) -> int:
    """Return how many of these rows a tile covers."""
    return _TILE if rows >= _TILE else (_PAIR if rows >= _PAIR else 1)


@inlined_part
def _add_block(count: int, many: int, columns: Any, low: Any, rank: int, scale: Any, target: Any, patch: Any) -> None:
    """Add to ``count`` outputs of some rows; those that fill no vector lie in ``patch`` meanwhile."""
    whole = count // LANES
    if whole > 0:
        add_term_tile(whole, many, columns, low, rank, scale, target)
    if count > whole * LANES:
        rest, at = count - whole * LANES, target.at + whole * LANES
        for row in range(many):
            for lane in range(rest):
                patch[row * LANES + lane] = target.array[at + row * target.stride + lane]
        last_columns = Rows(columns.array, columns.at + whole * LANES, columns.stride)
        add_term_tile(1, many, last_columns, low, rank, scale, Rows(patch, 0, LANES))
        for row in range(many):
            for lane in range(rest):
                target.array[at + row * target.stride + lane] = patch[row * LANES + lane]


@kernel_part
def _turn_over(matrix: Any, at: int, stride: int, rows: int, count: int, panel: Any, width: int) -> None:
    """Write ``panel[k, row] = matrix[row, k]`` for ``count`` inputs."""
    whole_rows, whole = rows // LANES * LANES, count // LANES * LANES
    for row in range(0, whole_rows, LANES):
        for k in range(0, whole, LANES):
            transpose_tile(matrix, at + row * stride + k, stride, panel, k * width + row, width)
    for row in range(rows):
        for k in range(whole if row < whole_rows else 0, count):
            panel[k * width + row] = matrix[at + row * stride + k]


@kernel_part
def _add_tiles(x: Any, at: int, stride: int, rows: int, panel: Any, width: int, depth: int, sums: Any) -> None:
    """Add to ``sums[row, lane]`` the chain over k of ``x[row, k] * panel[k, lane]``, from 0."""
    row = 0
    while row < rows:
        many = _tile_of(rows - row)
        for lane in range(0, width, VECTORS * LANES):
            multiply_tile(
                min(VECTORS * LANES, width - lane), many, panel, lane, width,
                x, at + row * stride, stride, 1, 0, depth, sums, row * width + lane, width,
            )  # fmt: skip
        row += many


def _add_products_of_linear(results: Sequence[torch.Tensor], rows: torch.Tensor, terms: Sequence[LowRank]) -> None:
    """Add the terms, the matrices of each multiplied as linear layers of their dtype."""
    dtypes = {term.down.dtype for term in terms}
    if len(dtypes) > 1:
        for out, term in zip(results, terms, strict=True):
            _add_products_of_linear([out], rows, [term])
        return
    (dtype,) = dtypes
    lows = multiply(rows.to(dtype), [(term.down, None) for term in terms])
    products = [multiply(low, ((term.up, None),))[0] for low, term in zip(lows, terms, strict=True)]
    addresses: list[int] = []
    for product, out in zip(products, results, strict=True):
        addresses += product.data_ptr(), out.data_ptr(), product.shape[-1]
    layers = (*addresses, *(0,) * (MOST_LAYERS * _ADDED_FIELDS - len(addresses)))
    work = sum(product.numel() for product in products)
    _add_products(work, len(rows), layers, scales_of(terms), kind_of(results[0].dtype), kind_of(dtype))


def _add_products_to_rows(threads: int, rows: int, layers: Any, scales: Any, kind: Any, product_kind: Any) -> None:
    """Add the products of all layers, a row an item."""
    share_out(_add_products_to_row, rows, threads, (rows, layers, scales, kind, product_kind))


_add_products = SharedKernel(_add_products_to_rows)


@kernel_part
def _add_products_to_row(row: int, rows: int, layers: Any, scales: Any, kind: Any, product_kind: Any) -> None:
    for place in range(MOST_LAYERS):
        at = place * _ADDED_FIELDS
        outputs = layers[at + 2]
        first = np.int64(row) * outputs
        product = elements(layers[at], rows * outputs, product_kind)[first:]
        out = elements(layers[at + 1], rows * outputs, kind)[first:]
        add_scaled(product, out, outputs, np.float32(scales[place]))


@kernel_part
def add_scaled(product: Any, out: Any, count: int, scale: Any) -> None:
    """Add ``scale * product`` to ``count`` elements of ``out``, rounded once."""
    for i in range(count):
        scaled = widen(product[i]) * scale
        out[i] = narrow(widen(out[i]) + scaled, out[0])
