"""Add the terms of one adapter to rows of results that a layer's kernel has, in the results' own memory.

Matrices in float32 have a kernel of their own (`low_rank`). Those in the layers' bfloat16 are multiplied as the layers
are, some rows at a time, then scaled, added and rounded: the kernels, and so the bits, of the linear layer's own calls.

T rows, K inputs, N outputs, r the rank.
"""

from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import typeof, types

from samebit.kernels.cpu.base.callee import address_of
from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import NO_END, copy, elements, kind_of, longs, read
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.layers import MOST_LAYERS, NO_OTHERS
from samebit.kernels.cpu.layers.calls import record
from samebit.kernels.cpu.layers.products import ROW_PARTS, Kernels, product, product_by_tiles, product_of_pairs, shared
from samebit.kernels.cpu.low_rank import PRODUCTS, Matrices, add_scaled, add_terms, scales_of
from samebit.kernels.layout.lora.adapters import LowRanks

_add_terms = add_terms.part

_MOST_ROWS = 256
"""The most rows whose products are there at a time."""

_LAYERS = MOST_LAYERS * 4
_BEFORE_SCALES, _BEHIND_SCALES = _LAYERS + 1, MOST_LAYERS + 1
_LAYOUT = Struct(f"={_LAYERS}q q {MOST_LAYERS}d {MOST_LAYERS}q q")


class Numbers(NamedTuple):
    """Holds `low_rank.Matrices`, or what is like it of matrices that lie as they were given, without a panel; the
    places of their layers, and products a row."""

    layers: Any
    panel: int
    scales: Any
    places: Any
    work: int


@inlined_part
def _read_numbers(address: int) -> Any:
    no, scales = np.int64(0), address + 8 * _BEFORE_SCALES
    layers, rest = read(address, _BEFORE_SCALES, no), read(scales + 8 * MOST_LAYERS, _BEHIND_SCALES, no)
    return Numbers(
        layers[:_LAYERS], layers[_LAYERS], read(scales, MOST_LAYERS, np.float64(0)), rest[:MOST_LAYERS],
        rest[MOST_LAYERS],
    )  # fmt: skip


