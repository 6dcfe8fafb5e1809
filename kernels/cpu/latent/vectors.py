"""Widen latents, weigh scores, add up those of an index, and count keys, as LLVM vectors.

Why they are written in LLVM: see `base.small_tiles`.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import (
    HALF_VECTOR,
    VECTOR,
    accumulate,
    dispatch,
    exponential,
    fma,
    greater,
    load_as,
    load_vector,
    pointer_to,
    splat,
    store_as,
    store_vector,
    zeros,
)
from samebit.kernels.cpu.latent.dots import DOTS, pair_of
from samebit.kernels.cpu.latent.tiles import LARGE, NARROW_COLUMNS
from samebit.kernels.layout.grids import KV_CHUNK, LANES


@intrinsic
def widen_vectors(typingctx: Any, source: Any, at: Any, count: Any, target: Any, to: Any) -> Any:
    """Write ``target[to : to + 16 count] = source[at : at + 16 count]`` in float32.

    ``source`` is float32, or bfloat16 as its uint16 bits.
    """
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, first, vectors, out, out_first = args
        start = pointer_to(context, builder, source, given, first)
        end = pointer_to(context, builder, target, out, out_first)

        def copy_one(i: Any, sums: list[Any]) -> list[Any]:
            moved = builder.mul(i, i.type(LANES))
            row = load_vector(builder, builder.gep(start, [moved]), source.dtype)
            store_vector(builder, row, builder.gep(end, [moved]))
            return sums

        accumulate(builder, vectors, [], copy_one)
        return context.get_dummy_value()

    return types.void(source, i64, i64, target, i64), generate


PLAIN, PAIRED, FEW = range(3)
WEIGHED = (PLAIN, PAIRED) if DOTS else (PLAIN,) if LARGE else (PLAIN, FEW)
"""How `weigh` may be asked for."""


@intrinsic
def weigh(
    typingctx: Any, whole: Any, kind: Any, s: Any, s_at: Any, scale: Any, seen: Any, peaks: Any, shrinks: Any,
    row: Any, sums: Any, sums_at: Any,
) -> Any:  # fmt: skip
    """Turn the raw scores ``s[j, lane]`` of sixteen rows into weights against their maxima so far, ``peaks``.

    A row sees the first ``seen`` tokens (float32) of the chunk, all of them if ``whole``; the others get weight 0.
    Maxima and the partial sums ``[LANES, lane]`` go on; ``shrinks`` gets what the accumulators are to be multiplied by.
    ``kind`` is one of `WEIGHED`. `PAIRED` weights are rounded to bfloat16, and those of two tokens lie at the first, as
    `dot` reads; `FEW` are of the first half of the rows alone.
    """
    i64 = types.int64
    signature = types.void(types.boolean, i64, s, i64, types.float32, seen, peaks, shrinks, i64, sums, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (whole_given, asked, s_array, s_from, factor, seen_array, peak_array, shrink_array, at, sums_array,
         sums_from) = args  # fmt: skip
        index = at.type
        start = pointer_to(context, builder, s, s_array, s_from)
        totals = pointer_to(context, builder, sums, sums_array, sums_from)
        peak_at = pointer_to(context, builder, peaks, peak_array, at)
        shrink_at = pointer_to(context, builder, shrinks, shrink_array, at)
        limit_at = pointer_to(context, builder, seen, seen_array, at)

        def emit(all_seen: int, kind: int) -> None:
            vector, in_pairs = HALF_VECTOR if kind == FEW else VECTOR, kind == PAIRED
            limit, old = load_as(builder, limit_at, vector), load_as(builder, peak_at, vector)
            lowest, none = (ir.Constant(vector, [number] * vector.count) for number in (float("-inf"), 0.0))
            scale_vector = splat(builder, factor, vector)

            def unseen(j: Any) -> Any:
                number = splat(builder, builder.sitofp(j, ir.FloatType()), vector)
                return builder.fcmp_ordered(">=", number, limit)

            def scaled(i: Any, best: list[Any]) -> list[Any]:
                found = []
                for part, greatest in enumerate(best):
                    j = builder.add(builder.mul(i, index(len(best))), index(part))
                    pointer = builder.gep(start, [builder.mul(j, index(LANES))])
                    score = builder.fmul(load_as(builder, pointer, vector), scale_vector)
                    if not all_seen:
                        score = builder.select(unseen(j), lowest, score)
                    store_as(builder, score, pointer)
                    found.append(greater(builder, score, greatest))
                return found

            best = accumulate(builder, index(KV_CHUNK // 4), [lowest] * 4, scaled)
            best = [greater(builder, a, b) for a, b in zip(best[::2], best[1::2], strict=True)]
            peak = greater(builder, greater(builder, *best), old)
            shrink = exponential(builder, builder.fsub(old, peak))
            shrink = builder.select(builder.fcmp_ordered(">", old, lowest), shrink, none)

            together = 1 + in_pairs

            def weights(i: Any, nothing: list[Any]) -> list[Any]:
                lanes = [builder.add(builder.mul(i, index(together)), index(part)) for part in range(together)]
                targets = [builder.gep(totals, [builder.mul(lane, index(LANES))]) for lane in lanes]
                sums = [builder.fmul(load_as(builder, target, vector), shrink) for target in targets]
                for piece in range(0, KV_CHUNK, LANES):
                    found = []
                    for part, lane in enumerate(lanes):
                        j = builder.add(lane, index(piece))
                        score = load_as(builder, builder.gep(start, [builder.mul(j, index(LANES))]), vector)
                        weight = exponential(builder, builder.fsub(score, peak))
                        if not all_seen:
                            weight = builder.select(unseen(j), none, weight)
                        sums[part] = builder.fadd(sums[part], weight)
                        found.append(weight)
                    first = builder.gep(start, [builder.mul(builder.add(lanes[0], index(piece)), index(LANES))])
                    store_as(builder, pair_of(builder, *found) if in_pairs else found[0], first)
                for total, target in zip(sums, targets, strict=True):
                    store_as(builder, total, target)
                return nothing

            accumulate(builder, index(LANES // together), [], weights)
            store_as(builder, peak, peak_at)
            store_as(builder, shrink, shrink_at)

        dispatch(builder, [(whole_given, (0, 1)), (asked, WEIGHED)], emit)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def write_halves(typingctx: Any, sums: Any, at: Any, divisor: Any, out: Any, out_at: Any) -> Any:
    """Divide the ``sums`` of `NARROW_COLUMNS` vectors of columns, the even ones before the odd ones, and write them."""
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, first, total, target, to = args
        kind = VECTOR if NARROW_COLUMNS > 1 else HALF_VECTOR
        start = pointer_to(context, builder, sums, given, first)
        totals = splat(builder, total, kind)
        halves = [
            builder.fdiv(load_as(builder, builder.gep(start, [first.type(half * kind.count)]), kind), totals)
            for half in range(2)
        ]
        for part in range(NARROW_COLUMNS):
            lanes = [part * LANES // 2 + lane // 2 + lane % 2 * kind.count for lane in range(LANES)]
            whole = builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(ir.IntType(32), LANES), lanes))
            end = pointer_to(context, builder, out, target, builder.add(to, to.type(part * LANES)))
            store_vector(builder, whole, end, out.dtype)
        return context.get_dummy_value()

    return types.void(sums, i64, types.float32, out, i64), generate


_AT_ONCE = 4
"""Vectors of keys that are compared before the next ones: their counts do not wait for each other."""


@intrinsic
def count_reaching(typingctx: Any, keys: Any, count: Any, least: Any) -> Any:
    """Return how many of the first ``count`` of ``keys`` (int32) are not less than a number."""
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, number, limit = args
        index, many = number.type, LANES * _AT_ONCE
        start = pointer_to(context, builder, keys, given, index(0))
        i32 = ir.IntType(32)
        kind = ir.VectorType(i32, LANES)
        limits = splat(builder, limit, kind)

        def compare(i: Any, sums: list[Any]) -> list[Any]:
            found = []
            for part, total in enumerate(sums):
                place = builder.gep(start, [builder.add(builder.mul(i, index(many)), index(part * LANES))])
                reached = builder.icmp_signed(">=", load_as(builder, place, kind), limits)
                found.append(builder.sub(total, builder.sext(reached, kind)))
            return found

        def single(i: Any, sums: list[Any]) -> list[Any]:
            key = builder.load(builder.gep(start, [builder.add(done, i)]))
            return [builder.add(sums[0], builder.zext(builder.icmp_signed(">=", key, limit), i32))]

        blocks = builder.udiv(number, index(many))
        done = builder.mul(blocks, index(many))
        totals = accumulate(builder, blocks, [ir.Constant(kind, [0] * LANES)] * _AT_ONCE, compare)
        total = i32(0)
        for lane in range(LANES):
            for vector in totals:
                total = builder.add(total, builder.extract_element(vector, i32(lane)))
        [total] = accumulate(builder, builder.sub(number, done), [total], single)
        return builder.sext(total, index)

    return types.int64(keys, i64, types.int32), generate


@intrinsic
def add_heads(typingctx: Any, products: Any, first: Any, weights: Any, weights_at: Any, heads: Any, scale: Any,
    out: Any, out_at: Any) -> Any:  # fmt: skip
    """Write ``out[j]``, j < C, the chain over h < heads of ``weights[h]`` times the positive part of a scaled product.

    The products of lane i, ``first + h``, are ``[i // LANES, C / LANES, i % LANES]`` and sixteen tokens; flat arrays.
    """
    i64 = types.int64
    signature = types.void(products, i64, weights, i64, i64, types.float32, out, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, lane, weight_array, weight_from, many, factor, out_array, out_from = args
        index = lane.type
        start = pointer_to(context, builder, products, given, index(0))
        factors = pointer_to(context, builder, weights, weight_array, weight_from)
        scale_vector = splat(builder, factor)

        def add(h: Any, sums: list[Any]) -> list[Any]:
            i = builder.add(lane, h)
            vector, own = builder.udiv(i, index(LANES)), builder.and_(i, index(LANES - 1))
            at = builder.add(builder.mul(vector, index(KV_CHUNK * LANES)), builder.mul(own, index(LANES)))
            weight = splat(builder, builder.load(builder.gep(factors, [h])))
            found = []
            for part, total in enumerate(sums):
                place = builder.gep(start, [builder.add(at, index(part * LANES * LANES))])
                product = builder.fmul(load_vector(builder, place, types.float32), scale_vector)
                found.append(fma(builder, weight, greater(builder, product, zeros()), total))
            return found

        target = pointer_to(context, builder, out, out_array, out_from)
        for part, total in enumerate(accumulate(builder, many, [zeros()] * (KV_CHUNK // LANES), add)):
            store_vector(builder, total, builder.gep(target, [index(part * LANES)]))
        return context.get_dummy_value()

    return signature, generate
