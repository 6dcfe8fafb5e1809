"""Define the micro-kernels of layers with a state: scores of a token, and the state's step over a chunk.

As in `base.small_tiles`: arrays are flat, positions are element offsets or those of `Rows`, each lane does the
operations of a plain loop in order. N state size.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from samebit.kernels.cpu.base.part import inlined_part
from samebit.kernels.cpu.base.rows import unpacked
from samebit.kernels.cpu.base.small_tiles import pieces
from samebit.kernels.cpu.base.vectors import (
    REGISTERS,
    accumulate,
    dispatch,
    fma,
    load_vector,
    pointer_to,
    prefetch,
    row_of,
    splat,
    store_vector,
    stream_vector,
    zeros,
)
from samebit.kernels.layout.grids import CACHE_LINE, LANES

_KEYS = min(4, REGISTERS // 4)
"""Keys whose products are summed at once, for two queries: as many as leave the sums in registers."""


@inlined_part
def taken_at_once(left: int) -> int:
    """Return how many of the rows or columns that are left to take at once: 4, 2 or 1."""
    return 4 if left >= 4 else (2 if left >= 2 else 1)


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


def _ascending(builder: Any, vector: Any) -> Any:
    """Add the lanes one after the other, to zero."""
    total: Any = ir.Constant(ir.FloatType(), 0.0)
    for lane in range(LANES):
        total = builder.fadd(total, builder.extract_element(vector, ir.IntType(32)(lane)))
    return total


@intrinsic
def sum_of_squares(typingctx: Any, array: Any, at: Any, width: Any) -> Any:
    """Return the sum of the squares of ``width`` elements, a multiple of 16: sixteen partial sums, then the lanes,
    ascending."""
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, first, wide = args
        start = pointer_to(context, builder, array, data, first)

        def step(i: Any, sums: list[Any]) -> list[Any]:
            read = load_vector(builder, builder.gep(start, [builder.mul(i, i.type(LANES))]), array.dtype)
            return [fma(builder, read, read, sums[0])]

        (squares,) = accumulate(builder, builder.lshr(wide, wide.type(4)), [zeros()], step)
        return _ascending(builder, squares)

    return types.float32(array, i64, i64), generate


@intrinsic
def dots(typingctx: Any, rows: Any, queries: Any, keys: Any, count: Any, width: Any, out: Any) -> Any:
    """Compute ``out[r, s] = sum over n of queries[r, n] keys[s, n]`` for s < count: sixteen partial sums, then the
    lanes.

    ``rows`` is 1 or 2, ``width`` a multiple of 16; ``queries``, ``keys`` and ``out`` are `Rows`. Some keys at a time
    share the loads of a query.
    """
    i64 = types.int64
    signature = types.void(i64, queries, keys, i64, i64, out)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, queries_given, keys_given, many, wide, out_given = args
        query = unpacked(context, builder, queries, queries_given)
        key_type, keys_array, keys_at, stride = unpacked(context, builder, keys, keys_given)
        target = unpacked(context, builder, out, out_given)
        index = many.type
        vectors = builder.lshr(wide, index(4))
        first = pointer_to(context, builder, key_type, keys_array, keys_at)

        def emit(row_count: int) -> None:
            starts, results = (
                [row_of(context, builder, *rows_of, r) for r in range(row_count)] for rows_of in (query, target)
            )
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
                pointers = [builder.gep(first, [builder.mul(place, stride)]) for place in places]

                def step(i: Any, sums: list[Any]) -> list[Any]:
                    lane = builder.mul(i, index(LANES))
                    reads = [load_vector(builder, builder.gep(start, [lane]), query[0].dtype) for start in starts]
                    loaded = [load_vector(builder, builder.gep(place, [lane]), key_type.dtype) for place in pointers]
                    pairs = [(read, key) for read in reads for key in loaded]
                    return [fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

                totals = accumulate(builder, vectors, [zeros()] * (row_count * together), step)
                targets = [builder.gep(result, [place]) for result in results for place in places]
                for pointer, total in zip(targets, totals, strict=True):
                    builder.store(_sum_of_lanes(builder, total), pointer)
                builder.store(following, done)
                builder.branch(check)
                builder.position_at_end(after)

            some(_KEYS)
            some(1)

        dispatch(builder, [(number, (1, 2))], emit)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def tile_move(
    typingctx: Any, rows: Any, columns: Any, kept: Any, weights: Any, vectors: Any, count: Any, out: Any, ahead: Any,
    second: Any, second_at: Any,
) -> Any:  # fmt: skip
    """Compute ``out[r, 0 : 16 c] = kept[r] out + sum over i of weights[i, r] * vectors[i, 0 : 16 c]``, ascending.

    ``kept`` (one element a row; a stride of 0 makes it the same for all), ``weights``, ``vectors`` and ``out`` are
    `Rows`; ``rows`` is 1, 2 or 4, ``columns`` (c) 1, 2 or 4. What lies ``ahead`` elements behind ``out`` is asked for
    meanwhile. The result also goes to ``second`` (same stride), past the caches, unless ``second_at`` is negative.
    """
    i64 = types.int64
    signature = types.void(i64, i64, kept, weights, vectors, i64, out, i64, second, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, wide, kept_given, weights_given, vectors_given, n, out_given, distance, other, other_at = args
        index = many.type
        shares = unpacked(context, builder, kept, kept_given)
        weight_type, weight, weight_at, weight_stride = unpacked(context, builder, weights, weights_given)
        vector_type, vector, vector_at, stride = unpacked(context, builder, vectors, vectors_given)
        target_type, target, at, step = unpacked(context, builder, out, out_given)
        factors_at = pointer_to(context, builder, weight_type, weight, weight_at)
        tile = pointer_to(context, builder, vector_type, vector, vector_at)
        start = pointer_to(context, builder, target_type, target, at)
        other_start = pointer_to(context, builder, second, other, other_at)
        wanted = builder.icmp_signed(">=", other_at, index(0))

        def emit(row_count: int, column_count: int) -> None:
            everywhere = [index(LANES * c) for c in range(column_count)]
            for offset in (builder.add(builder.mul(step, index(r)), c) for r in range(row_count) for c in everywhere):
                prefetch(builder, builder.gep(start, [builder.add(offset, distance)]))
            scales = [splat(builder, builder.load(row_of(context, builder, *shares, r))) for r in range(row_count)]
            for piece in pieces(row_count, column_count):
                move([index(LANES * c) for c in piece], scales)

        def move(lanes: list[Any], scales: list[Any]) -> None:
            """Move some columns of the rows, which have these scales."""
            offsets = [builder.add(builder.mul(step, index(r)), lane) for r in range(len(scales)) for lane in lanes]
            targets = [builder.gep(start, [offset]) for offset in offsets]

            def body(i: Any, sums: list[Any]) -> list[Any]:
                row = builder.gep(tile, [builder.mul(i, stride)])
                loaded = [load_vector(builder, builder.gep(row, [lane]), vector_type.dtype) for lane in lanes]
                here = builder.gep(factors_at, [builder.mul(i, weight_stride)])
                factors = [splat(builder, builder.load(builder.gep(here, [index(r)]))) for r in range(len(scales))]
                pairs = [(factor, column) for factor in factors for column in loaded]
                return [fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            before = [load_vector(builder, pointer, types.float32) for pointer in targets]
            initial = [builder.fmul(vector, scales[i // len(lanes)]) for i, vector in enumerate(before)]
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
