"""Define the micro-kernel that adds products of low rank to rows, as LLVM vectors (why: see `base.small_tiles`).

A matrix ``[N, r]`` is given turned over, so that the lanes of a vector are outputs: sums stay in registers until they
are scaled and added where the result lies. N outputs of a layer, r the rank.
"""

from typing import Any

from numba import types
from numba.extending import intrinsic

from samebit.kernels.cpu.base.rows import unpacked
from samebit.kernels.cpu.base.vectors import (
    accumulate,
    dispatch,
    fma,
    load_vector,
    row_of,
    splat,
    splat_element,
    store_vector,
    zeros,
)
from samebit.kernels.cpu.gemm.many_rows_vectors import OUTPUTS, SUM_BLOCK, VECTORS
from samebit.kernels.layout.grids import LANES

ROWS = OUTPUTS
"""Counts of rows that a tile may cover."""


@intrinsic
def add_term_tile(
    typingctx: Any, vectors: Any, rows: Any, turned: Any, lows: Any, count: Any, scale: Any, out: Any
) -> Any:
    """Add ``scale * sum over i < count of lows[j, i] * turned[i, 16 v + lane]`` to ``out[j, 16 v + lane]``, rounded.

    ``vectors`` (v) is 1 to `VECTORS`, ``rows`` (j) one of `ROWS`. The sum is that of `many_rows`, scaled and then added
    in float32. ``turned``, ``lows`` and ``out`` are `Rows`, the first two float32, ``out`` that or the uint16 bits of
    bfloat16.
    """
    i64 = types.int64
    signature = types.void(i64, i64, turned, lows, i64, types.float32, out)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide, many, turned_given, lows_given, n, scale, out_given = args
        index = n.type
        panel = unpacked(context, builder, turned, turned_given)
        weights = unpacked(context, builder, lows, lows_given)
        target = unpacked(context, builder, out, out_given)
        further = builder.sdiv(builder.sub(n, index(1)), index(SUM_BLOCK))

        def emit(vector_count: int, row_count: int) -> None:
            start = row_of(context, builder, *panel, 0)
            low_rows = [row_of(context, builder, *weights, j) for j in range(row_count)]
            out_rows = [row_of(context, builder, *target, j) for j in range(row_count)]
            lanes = [index(LANES * v) for v in range(vector_count)]

            def chains(first: Any) -> list[Any]:
                """Sum a block of inputs."""
                left = builder.sub(n, first)
                depth = builder.select(builder.icmp_signed("<", left, index(SUM_BLOCK)), left, index(SUM_BLOCK))

                def add(i: Any, totals: list[Any]) -> list[Any]:
                    at = builder.add(first, i)
                    here = builder.gep(start, [builder.mul(at, panel[3])])
                    loaded = [load_vector(builder, builder.gep(here, [lane]), types.float32) for lane in lanes]
                    factors = [splat_element(builder, builder.gep(row, [at]), types.float32) for row in low_rows]
                    pairs = [(vector, factor) for factor in factors for vector in loaded]
                    return [fma(builder, *pair, total) for pair, total in zip(pairs, totals, strict=True)]

                return accumulate(builder, depth, [zeros()] * (row_count * vector_count), add)

            def one_more(block: Any, totals: list[Any]) -> list[Any]:
                first = builder.mul(builder.add(block, index(1)), index(SUM_BLOCK))
                return [builder.fadd(total, chain) for total, chain in zip(totals, chains(first), strict=True)]

            totals = [builder.fadd(zeros(), chain) for chain in chains(index(0))]
            totals = accumulate(builder, further, totals, one_more)
            targets = [builder.gep(row, [lane]) for row in out_rows for lane in lanes]
            for pointer, total in zip(targets, totals, strict=True):
                scaled = builder.fmul(total, splat(builder, scale))
                store_vector(
                    builder, builder.fadd(load_vector(builder, pointer, out.types[0].dtype), scaled), pointer,
                    out.types[0].dtype,
                )  # fmt: skip

        dispatch(builder, [(wide, tuple(range(1, VECTORS + 1))), (many, ROWS)], emit)
        return context.get_dummy_value()

    return signature, generate
