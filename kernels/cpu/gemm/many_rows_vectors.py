"""Define the micro-kernels of the matrix product, as LLVM vectors (why: see `base.small_tiles`).

A panel holds rows of ``x`` transposed, ``panel[k, row]``, so that the lanes of a vector are rows and a weight is
read where it lies, one scalar for all rows of the panel.
"""

from typing import Any

from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import (
    accumulate,
    dispatch,
    fma,
    load_columns,
    load_vector,
    pointer_to,
    prefetch,
    row_of,
    splat_element,
    splat_pair,
    store_vector,
    zeros,
)
from samebit.kernels.layout.grids import LANES

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[-1].split(",")

VECTORS = 4 if "+avx512f" in _FEATURES else 1
"""Count of vectors of rows that a tile covers: as many as leave its accumulators in registers."""

OUTPUTS = (6, 2, 1)
"""Counts of outputs that a tile may cover."""


@intrinsic
def multiply_tile(
    typingctx: Any,
    vectors: Any,
    outputs: Any,
    panel: Any,
    panel_at: Any,
    width: Any,
    weights: Any,
    weights_at: Any,
    weights_stride: Any,
    weights_step: Any,
    count: Any,
    sums: Any,
    sums_at: Any,
) -> Any:
    """Add to ``sums[j, 16 v + lane]`` the chain over i < count of ``weight[j, i] * panel[i, 16 v + lane]``, from 0.

    ``vectors`` (v) is 1 to `VECTORS`, ``outputs`` (j) one of `OUTPUTS`; rows of the panel and of the sums are
    ``width`` apart, rows of the weight ``weights_stride``, its inputs ``weights_step``. The weight is float32, or the
    uint16 bits of bfloat16, whose inputs lie side by side.
    """
    i64 = types.int64
    signature = types.void(i64, i64, panel, i64, i64, weights, i64, i64, i64, i64, sums, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, wide, panel_array, panel_from, step, weight, *place, n, sums_array, sums_from = args
        weight_from, weight_stride, weight_step = place
        index = many.type

        def emit(vector_count: int, output_count: int) -> None:
            rows = [
                row_of(context, builder, weights, weight, weight_from, weight_stride, j) for j in range(output_count)
            ]
            start = pointer_to(context, builder, panel, panel_array, panel_from)
            lanes = [index(LANES * v) for v in range(vector_count)]
            targets = [
                builder.gep(row_of(context, builder, sums, sums_array, sums_from, step, j), [lane])
                for j in range(output_count)
                for lane in lanes
            ]

            def add(i: Any, factors: list[Any], totals: list[Any]) -> list[Any]:
                here = builder.gep(start, [builder.mul(i, step)])
                loaded = [load_vector(builder, builder.gep(here, [lane]), types.float32) for lane in lanes]
                pairs = [(factor, vector) for factor in factors for vector in loaded]
                return [fma(builder, *pair, total) for pair, total in zip(pairs, totals, strict=True)]

            def one(i: Any, totals: list[Any]) -> list[Any]:
                at = builder.add(done, i)
                here = builder.mul(at, weight_step)
                factors = [splat_element(builder, builder.gep(row, [here]), weights.dtype) for row in rows]
                return add(at, factors, totals)

            def two(pair: Any, totals: list[Any]) -> list[Any]:
                i = builder.shl(pair, index(1))
                factors = [splat_pair(builder, builder.gep(row, [i])) for row in rows]
                totals = add(i, [low for low, _ in factors], totals)
                return add(builder.add(i, index(1)), [high for _, high in factors], totals)

            chains, done = [zeros() for _ in targets], index(0)
            if weights.dtype != types.float32:
                chains, done = accumulate(builder, builder.lshr(n, index(1)), chains, two), builder.and_(n, index(-2))
            for target, chain in zip(targets, accumulate(builder, builder.sub(n, done), chains, one), strict=True):
                so_far = load_vector(builder, target, types.float32)
                store_vector(builder, builder.fadd(so_far, chain), target)

        dispatch(builder, [(many, tuple(range(1, VECTORS + 1))), (wide, OUTPUTS)], emit)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def transpose_tile(
    typingctx: Any, source: Any, source_at: Any, source_stride: Any, target: Any, target_at: Any, target_stride: Any
) -> Any:
    """Write ``target[j, i] = source[i, j]`` of sixteen rows and columns; rows are a stride apart on either side.

    Either side is float32, or bfloat16 as its uint16 bits.
    """
    i64 = types.int64
    signature = types.void(source, i64, i64, target, i64, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from_array, first, step, to_array, target_first, target_step = args
        index = first.type

        rows = [row_of(context, builder, source, from_array, first, step, i) for i in range(LANES)]
        right = [builder.gep(row, [index(LANES // 2)]) for row in rows]
        columns = [column for half in (rows, right) for column in load_columns(builder, half, source.dtype)]
        for i, column in enumerate(columns):
            store_vector(
                builder, column, row_of(context, builder, target, to_array, target_first, target_step, i), target.dtype
            )
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def fetch(typingctx: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of ``array[at]``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, pointer_to(context, builder, array, *args))
        return context.get_dummy_value()

    return types.void(array, types.int64), generate
