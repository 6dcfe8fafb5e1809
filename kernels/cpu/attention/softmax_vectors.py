"""Define the step of the online softmax for up to four rows and one chunk of tokens, as LLVM vectors.

Invariant: a row gets the same bits whatever rows are beside it: each number is computed by itself. The rows only hide
each other's latency, and share the branches, of which a processor foresees few.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import (
    VECTOR,
    accumulate,
    dispatch,
    exponential,
    greater,
    load_vector,
    pointer_to,
    splat,
    store_vector,
    zeros,
)
from samebit.kernels.layout.grids import KV_CHUNK, LANES

_LANE_NUMBERS = ir.VectorType(ir.IntType(32), LANES)
_FOUR = ir.VectorType(ir.FloatType(), 4)
_ROWS = (4, 2, 1)


@intrinsic
def absorb(
    typingctx: Any, rows: Any, whole: Any, pieces: Any, s: Any, scale: Any, bounds: Any, peaks: Any, sums: Any,
    acc: Any, first: Any, wide: Any,
) -> Any:  # fmt: skip
    """Turn the scores ``s [rows, C]`` of a chunk into weights against each row's greatest score so far.

    ``rows`` is 4, 2 or 1. Those of ``peaks``, ``sums [rows, LANES]`` and ``acc [rows, wide]``, flat, begin at row
    ``first``. Row r sees the tokens of the chunk behind ``bounds[r]`` up to ``bounds[4 + r]``; the others, among the
    first ``pieces`` vectors, get weight 0. ``whole`` says that all rows see all. What was added before is rescaled
    where a score is above the greatest so far. Lane l of a row's sums goes on with the weights at l, 16 + l, 32 + l and
    48 + l, in order.
    """
    i64, f32 = types.int64, types.float32
    signature = types.void(i64, types.boolean, i64, s, f32, bounds, peaks, sums, acc, i64, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, all_seen, count, scores, factor, limits, greatest, partial, added, row, width = args
        index = many.type

        def score_at(r: int, lane: Any) -> Any:
            return pointer_to(context, builder, s, scores, builder.add(lane, index(r * KV_CHUNK)))

        def at(kind: Any, array: Any, r: int, size: Any) -> Any:
            return pointer_to(context, builder, kind, array, builder.mul(builder.add(row, index(r)), size))

        def emit(row_count: int, seen: int) -> None:
            every = range(row_count)
            scaling = splat(builder, factor)
            places = [at(peaks, greatest, r, index(1)) for r in every]
            before = [builder.load(place) for place in places]
            limit = [
                [builder.load(pointer_to(context, builder, bounds, limits, index(r + side))) for side in (0, 4)]
                for r in every
            ]

            def within(lane: Any, r: int) -> Any:
                """Tell of each lane whether the row sees it."""
                numbers = _numbers_from(builder, lane)
                low, high = (splat(builder, builder.trunc(side, ir.IntType(32)), _LANE_NUMBERS) for side in limit[r])
                return builder.and_(builder.icmp_signed(">", numbers, low), builder.icmp_signed("<=", numbers, high))

            def scaled(piece: Any, r: int) -> Any:
                lane = builder.mul(piece, index(LANES))
                score = builder.fmul(load_vector(builder, score_at(r, lane), f32), scaling)
                return score if seen else builder.select(within(lane, r), score, _every(float("-inf")))

            def weight(piece: Any, r: int, score: Any, peak: Any) -> Any:
                lane = builder.mul(piece, index(LANES))
                found = exponential(builder, builder.fsub(score, peak))
                found = found if seen else builder.select(within(lane, r), found, zeros())
                store_vector(builder, found, score_at(r, lane))
                return found

            tops = accumulate(
                builder, count, [_every(float("-inf"))] * row_count,
                lambda piece, found: [greater(builder, scaled(piece, r), found[r]) for r in every],
            )  # fmt: skip
            after = []
            for r in every:
                best = builder.extract_element(_greatest_lane(builder, tops[r]), ir.IntType(32)(0))
                after.append(builder.select(builder.fcmp_ordered(">", best, before[r]), best, before[r]))
            changed = [builder.fcmp_unordered("!=", *pair) for pair in zip(before, after, strict=True)]
            any_changed = changed[0]
            for other in changed[1:]:
                any_changed = builder.or_(any_changed, other)
            with builder.if_then(any_changed):
                factors = _factors(builder, before, after, changed)
                for r in every:
                    builder.store(after[r], places[r])
                    _multiply(builder, at(sums, partial, r, index(LANES)), index(LANES), factors[r])
                    _multiply(builder, at(acc, added, r, width), width, factors[r])
            targets = [at(sums, partial, r, index(LANES)) for r in every]
            totals = [load_vector(builder, target, f32) for target in targets]
            peak = [splat(builder, each) for each in after]
            totals = accumulate(
                builder, count, totals,
                lambda piece, carried: [
                    builder.fadd(carried[r], weight(piece, r, scaled(piece, r), peak[r])) for r in every
                ],
            )  # fmt: skip
            for target, total in zip(targets, totals, strict=True):
                store_vector(builder, total, target)

        dispatch(builder, [(many, _ROWS), (builder.zext(all_seen, index), (1, 0))], emit)
        return context.get_dummy_value()

    return signature, generate


def _numbers_from(builder: Any, lane: Any) -> Any:
    """Return the numbers of sixteen lanes of the chunk from ``lane`` on."""
    first = splat(builder, builder.trunc(lane, ir.IntType(32)), _LANE_NUMBERS)
    return builder.add(first, ir.Constant(_LANE_NUMBERS, list(range(LANES))))


def _factors(builder: Any, before: list[Any], after: list[Any], changed: list[Any]) -> list[Any]:
    """Return what each row's sums are multiplied by: 1 where its peak stays, 0 where nothing was added."""
    differences: Any = ir.Constant(_FOUR, [0.0] * 4)
    for r, (old, peak) in enumerate(zip(before, after, strict=True)):
        differences = builder.insert_element(differences, builder.fsub(old, peak), ir.IntType(32)(r))
    shrunk, zero, one = exponential(builder, differences), ir.FloatType()(0.0), ir.FloatType()(1.0)
    factors = []
    for r, old in enumerate(before):
        begun = builder.fcmp_ordered(">", old, ir.FloatType()(float("-inf")))
        factor = builder.select(begun, builder.extract_element(shrunk, ir.IntType(32)(r)), zero)
        factors.append(builder.select(changed[r], factor, one))
    return factors


def _multiply(builder: Any, pointer: Any, count: Any, factor: Any) -> None:
    """Multiply float32 from this place on."""
    index = count.type
    whole, factors = builder.and_(count, index(-LANES)), splat(builder, factor)
    with cgutils.for_range_slice(builder, index(0), whole, index(LANES), intp=index) as (i, _):
        place = builder.gep(pointer, [i])
        store_vector(builder, builder.fmul(load_vector(builder, place, types.float32), factors), place)
    with cgutils.for_range_slice(builder, whole, count, index(1), intp=index) as (i, _):
        place = builder.gep(pointer, [i])
        builder.store(builder.fmul(builder.load(place), factor), place)


def _every(number: float) -> Any:
    return ir.Constant(VECTOR, [number] * LANES)


def _greatest_lane(builder: Any, vector: Any) -> Any:
    """Return the greatest lane, in every lane."""
    distance = LANES // 2
    while distance:
        turned = [(lane + distance) % LANES for lane in range(LANES)]
        other = builder.shuffle_vector(vector, ir.Constant(VECTOR, ir.Undefined), ir.Constant(_LANE_NUMBERS, turned))
        vector = greater(builder, other, vector)
        distance //= 2
    return vector
