"""Multiply small tiles in sixteen lanes, for the state-space scan and attention's gradients, as LLVM vectors.

Why not plain Numba loops: LLVM guards them with alias checks and spills the accumulators, which cost a
factor of four. Every lane does the same scalar operations in the same order as a plain loop would: one
fused multiply-add per step, ascending. Handling several rows at once only shares the loads.

Arrays are flat, what is read and written of them is given as `Rows`.
"""

from typing import Any

from numba import types
from numba.extending import intrinsic

from samebit.kernels.cpu.base.rows import unpacked
from samebit.kernels.cpu.base.vectors import (
    REGISTERS,
    accumulate,
    dispatch,
    fma,
    keep_order,
    load_vector,
    pointer_to,
    prefetch,
    row_of,
    splat,
    store_vector,
    zeros,
)
from samebit.kernels.layout.grids import LANES

FETCH_AHEAD = 1024
"""`tile_multiply` prefetches this count of elements ahead of what it reads (4 KiB in float32)."""

MOST_SUMS = 16
"""Vectors of sums that a tile holds at most."""

_AT_ONCE = REGISTERS // 2
"""Vectors of sums that are under way at once: they and what is added to them stay in registers."""

_ROWS = (1, 2, 4)
_COLUMNS = (1, 2, 4)


def pieces(rows: int, columns: int, at_once: int = _AT_ONCE) -> list[range]:
    """Return the columns of a tile in pieces whose sums stay in registers."""
    each = max(1, at_once // rows)
    return [range(first, min(first + each, columns)) for first in range(0, columns, each)]


def _tile_multiply(from_zero: bool, allowed: tuple[int, ...] = _COLUMNS, at_once: tuple[int, ...] = _ROWS) -> Any:
    """Make a micro-kernel: ``out[r, 0 : 16 c] (+)= sum over i of weights[r, i] * vectors[i, 0 : 16 c]``.

    ``rows`` is one of ``at_once``, ``columns`` (c) one of those ``allowed``; ``weights``, ``vectors`` and ``out`` are
    `Rows`. ``tile_multiply`` of one row (decode waits for memory) also asks for what lies `FETCH_AHEAD` elements on.
    """

    @intrinsic
    def kernel(typingctx: Any, rows: Any, columns: Any, weights: Any, vectors: Any, count: Any, out: Any) -> Any:
        i64 = types.int64
        signature = types.void(i64, i64, weights, vectors, i64, out)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            many, wide, weights_given, vectors_given, n, out_given = args
            weight = unpacked(context, builder, weights, weights_given)
            vector = unpacked(context, builder, vectors, vectors_given)
            target = unpacked(context, builder, out, out_given)

            def emit(row_count: int, column_count: int) -> None:
                if row_count * column_count > MOST_SUMS:
                    return
                weight_rows = [row_of(context, builder, *weight, r) for r in range(row_count)]
                out_rows = [row_of(context, builder, *target, r) for r in range(row_count)]
                for piece in pieces(row_count, column_count):
                    lanes = [n.type(LANES * c) for c in piece]
                    targets = [builder.gep(row, [lane]) for row in out_rows for lane in lanes]
                    asked = lanes if from_zero and row_count == 1 else []
                    ahead = [builder.add(lane, n.type(FETCH_AHEAD)) for lane in asked]
                    step = _step(context, builder, weight_rows, vector, lanes, ahead)
                    initial = [zeros() if from_zero else load_vector(builder, p, types.float32) for p in targets]
                    for pointer, total in zip(targets, accumulate(builder, n, initial, step), strict=True):
                        store_vector(builder, total, pointer)

            dispatch(builder, [(many, at_once), (wide, allowed)], emit)
            return context.get_dummy_value()

        return signature, generate

    return kernel


def _step(
    context: Any, builder: Any, weight_rows: list[Any], vector: Any, lanes: list[Any], ahead: list[Any],
    ordered: bool = False,
) -> Any:  # fmt: skip
    """Return what emits step i of the sums: ``weights[r, i] * vectors[i, lanes]`` for each row, then each of ``lanes``.

    vector: ``vectors``, unpacked. ahead: what is asked for meanwhile, as counts of elements behind what step i reads.
    ordered: the vectors are loaded in the order of ``lanes``.
    """
    array_type, array, at, stride = vector
    first = pointer_to(context, builder, array_type, array, at)

    def step(i: Any, sums: list[Any]) -> list[Any]:
        moved = builder.mul(i, stride)
        start = builder.gep(first, [moved])
        for distance in ahead:
            prefetch(builder, builder.gep(start, [distance]))
        loaded = []
        for lane in lanes:
            loaded.append(load_vector(builder, builder.gep(start, [lane]), array_type.dtype))
            if ordered:
                keep_order(builder)
        factors = [splat(builder, builder.load(builder.gep(row, [i]))) for row in weight_rows]
        pairs = [(factor, columns) for factor in factors for columns in loaded]
        return [fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

    return step


tile_multiply = _tile_multiply(from_zero=True)
tile_scores = _tile_multiply(from_zero=True, allowed=(4, 3, 2, 1), at_once=(4, 1))
tile_multiply_add = _tile_multiply(from_zero=False)
tile_multiply_add_wide = _tile_multiply(from_zero=False, allowed=(*_COLUMNS, 8))


@intrinsic
def tile_read(
    typingctx: Any, rows: Any, columns: Any, weights: Any, vectors: Any, count: Any, out: Any, ahead: Any
) -> Any:
    """Compute as `tile_multiply`, up to 2 rows on 8 columns too: the vectors are then read in one piece.

    Up to two rows (decode waits for memory) also ask for what lies ``ahead`` elements behind what they read, one row
    for all of it, two for each fourth vector: what comes between them is fetched without being asked for. With AVX2
    nothing is asked for: rows of few lines come by themselves, and asking took up to a third longer. Two load a row in
    the order of its lines (`vectors.keep_order`).
    """
    i64 = types.int64
    signature = types.void(i64, i64, weights, vectors, i64, out, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, wide, weights_given, vectors_given, n, out_given, distance = args
        weight = unpacked(context, builder, weights, weights_given)
        vector = unpacked(context, builder, vectors, vectors_given)
        target = unpacked(context, builder, out, out_given)

        def emit(row_count: int, column_count: int) -> None:
            if row_count * column_count > MOST_SUMS:
                return
            weight_rows = [row_of(context, builder, *weight, r) for r in range(row_count)]
            out_rows = [row_of(context, builder, *target, r) for r in range(row_count)]
            for piece in pieces(row_count, column_count):
                lanes = [n.type(LANES * c) for c in piece]
                asked = {1: lanes, 2: lanes[::4]}.get(row_count, []) if REGISTERS == 32 else []
                ahead = [builder.add(lane, distance) for lane in asked]
                step = _step(context, builder, weight_rows, vector, lanes, ahead, ordered=row_count == 2)
                totals = accumulate(builder, n, [zeros()] * (row_count * len(piece)), step)
                targets = [builder.gep(row, [lane]) for row in out_rows for lane in lanes]
                for pointer, total in zip(targets, totals, strict=True):
                    store_vector(builder, total, pointer)

        dispatch(builder, [(many, _ROWS), (wide, (*_COLUMNS, 8))], emit)
        return context.get_dummy_value()

    return signature, generate
