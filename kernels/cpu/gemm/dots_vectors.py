"""Define the micro-kernels of the bfloat16 matrix product on processors that multiply pairs of inputs (AVX512-BF16).

``vdpbf16ps`` adds to each lane the two products of a pair of inputs with a pair of weights, in float32; numbers too
small for the exponent count as 0. The order inside a pair is the processor's own, which is why all products of bfloat16
use this instruction where it is: a chain of it can not be had otherwise. As in the float32 products, the lanes are rows
of a panel where there are many, outputs where there are few.

Intel 64 and IA-32 Architectures Software Developer's Manual, "VDPBF16PS".
"""

from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import (
    VECTOR,
    accumulate,
    dispatch,
    in_register,
    load_as,
    part_of,
    pointer_to,
    prefetch,
    row_of,
    splat,
    store_as,
    store_vector,
    transposed,
    zeros,
)
from samebit.kernels.cpu.gemm.many_rows_vectors import dispatch_tile, halves_of, in_lines
from samebit.kernels.layout.grids import LANES

ROWS = (1, 2, 4, 8, 16)
"""Rows that a tile of few rows may cover."""


@cache
def available() -> bool:
    """Return whether Numba compiles for a processor that multiplies pairs."""
    features = cpu_target.target_context.codegen().magic_tuple()[-1].split(",")
    if "+avx512bf16" not in features:
        return False
    binding.initialize_native_asmparser()
    return True


def dot(builder: Any, pairs: Any, others: Any, total: Any) -> Any:
    """Return the total plus the products of both elements of each pair."""
    function_type = ir.FunctionType(total.type, [total.type] * 3)
    assembly = ir.InlineAsm(function_type, "vdpbf16ps $2, $1, $0", "=v,v,v,0")
    return builder.call(assembly, [pairs, others, total])


def _load_pairs(builder: Any, pointer: Any) -> Any:
    """Load sixteen pairs, as bits in float32."""
    return builder.load(builder.bitcast(pointer, VECTOR.as_pointer()), align=2)


def _splat_pair(builder: Any, pointer: Any, kind: Any = VECTOR) -> Any:
    """Load a pair into every lane, as bits in float32."""
    return splat(builder, builder.load(builder.bitcast(pointer, ir.FloatType().as_pointer()), align=2), kind)


