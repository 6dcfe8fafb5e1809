"""Define the micro-kernel of the matrix product for a few rows of ``x``, as LLVM vectors (why: see `base.small_tiles`).

The lanes of a vector are outputs: squares of the weight are transposed in registers and used at once by all rows, so
that the time is that of reading the weight. With the lanes of `many_rows_vectors`, which are rows, most would be idle.
"""

from typing import Any

from numba import types
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import (
    accumulate,
    dispatch,
    fma,
    gather_elements,
    load_columns,
    load_vector,
    pointer_to,
    splat_element,
    store_vector,
    zeros,
)
from samebit.kernels.layout.grids import LANES

ROWS = (1, 2, 4, 8)
"""Counts of rows that a tile may cover."""

_DEPTH = LANES // 2
"""The inputs that are transposed at a time."""


@intrinsic
def multiply_few(
    typingctx: Any,
    rows: Any,
    x: Any,
    x_at: Any,
    x_stride: Any,
    outputs: Any,
    weights: Any,
    weights_at: Any,
    weights_stride: Any,
    count: Any,
    sums: Any,
) -> Any:
    """Add to ``sums[row, lane]`` the chain over i < count of ``weight[lane, i] * x[row, i]``, from 0.

    ``rows`` is one of `ROWS`, ``x`` float32, the weight float32 or the uint16 bits of bfloat16. Of the weight's rows
    ``outputs`` are there (1 to 16): the last stands for those beyond, whose sums mean nothing.
    """
    i64 = types.int64
    signature = types.void(i64, x, i64, i64, i64, weights, i64, i64, i64, sums)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, x_array, x_from, x_step, there, weight, weight_from, weight_step, n, sums_array = args
        index = many.type
        last = builder.sub(there, index(1))
        done = builder.and_(n, index(-_DEPTH))

        def weight_row(lane: int) -> Any:
            row = builder.select(builder.icmp_signed("<", index(lane), there), index(lane), last)
            at = builder.add(weight_from, builder.mul(weight_step, row))
            return pointer_to(context, builder, weights, weight, at)

        weight_rows = [weight_row(lane) for lane in range(LANES)]

        def emit(row_count: int) -> None:
            x_rows = [
                pointer_to(context, builder, x, x_array, builder.add(x_from, builder.mul(x_step, index(r))))
                for r in range(row_count)
            ]

            def add(i: Any, column: Any, chains: list[Any]) -> list[Any]:
                factors = [splat_element(builder, builder.gep(row, [i]), types.float32) for row in x_rows]
                return [fma(builder, column, factor, chain) for factor, chain in zip(factors, chains, strict=True)]

            def square(step: Any, chains: list[Any]) -> list[Any]:
                i = builder.mul(step, index(_DEPTH))
                columns = load_columns(builder, [builder.gep(row, [i]) for row in weight_rows], weights.dtype)
                builder.fence("seq_cst", "singlethread")  # no instruction: x is read at its use, not early and spilled
                for k, column in enumerate(columns):
                    chains = add(builder.add(i, index(k)), column, chains)
                return chains

            def single(step: Any, chains: list[Any]) -> list[Any]:
                i = builder.add(done, step)
                pointers = [builder.gep(row, [i]) for row in weight_rows]
                return add(i, gather_elements(builder, pointers, weights.dtype), chains)

            chains = accumulate(builder, builder.sdiv(n, index(_DEPTH)), [zeros()] * row_count, square)
            chains = accumulate(builder, builder.sub(n, done), chains, single)
            for row, chain in enumerate(chains):
                target = pointer_to(context, builder, sums, sums_array, index(row * LANES))
                so_far = load_vector(builder, target, types.float32)
                store_vector(builder, builder.fadd(so_far, chain), target)

        dispatch(builder, [(many, ROWS)], emit)
        return context.get_dummy_value()

    return signature, generate
