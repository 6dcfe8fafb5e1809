"""Copy rows of latents, add up scores of an index, and count keys, as LLVM vectors (why: see `base.small_tiles`)."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import (
    accumulate,
    fma,
    load_as,
    load_vector,
    pointer_to,
    splat,
    store_vector,
    zeros,
)
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


@intrinsic
def copy_elements(typingctx: Any, source: Any, at: Any, count: Any, target: Any, to: Any) -> Any:
    """Write ``target[to : to + count] = source[at : at + count]``, of one type, which do not overlap."""
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, first, number, out, out_first = args
        start = pointer_to(context, builder, source, given, first)
        end = pointer_to(context, builder, target, out, out_first)
        size = context.get_abi_sizeof(context.get_value_type(source.dtype))
        cgutils.raw_memcpy(builder, end, start, number, size)
        return context.get_dummy_value()

    return types.void(source, i64, i64, target, i64), generate


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


def greater(builder: Any, a: Any, b: Any) -> Any:
    """Return the greater of each lane's two."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)