@intrinsic
def add_pair_products(
    typingctx: Any,
    lanes: Any,
    outputs: Any,
    panel: Any,
    panel_at: Any,
    width: Any,
    weights: Any,
    weights_at: Any,
    weights_stride: Any,
    ahead: Any,
    pairs: Any,
    sums: Any,
    sums_at: Any,
) -> Any:
    """Go on with the chains ``sums[j, lane]`` by ``pairs`` of ``weight[j]`` and row ``lane`` of a panel.

    ``lanes``, ``outputs`` (j) and ``ahead`` are those of `many_rows_vectors.multiply_tile`. ``panel[p, row]`` is pair p
    of a row; rows of it and of the sums are ``width`` apart, rows of the weight ``weights_stride``.
    """
    i64 = types.int64
    signature = types.void(i64, i64, panel, i64, i64, weights, i64, i64, i64, i64, sums, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, wide, panel_array, panel_from, step, weight, *place, n, sums_array, sums_from = args
        weight_from, weight_step, further = place
        index = many.type

        def emit(lane_count: int, output_count: int) -> None:
            rows = [
                in_register(builder, row_of(context, builder, weights, weight, weight_from, weight_step, j))
                for j in range(output_count)
            ]
            start = pointer_to(context, builder, panel, panel_array, panel_from)
            vectors = halves_of(lane_count)
            targets = [
                (builder.gep(row_of(context, builder, sums, sums_array, sums_from, step, j), [index(lane)]), kind)
                for j in range(output_count)
                for lane, kind in vectors
            ]

            def add(pair: Any, totals: list[Any]) -> list[Any]:
                here = builder.gep(start, [builder.mul(pair, step)])
                loaded = [load_as(builder, builder.gep(here, [index(lane)]), kind) for lane, kind in vectors]
                first = builder.shl(pair, index(1))
                factors = [_splat_pair(builder, builder.gep(row, [first]), vectors[0][1]) for row in rows]
                both = [(part_of(builder, factor, vector.type), vector) for factor in factors for vector in loaded]
                return [dot(builder, *each, total) for each, total in zip(both, totals, strict=True)]

            def fetch_line(pair: Any) -> None:
                for row in rows:
                    prefetch(builder, builder.gep(row, [builder.add(builder.shl(pair, index(1)), further)]))

            so_far = [load_as(builder, target, kind) for target, kind in targets]
            totals = in_lines(builder, n, LANES, so_far, fetch_line, add)
            for (target, _), total in zip(targets, totals, strict=True):
                store_as(builder, total, target)

        dispatch_tile(builder, many, wide, emit)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def dot_few(
    typingctx: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    outputs: Any,
    weights: Any,
    weights_at: Any,
    inputs: Any,
    sums: Any,
) -> Any:
    """Write to ``sums[row, lane]`` the chain over the inputs of ``weight[lane]`` and ``x[row]``, pair after pair.

    ``rows`` is one of `ROWS`. Rows of x and of the weight, both bfloat16, are ``x_stride`` and ``inputs`` apart; those
    of x end with zeros after the last input. Of the weight's rows ``outputs`` are there (1 to 16): the last stands for
    those beyond, whose sums mean nothing.
    """
    i64 = types.int64
    signature = types.void(i64, x, i64, i64, weights, i64, i64, sums)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, x_array, x_step, there, weight, weight_from, n, sums_array = args
        index = many.type
        last = builder.sub(there, index(1))
        squares = builder.lshr(n, index(5))
        done = builder.lshr(builder.and_(n, index(-2 * LANES)), index(1))

        def weight_row(lane: int) -> Any:
            row = builder.select(builder.icmp_signed("<", index(lane), there), index(lane), last)
            return pointer_to(context, builder, weights, weight, builder.add(weight_from, builder.mul(n, row)))

        weight_rows = [weight_row(lane) for lane in range(LANES)]

        def gathered(words: list[Any]) -> Any:
            vector: Any = ir.Constant(VECTOR, ir.Undefined)
            for lane, word in enumerate(words):
                vector = builder.insert_element(vector, builder.bitcast(word, ir.FloatType()), ir.IntType(32)(lane))
            return vector

        def emit(row_count: int) -> None:
            x_rows = [pointer_to(context, builder, x, x_array, builder.mul(x_step, index(r))) for r in range(row_count)]

            def add(pair: Any, column: Any, chains: list[Any]) -> list[Any]:
                first = builder.shl(pair, index(1))
                factors = [_splat_pair(builder, builder.gep(row, [first])) for row in x_rows]
                return [dot(builder, column, factor, chain) for factor, chain in zip(factors, chains, strict=True)]

            def square(step: Any, chains: list[Any]) -> list[Any]:
                pair = builder.shl(step, index(4))
                first = builder.shl(step, index(5))
                columns = transposed(builder, [_load_pairs(builder, builder.gep(row, [first])) for row in weight_rows])
                builder.fence("seq_cst", "singlethread")  # no instruction: x is read at its use, not early and spilled
                for p, column in enumerate(columns):
                    chains = add(builder.add(pair, index(p)), column, chains)
                return chains

            def single(step: Any, chains: list[Any]) -> list[Any]:
                pair = builder.add(done, step)
                first = builder.shl(pair, index(1))
                words = [
                    builder.load(builder.bitcast(builder.gep(row, [first]), ir.IntType(32).as_pointer()), align=2)
                    for row in weight_rows
                ]
                return add(pair, gathered(words), chains)

            def odd(_: Any, chains: list[Any]) -> list[Any]:
                at = builder.sub(n, index(1))
                words = [builder.zext(builder.load(builder.gep(row, [at])), ir.IntType(32)) for row in weight_rows]
                return add(builder.lshr(n, index(1)), gathered(words), chains)

            chains = accumulate(builder, squares, [zeros()] * row_count, square)
            chains = accumulate(builder, builder.sub(builder.lshr(n, index(1)), done), chains, single)
            chains = accumulate(builder, builder.and_(n, index(1)), chains, odd)
            for row, chain in enumerate(chains):
                store_vector(builder, chain, pointer_to(context, builder, sums, sums_array, index(row * LANES)))

        dispatch(builder, [(many, ROWS)], emit)
        return context.get_dummy_value()

    return signature, generate
