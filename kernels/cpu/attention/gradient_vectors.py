"""Define the micro-kernels of attention's gradients, as LLVM vectors (why: see `base.small_tiles`).

A tile holds rows of queries and a chunk of keys (C), which see each other in steps: the later a row, the later the last
key that it sees, and the first.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from samebit.kernels.cpu.base.rows import unpacked
from samebit.kernels.cpu.base.small_tiles import pieces
from samebit.kernels.cpu.base.vectors import (
    REGISTERS,
    accumulate,
    dispatch,
    exponential,
    fma,
    load_vector,
    pointer_to,
    row_of,
    splat,
    store_vector,
    zeros,
)
from samebit.kernels.layout.grids import KV_CHUNK, LANES

MOST_CHAINS = 8 if REGISTERS == 32 else 4
"""The most rows, or keys, whose sums are under way at once."""

MOST_COLUMNS = 2
"""The most vectors of each of them: more would not stay in registers."""

ROWS_AT_ONCE = 8
"""Rows that `multiply_rows` takes at once."""

_COLUMNS = (2, 1)
_ROWS = (4, 1)
_LANE_NUMBERS = ir.VectorType(ir.IntType(32), LANES)


def _add_steps(apart: int, step: int) -> Any:
    """Make a micro-kernel: ``out[k, 0 : 16 c] += chain over i of weights[at + k apart + i step] * vectors[i, ...]``.

    ``chains`` (k) is `MOST_CHAINS` or 1, ``columns`` (c) 1 or 2. Chain k goes over
    ``begins[first + k] <= i < ends[first + k]``, ascending; neither may descend with k, and the last chain begins
    before the first one ends, or there. What all chains go over is computed together, in registers, what is before and
    behind for those that go over it.
    """

    @intrinsic
    def kernel(
        typingctx: Any, chains: Any, columns: Any, weights: Any, at: Any, vectors: Any, begins: Any, ends: Any,
        first: Any, out: Any,
    ) -> Any:  # fmt: skip
        i64 = types.int64
        signature = types.void(i64, i64, weights, i64, vectors, begins, ends, i64, out)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            many, wide, weight, weight_at, vectors_given, from_given, to_given, bounds_at, out_given = args
            index = many.type
            vector_type, vector, vector_at, stride = unpacked(context, builder, vectors, vectors_given)
            target = unpacked(context, builder, out, out_given)

            def emit(chain_count: int, column_count: int) -> None:
                bounds = [
                    [
                        builder.load(pointer_to(context, builder, kind, given, builder.add(bounds_at, index(k))))
                        for k in range(chain_count)
                    ]
                    for kind, given in ((begins, from_given), (ends, to_given))
                ]
                for piece in pieces(chain_count, column_count):
                    emit_piece(chain_count, piece, *bounds)

            def emit_piece(chain_count: int, piece: range, starts: list[Any], stops: list[Any]) -> None:
                first_vector = pointer_to(context, builder, vector_type, vector, vector_at)
                first_weight = pointer_to(context, builder, weights, weight, weight_at)
                rows = [row_of(context, builder, *target, k) for k in range(chain_count)]
                targets = [[builder.gep(row, [index(LANES * c)]) for c in piece] for row in rows]
                sums = [[load_vector(builder, place, types.float32) for place in row] for row in targets]

                def run(begin: Any, end: Any, chains: range) -> None:
                    """Go from ``begin`` to before ``end`` with some of the chains."""

                    def body(i: Any, totals: list[Any]) -> list[Any]:
                        moved = builder.add(begin, i)
                        here = builder.gep(first_vector, [builder.mul(moved, stride)])
                        loaded = [
                            load_vector(builder, builder.gep(here, [index(LANES * c)]), vector_type.dtype)
                            for c in piece
                        ]
                        along = builder.gep(first_weight, [builder.mul(moved, index(step))])
                        factors = [splat(builder, builder.load(builder.gep(along, [index(k * apart)]))) for k in chains]
                        pairs = [(factor, column) for factor in factors for column in loaded]
                        return [fma(builder, *pair, total) for pair, total in zip(pairs, totals, strict=True)]

                    carried = [total for k in chains for total in sums[k]]
                    found = accumulate(builder, builder.sub(end, begin), carried, body)
                    for number, k in enumerate(chains):
                        sums[k] = found[number * len(piece) : (number + 1) * len(piece)]

                for k in range(chain_count - 1):
                    run(starts[k], starts[k + 1], range(k + 1))
                run(starts[-1], stops[0], range(chain_count))
                for k in range(1, chain_count):
                    run(stops[k - 1], stops[k], range(k, chain_count))
                for row, totals in zip(targets, sums, strict=True):
                    for place, total in zip(row, totals, strict=True):
                        store_vector(builder, total, place)

            dispatch(builder, [(many, (MOST_CHAINS, 1)), (wide, _COLUMNS)], emit)
            return context.get_dummy_value()

        return signature, generate

    return kernel


add_to_queries = _add_steps(apart=KV_CHUNK, step=1)
"""Chains are rows, and go over keys; weights are ``[rows, C]``."""

add_to_keys = _add_steps(apart=1, step=KV_CHUNK)
"""Chains are keys, and go over rows."""


@intrinsic
def to_slopes(
    typingctx: Any, rows: Any, whole: Any, pieces: Any, s: Any, slopes: Any, at: Any, scale: Any, shifts: Any,
    deltas: Any, row: Any, lows: Any, highs: Any, first: Any,
) -> Any:  # fmt: skip
    """Turn raw scores ``s [rows, C]`` into probabilities, and their gradients ``slopes`` into those of the raw scores.

    Both begin at ``at``; of each row the first ``pieces`` vectors are computed. What row i does not see, before
    ``lows[first + i]`` and from ``highs[first + i]`` on, becomes 0, unless ``whole`` says that all rows see all.
    ``shifts`` and ``deltas`` are those of the rows from ``row`` on.
    """
    i64 = types.int64
    signature = types.void(
        i64, types.boolean, i64, s, slopes, i64, types.float32, shifts, deltas, i64, lows, highs, i64
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, all_seen, count, scores, bends, start, factor, shift, delta, own, low, high, bounds_at = args
        index = many.type

        def number(kind: Any, array: Any, place: Any, i: int) -> Any:
            return builder.load(pointer_to(context, builder, kind, array, builder.add(place, index(i))))

        def bound(kind: Any, array: Any, i: int) -> Any:
            return splat(builder, builder.trunc(number(kind, array, bounds_at, i), ir.IntType(32)), _LANE_NUMBERS)

        def emit(row_count: int, seen: int) -> None:
            scales = splat(builder, factor)
            of_rows = [
                [splat(builder, number(kind, array, own, i)) for kind, array in ((shifts, shift), (deltas, delta))]
                for i in range(row_count)
            ]
            bounds = [] if seen else [[bound(lows, low, i), bound(highs, high, i)] for i in range(row_count)]
            with cgutils.for_range(builder, count, intp=index) as loop:
                lane = builder.mul(loop.index, index(LANES))
                places = builder.add(
                    splat(builder, builder.trunc(lane, ir.IntType(32)), _LANE_NUMBERS),
                    ir.Constant(_LANE_NUMBERS, list(range(LANES))),
                )
                for i, (shifted, less) in enumerate(of_rows):
                    here = builder.add(builder.add(start, lane), index(i * KV_CHUNK))
                    score_at = pointer_to(context, builder, s, scores, here)
                    slope_at = pointer_to(context, builder, slopes, bends, here)
                    score = builder.fmul(load_vector(builder, score_at, types.float32), scales)
                    p = exponential(builder, builder.fsub(score, shifted))
                    slope = builder.fsub(load_vector(builder, slope_at, types.float32), less)
                    slope = builder.fmul(builder.fmul(p, slope), scales)
                    if not seen:
                        within = builder.and_(
                            builder.icmp_signed(">=", places, bounds[i][0]),
                            builder.icmp_signed("<", places, bounds[i][1]),
                        )
                        p, slope = (builder.select(within, value, zeros()) for value in (p, slope))
                    store_vector(builder, p, score_at)
                    store_vector(builder, slope, slope_at)

        dispatch(builder, [(many, _ROWS), (builder.zext(all_seen, index), (1, 0))], emit)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def multiply_rows(typingctx: Any, rows: Any, a: Any, b: Any, count: Any, out: Any, at: Any) -> Any:
    """Write to ``out[at + r]`` the chain over i < count of ``a[r, i] * b[r, i]``, of 8 rows or 1.

    The chains of several rows hide each other's latency.
    """
    i64 = types.int64
    signature = types.void(i64, a, b, i64, out, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, a_given, b_given, n, target, first = args
        left, right = unpacked(context, builder, a, a_given), unpacked(context, builder, b, b_given)

        def emit(row_count: int) -> None:
            pairs = [[row_of(context, builder, *side, r) for side in (left, right)] for r in range(row_count)]

            def body(i: Any, totals: list[Any]) -> list[Any]:
                factors = [[builder.load(builder.gep(row, [i])) for row in pair] for pair in pairs]
                return [builder.fma(*pair, total) for pair, total in zip(factors, totals, strict=True)]

            nothing = ir.Constant(ir.FloatType(), 0.0)
            for r, total in enumerate(accumulate(builder, n, [nothing] * row_count, body)):
                builder.store(total, pointer_to(context, builder, out, target, builder.add(first, first.type(r))))

        dispatch(builder, [(many, (ROWS_AT_ONCE, 1))], emit)
        return context.get_dummy_value()

    return signature, generate
