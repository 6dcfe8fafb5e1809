"""Sixteen-lane products of small tiles, for the state-space scan and attention's gradients, as LLVM vectors.

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
    accumulate,
    fma,
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
"""Elements between what `tile_multiply` reads and what it asks for meanwhile (4 KiB in float32)."""

_ROWS = (1, 2, 4)
_COLUMNS = (1, 2, 4)


def _tile_multiply(from_zero: bool) -> Any:
    """Make a micro-kernel: ``out[r, 0 : 16 c] (+)= sum over i of weights[r, i] * vectors[i, 0 : 16 c]``.

    ``rows`` is 1, 2 or 4, ``columns`` (c) 1, 2 or 4; ``weights``, ``vectors`` and ``out`` are `Rows`.
    ``tile_multiply`` of one row (decode waits for memory) also asks for what lies `FETCH_AHEAD` elements further on.
    """

    @intrinsic
    def kernel(typingctx: Any, rows: Any, columns: Any, weights: Any, vectors: Any, count: Any, out: Any) -> Any:
        i64 = types.int64
        signature = types.void(i64, i64, weights, vectors, i64, out)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            many, wide, weights_given, vectors_given, n, out_given = args
            index = many.type
            weight = unpacked(context, builder, weights, weights_given)
            vector_type, vector, vector_at, stride = unpacked(context, builder, vectors, vectors_given)
            target = unpacked(context, builder, out, out_given)
            tile = pointer_to(context, builder, vector_type, vector, vector_at)

            def emit(row_count: int, column_count: int) -> None:
                weight_rows = [row_of(context, builder, *weight, r) for r in range(row_count)]
                lanes = [index(LANES * c) for c in range(column_count)]
                out_rows = [row_of(context, builder, *target, r) for r in range(row_count)]
                targets = [builder.gep(row, [lane]) for row in out_rows for lane in lanes]

                def body(i: Any, sums: list[Any]) -> list[Any]:
                    moved = builder.mul(i, stride)
                    start = builder.gep(tile, [moved])
                    for lane in lanes if from_zero and row_count == 1 else []:
                        prefetch(builder, builder.gep(start, [builder.add(lane, index(FETCH_AHEAD))]))
                    loaded = [load_vector(builder, builder.gep(start, [lane]), vector_type.dtype) for lane in lanes]
                    factors = [splat(builder, builder.load(builder.gep(row, [i]))) for row in weight_rows]
                    pairs = [(factor, columns) for factor in factors for columns in loaded]
                    return [fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

                initial = [zeros() if from_zero else load_vector(builder, p, types.float32) for p in targets]
                for pointer, total in zip(targets, accumulate(builder, n, initial, body), strict=True):
                    store_vector(builder, total, pointer)

            for row_count in _ROWS:
                for column_count in _COLUMNS:
                    chosen = builder.and_(
                        builder.icmp_signed("==", many, index(row_count)),
                        builder.icmp_signed("==", wide, index(column_count)),
                    )
                    with builder.if_then(chosen):
                        emit(row_count, column_count)
            return context.get_dummy_value()

        return signature, generate

    return kernel


tile_multiply = _tile_multiply(from_zero=True)
tile_multiply_add = _tile_multiply(from_zero=False)
