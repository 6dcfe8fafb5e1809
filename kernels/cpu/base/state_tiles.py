"""Define the micro-kernels of layers with a state: scores of a token, and the state's step over a chunk.

As in `base.small_tiles`: arrays are flat, positions are element offsets or those of `Rows`, each lane does the
operations of a plain loop in order. N state size.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from samebit.kernels.cpu.base.rows import unpacked
from samebit.kernels.cpu.base.vectors import (
    accumulate,
    dispatch,
    fma,
    load_vector,
    pointer_to,
    prefetch,
    splat,
    store_vector,
    stream_vector,
    zeros,
)
from samebit.kernels.layout.grids import CACHE_LINE, LANES


def _sum_of_lanes(builder: Any, vector: Any) -> Any:
    """Add halves to halves: lane i to lane i + 8, then 4, 2, 1."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = ir.VectorType(ir.IntType(32), width)
        undefined = ir.Constant(vector.type, ir.Undefined)
        halves = [
            builder.shuffle_vector(vector, undefined, ir.Constant(lanes, list(range(first, first + width))))
            for first in (0, width)
        ]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, ir.IntType(32)(0))


@intrinsic
def dots(
    typingctx: Any, query: Any, query_at: Any, keys: Any, keys_at: Any, keys_stride: Any, count: Any, width: Any,
    out: Any, out_at: Any,
) -> Any:  # fmt: skip
    """Compute ``out[s] = sum over n of query[n] keys[s, n]`` for s < count: sixteen partial sums, then the lanes.

    ``width`` is a multiple of 16. Four keys at a time share the loads of the query.
    """
    i64 = types.int64
    signature = types.void(query, i64, keys, i64, i64, i64, i64, out, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        reads, reads_at, matrix, first, stride, many, wide, target, target_at = args
        index = many.type
        vectors = builder.lshr(wide, index(4))
        start = pointer_to(context, builder, query, reads, reads_at)
        rows = pointer_to(context, builder, keys, matrix, first)
        results = pointer_to(context, builder, out, target, target_at)
        done = cgutils.alloca_once(builder, index)
        builder.store(index(0), done)

        def some(together: int) -> None:
            """Emit what runs while at least this count of keys is left."""
            check, body, after = (builder.append_basic_block(f"dots.{name}") for name in ("check", "body", "after"))
            builder.branch(check)
            builder.position_at_end(check)
            here = builder.load(done)
            following = builder.add(here, index(together))
            builder.cbranch(builder.icmp_signed("<=", following, many), body, after)
            builder.position_at_end(body)
            places = [builder.add(here, index(k)) for k in range(together)]
            pointers = [builder.gep(rows, [builder.mul(place, stride)]) for place in places]

            def step(i: Any, sums: list[Any]) -> list[Any]:
                lane = builder.mul(i, index(LANES))
                read = load_vector(builder, builder.gep(start, [lane]), query.dtype)
                loaded = [load_vector(builder, builder.gep(pointer, [lane]), keys.dtype) for pointer in pointers]
                return [fma(builder, read, key, total) for key, total in zip(loaded, sums, strict=True)]

            totals = accumulate(builder, vectors, [zeros()] * together, step)
            for place, total in zip(places, totals, strict=True):
                builder.store(_sum_of_lanes(builder, total), builder.gep(results, [place]))
            builder.store(following, done)
            builder.branch(check)
            builder.position_at_end(after)

        some(4)
        some(1)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def tile_move(
    typingctx: Any, rows: Any, columns: Any, factor: Any, weights: Any, vectors: Any, count: Any, out: Any, ahead: Any,
    second: Any, second_at: Any,
) -> Any:  # fmt: skip
    """Compute ``out[r, 0 : 16 c] = factor out + sum over i of weights[i, r] * vectors[i, 0 : 16 c]``, ascending.

    ``weights``, ``vectors`` and ``out`` are `Rows`; ``rows`` is 1, 2 or 4, ``columns`` (c) 1, 2 or 4. What lies
    ``ahead`` elements behind ``out`` is asked for meanwhile. The result also goes to ``second`` (same stride), past
    the caches, unless ``second_at`` is negative.
    """
    i64 = types.int64
    signature = types.void(i64, i64, types.float32, weights, vectors, i64, out, i64, second, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, wide, scale, weights_given, vectors_given, n, out_given, distance, other, other_at = args
        index = many.type
        weight_type, weight, weight_at, weight_stride = unpacked(context, builder, weights, weights_given)
        vector_type, vector, vector_at, stride = unpacked(context, builder, vectors, vectors_given)
        target_type, target, at, step = unpacked(context, builder, out, out_given)
        factors_at = pointer_to(context, builder, weight_type, weight, weight_at)
        tile = pointer_to(context, builder, vector_type, vector, vector_at)
        start = pointer_to(context, builder, target_type, target, at)
        other_start = pointer_to(context, builder, second, other, other_at)
        wanted = builder.icmp_signed(">=", other_at, index(0))

        def emit(row_count: int, column_count: int) -> None:
            lanes = [index(LANES * c) for c in range(column_count)]
            offsets = [builder.add(builder.mul(step, index(r)), lane) for r in range(row_count) for lane in lanes]
            targets = [builder.gep(start, [offset]) for offset in offsets]

            def body(i: Any, sums: list[Any]) -> list[Any]:
                row = builder.gep(tile, [builder.mul(i, stride)])
                loaded = [load_vector(builder, builder.gep(row, [lane]), vector_type.dtype) for lane in lanes]
                here = builder.gep(factors_at, [builder.mul(i, weight_stride)])
                factors = [splat(builder, builder.load(builder.gep(here, [index(r)]))) for r in range(row_count)]
                pairs = [(factor, column) for factor in factors for column in loaded]
                return [fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            for pointer in targets:
                prefetch(builder, builder.gep(pointer, [distance]))
            kept = splat(builder, scale)
            initial = [builder.fmul(load_vector(builder, pointer, types.float32), kept) for pointer in targets]
            totals = accumulate(builder, n, initial, body)
            for pointer, total in zip(targets, totals, strict=True):
                store_vector(builder, total, pointer)
            with builder.if_then(wanted):
                for offset, total in zip(offsets, totals, strict=True):
                    stream_vector(builder, total, builder.gep(other_start, [offset]))

        dispatch(builder, [(many, (1, 2, 4)), (wide, (1, 2, 4))], emit)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def fetch_all(typingctx: Any, array: Any, at: Any, count: Any) -> Any:
    """Ask for ``count`` elements from ``at`` on."""
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, first, many = args
        index = many.type
        start = pointer_to(context, builder, array, data, first)
        line = CACHE_LINE * 8 // array.dtype.bitwidth
        lines = builder.sdiv(builder.add(many, index(line - 1)), index(line))

        def ask(i: Any, sums: list[Any]) -> list[Any]:
            prefetch(builder, builder.gep(start, [builder.mul(i, index(line))]))
            return sums

        accumulate(builder, lines, [], ask)
        return context.get_dummy_value()

    return types.void(array, i64, i64), generate