def _add_in_float32(
    threads: int, x: int, inputs: int, numbers_at: int, chosen: int, rows: int, outs: Any, kind: Any
) -> None:
    """Add the terms of matrices in float32 to ``rows`` of the results ``outs`` of up to three layers, all of them or
    those whose numbers are at ``chosen``."""
    numbers = _read_numbers(numbers_at)
    first, second, third = numbers.places
    _add_terms(
        shared(rows * numbers.work // PRODUCTS, threads), x, inputs, rows, inputs, numbers.layers, numbers.panel,
        numbers.scales, (outs[first], outs[second], outs[third]), chosen, kind,
    )  # fmt: skip


def _with_product(multiply: Callable[..., None]) -> Callable[..., None]:
    """Make what adds the terms of matrices in the layers' dtype, from a product of up to three layers of one input."""

    @kernel_part
    def add(threads: int, x: int, inputs: int, numbers_at: int, chosen: int, rows: int, outs: Any, kind: Any) -> None:
        """Add the terms as `_add_in_float32`."""
        numbers, nothing, no = _read_numbers(numbers_at), elements(x, 0, kind), np.int64(0)
        down, rank, _, outputs, second_down, second_rank, _, second, third_down, third_rank, _, third = numbers.layers
        most, itemsize = min(rows, _MOST_ROWS), nothing.itemsize
        lows_from = most * inputs if chosen else no
        products_from = lows_from + most * (rank + second_rank + third_rank)
        room = np.empty(products_from + most * max(outputs, second, third), nothing.dtype)
        first_low = room.ctypes.data + lows_from * itemsize
        second_low = first_low + most * rank * itemsize
        lows = first_low, second_low, second_low + most * second_rank * itemsize
        for begin in range(0, rows, _MOST_ROWS):
            count, source = min(_MOST_ROWS, rows - begin), x + begin * inputs * itemsize
            lines = longs(chosen + 8 * begin, count if chosen else 0)
            if chosen:
                source = room.ctypes.data
                share_out(_copy_lines, ROW_PARTS, shared(count * inputs, threads), (x, inputs, lines, room, kind))
            few = shared(count * numbers.work // PRODUCTS, threads)
            multiply(
                few, source, inputs, count, inputs,
                (down, no, rank, lows[0], second_down, no, second_rank, lows[1], third_down, no, third_rank, lows[2]),
                kind,
            )  # fmt: skip
            for place in range(MOST_LAYERS):
                between, up, width = (
                    numbers.layers[4 * place + 1], numbers.layers[4 * place + 2], numbers.layers[4 * place + 3]
                )  # fmt: skip
                if width > 0:
                    product_at = room.ctypes.data + products_from * itemsize
                    multiply(few, lows[place], between, count, between, (up, no, width, product_at, *NO_OTHERS), kind)
                    share_out(
                        _add_part, ROW_PARTS, shared(count * width, threads),
                        (room[products_from:], outs[numbers.places[place]], begin, lines, count, width,
                         np.float32(numbers.scales[place]), kind),
                    )  # fmt: skip

    made: Callable[..., None] = add
    return made


@kernel_part
def _copy_lines(part: int, x: int, width: int, lines: Any, out: Any, kind: Any) -> None:
    """Copy a share of the rows that ``lines`` names."""
    source, count = elements(x, NO_END, kind), len(lines)
    for row in range(count * part // ROW_PARTS, count * (part + 1) // ROW_PARTS):
        at = lines[row] * width
        copy(source[at : at + width], out[row * width :])


@kernel_part
def _add_part(
    part: int, products: Any, out_at: int, begin: int, lines: Any, count: int, width: int, scale: Any, kind: Any
) -> None:  # fmt: skip
    """Add a share of ``count`` rows of products to those from ``begin`` on, or those that ``lines`` names."""
    out = elements(out_at, NO_END, kind)
    for row in range(count * part // ROW_PARTS, count * (part + 1) // ROW_PARTS):
        line = begin + row
        if len(lines) > 0:
            line = lines[row]
        add_scaled(products[row * width :], out[line * width :], width, scale)


_products = _with_product(product)
_products_of_pairs = _with_product(product_of_pairs)
_products_by_tiles = _with_product(product_by_tiles)


def _add(threads: int, x: int, inputs: int, numbers_at: int, chosen: int, rows: int, outs: Any, kind: Any) -> None:
    """Add the terms, multiplying in float32."""
    _products(threads, x, inputs, numbers_at, chosen, rows, outs, kind)


def _add_of_pairs(
    threads: int, x: int, inputs: int, numbers_at: int, chosen: int, rows: int, outs: Any, kind: Any
) -> None:
    """Add the terms, multiplying in pairs of inputs."""
    _products_of_pairs(threads, x, inputs, numbers_at, chosen, rows, outs, kind)


def _add_by_tiles(
    threads: int, x: int, inputs: int, numbers_at: int, chosen: int, rows: int, outs: Any, kind: Any
) -> None:
    """Add the terms, multiplying with tile instructions."""
    _products_by_tiles(threads, x, inputs, numbers_at, chosen, rows, outs, kind)


_in_float32 = compile_kernel(_add_in_float32)
_in_dtype = Kernels(*map(compile_kernel, (_add, _add_of_pairs, _add_by_tiles)))


def address_of_kernel(matrices: torch.dtype | None, dtype: torch.dtype) -> int:
    """Return the address of what adds the terms of matrices of one dtype to elements of another, on this processor."""
    return _address(_in_float32 if matrices is torch.float32 else _in_dtype.of(dtype), dtype)


@cache
def _address(kernel: Any, dtype: torch.dtype) -> int:
    return address_of(kernel, (*(types.int64,) * 6, types.UniTuple(types.int64, MOST_LAYERS), typeof(kind_of(dtype))))


def numbers_at(places: tuple[int, ...], terms: LowRanks) -> int:
    """Return the address of the `Numbers` of an adapter whose matrices are of one dtype, worked out once."""
    key = f"numbers on the CPU at {places}"
    if key not in terms.worked_out:
        made = Matrices.of(terms) or _matrices(terms)
        padded = (*places, *(0,) * (MOST_LAYERS - len(places)))
        numbers = record(_LAYOUT, *made.layers, made.panel, *made.scales, *padded, made.work)
        terms.worked_out.setdefault(key, (numbers.ctypes.data, numbers, made))
    address: int = terms.worked_out[key][0]
    return address


def _matrices(terms: LowRanks) -> Matrices:
    """Return copies of the matrices, as they lie; what lies elsewhere later is noticed as other changes are."""
    held: list[torch.Tensor] = []
    fields, work = list[int](), 0
    for down, up, _ in terms.each:
        held += (matrix.detach().clone(memory_format=torch.contiguous_format) for matrix in (down, up))
        (rank, inputs), outputs = down.shape, up.shape[0]
        fields += held[-2].data_ptr(), rank, held[-1].data_ptr(), outputs
        work += rank * (inputs + outputs)
    layers = (*fields, *(0,) * (_LAYERS - len(fields)))
    return Matrices(tuple(held), layers, 0, scales_of(terms.each), work)
