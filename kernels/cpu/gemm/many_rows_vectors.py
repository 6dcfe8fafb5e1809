"""Define the micro-kernels of the matrix product, as LLVM vectors (why: see `base.small_tiles`).

A panel holds rows of ``x`` transposed, ``panel[k, row]``, so that the lanes of a vector are rows and a weight is
read where it lies, one scalar for all rows of the panel.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import (
    HALF_VECTOR,
    REGISTERS,
    VECTOR,
    accumulate,
    dispatch,
    fma,
    half_of,
    in_register,
    load_as,
    load_columns,
    load_vector,
    part_of,
    pointer_to,
    prefetch,
    row_of,
    splat_element,
    splat_pair,
    store_as,
    store_vector,
    transposed,
)
from samebit.kernels.layout.grids import LANES

SUM_BLOCK = 128
"""The inputs that are summed in one chain. A constant of the arithmetic: changing it changes bits."""

_PROCESSOR = cpu_target.target_context.codegen().magic_tuple()[1]

VECTORS = REGISTERS // 8
"""Count of vectors of rows that a tile covers: as many as leave its accumulators in registers."""

IN_STRIPS = VECTORS == 1
"""A panel holds the rows of a tile by themselves, and bfloat16 weights are widened once for all tiles of a panel."""

OUTPUTS = (6, 2, 1)
"""Counts of outputs that a tile may cover."""

HALF = LANES // 2
"""Rows of a panel fill half vectors."""

HALVES_ARE_FASTER = VECTORS == 1 or _PROCESSOR == "znver4"
"""The processor multiplies 256 bits at a time, so that a half vector takes half of the time of a whole one."""

NARROW = 2 * LANES if VECTORS > 1 else HALF
"""The most lanes of a tile that may cover more outputs, whose chains hide the latency of their products."""

MANY_OUTPUTS = 8
"""Count of outputs of such a tile."""


def widths() -> tuple[int, ...]:
    """Return how many lanes a tile may cover: half vectors while few, whole ones then."""
    whole = range(2 * LANES, VECTORS * LANES + 1, LANES)
    return (HALF, LANES, *([LANES + HALF, *whole] if VECTORS > 1 else []))


def halves_of(lanes: int) -> list[tuple[int, Any]]:
    """Return the vectors that cover these lanes: where each begins, and its type.

    Where halves are faster, they cover lanes that are no whole vectors alone: two kinds side by side took 1.4 times as
    long there.
    """
    if lanes % LANES and HALVES_ARE_FASTER:
        return [(lane, HALF_VECTOR) for lane in range(0, lanes, HALF)]
    whole = [(lane, VECTOR) for lane in range(0, lanes // LANES * LANES, LANES)]
    return [*whole, (lanes - HALF, HALF_VECTOR)] if lanes % LANES else whole


def dispatch_tile(builder: Any, lanes: Any, outputs: Any, emit: Callable[[int, int], None]) -> None:
    """Emit all tiles, and branch to the one asked for."""
    for width in widths():
        with builder.if_then(builder.icmp_signed("==", lanes, lanes.type(width))):
            allowed = (MANY_OUTPUTS, *OUTPUTS) if width <= NARROW else OUTPUTS
            dispatch(builder, [(outputs, allowed)], partial(emit, width))


def in_lines(
    builder: Any, count: Any, line: int, totals: list[Any], fetch_line: Callable[[Any], None], step: Any
) -> list[Any]:
    """Emit ``for i in range(count): totals = step(i, totals)``, and ``fetch_line(i)`` at each multiple of ``line``."""
    index = count.type
    whole = builder.and_(count, index(-line))

    def one_line(number: Any, carried: list[Any]) -> list[Any]:
        first = builder.mul(number, index(line))
        fetch_line(first)
        return accumulate(builder, index(line), carried, lambda i, sums: step(builder.add(first, i), sums))

    totals = accumulate(builder, builder.udiv(count, index(line)), totals, one_line)
    return accumulate(builder, builder.sub(count, whole), totals, lambda i, sums: step(builder.add(whole, i), sums))


@intrinsic
def multiply_tile(
    typingctx: Any,
    lanes: Any,
    outputs: Any,
    panel: Any,
    panel_at: Any,
    width: Any,
    weights: Any,
    weights_at: Any,
    weights_stride: Any,
    weights_step: Any,
    ahead: Any,
    count: Any,
    sums: Any,
    sums_at: Any,
    sums_width: Any,
) -> Any:
    """Add to ``sums[j, lane]`` the sum over i < count of ``weight[j, i] * panel[i, lane]``, a chain from 0 each
    `SUM_BLOCK` of them.

    ``lanes`` is one of `widths`, ``outputs`` (j) one of `OUTPUTS`, or `MANY_OUTPUTS` up to `NARROW` lanes; rows of the
    panel are ``width`` apart, those of the sums ``sums_width``, rows of the weight ``weights_stride``, its inputs
    ``weights_step``. The weight is float32, or the uint16 bits of bfloat16, whose inputs lie side by side. On the way
    what lies ``ahead`` elements after it is asked for.
    """
    i64 = types.int64
    signature = types.void(i64, i64, panel, i64, i64, weights, i64, i64, i64, i64, i64, sums, i64, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, wide, panel_array, panel_from, step, weight, *place, n, sums_array, sums_from, sums_step = args
        weight_from, weight_stride, weight_step, further = place
        index = many.type
        paired = weights.dtype != types.float32

        def chains_of(rows: list[Any], start: Any, count: Any, vectors: list[tuple[int, Any]]) -> list[Any]:
            """Return the chains of a block whose weights begin in ``rows`` and whose part of the panel at ``start``."""
            kind = vectors[0][1]

            def add(i: Any, factors: list[Any], totals: list[Any]) -> list[Any]:
                here = builder.gep(start, [builder.mul(i, step)])
                loaded = [load_as(builder, builder.gep(here, [index(lane)]), each) for lane, each in vectors]
                pairs = [(part_of(builder, factor, vector.type), vector) for factor in factors for vector in loaded]
                return [fma(builder, *pair, total) for pair, total in zip(pairs, totals, strict=True)]

            def one(at: Any, totals: list[Any]) -> list[Any]:
                here = builder.mul(at, weight_step)
                factors = [splat_element(builder, builder.gep(row, [here]), weights.dtype, kind) for row in rows]
                return add(at, factors, totals)

            def two(pair: Any, totals: list[Any]) -> list[Any]:
                i = builder.shl(pair, index(1))
                factors = [splat_pair(builder, builder.gep(row, [i]), kind) for row in rows]
                totals = add(i, [low for low, _ in factors], totals)
                return add(builder.add(i, index(1)), [high for _, high in factors], totals)

            def fetch_line(i: Any) -> None:
                first = builder.shl(i, index(1)) if paired else builder.mul(i, weight_step)
                for row in rows:
                    prefetch(builder, builder.gep(row, [builder.add(first, further)]))

            chains = [ir.Constant(each, [0.0] * each.count) for _ in rows for _, each in vectors]
            if not paired:
                return in_lines(builder, count, LANES, chains, fetch_line, one)
            chains = in_lines(builder, builder.lshr(count, index(1)), LANES, chains, fetch_line, two)
            done = builder.and_(count, index(-2))
            odd = builder.sub(count, done)
            return accumulate(builder, odd, chains, lambda i, totals: one(builder.add(done, i), totals))

        def emit(lane_count: int, output_count: int) -> None:
            begin = pointer_to(context, builder, panel, panel_array, panel_from)
            of_outputs = [
                row_of(context, builder, weights, weight, weight_from, weight_stride, j) for j in range(output_count)
            ]
            vectors = halves_of(lane_count)
            targets = [
                builder.gep(row_of(context, builder, sums, sums_array, sums_from, sums_step, j), [index(lane)])
                for j in range(output_count)
                for lane, _ in vectors
            ]
            with cgutils.for_range_slice(builder, index(0), n, index(SUM_BLOCK), intp=index) as (at, _):
                left = builder.sub(n, at)
                count = builder.select(builder.icmp_signed("<", left, index(SUM_BLOCK)), left, index(SUM_BLOCK))
                start = builder.gep(begin, [builder.mul(at, step)])
                along = builder.mul(at, weight_step)
                rows = [in_register(builder, builder.gep(row, [along])) for row in of_outputs]
                for target, chain in zip(targets, chains_of(rows, start, count, vectors), strict=True):
                    store_as(builder, builder.fadd(load_as(builder, target, chain.type), chain), target)

        dispatch_tile(builder, many, wide, emit)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def widen_outputs(
    typingctx: Any, weights: Any, weights_at: Any, weights_stride: Any, ahead: Any, outputs: Any, count: Any, room: Any
) -> Any:
    """Write ``room[j, i] = weight[j, i]`` in float32, rows of the room ``count`` apart.

    The arguments are those of `multiply_tile`.
    """
    i64 = types.int64
    signature = types.void(weights, i64, i64, i64, i64, i64, room)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight, first, step, further, many, n, target = args
        index = n.type
        whole = builder.and_(n, index(-LANES))

        with cgutils.for_range(builder, many, intp=index) as row:
            start = pointer_to(context, builder, weights, weight, builder.add(first, builder.mul(step, row.index)))
            end = pointer_to(context, builder, room, target, builder.mul(n, row.index))
            with cgutils.for_range_slice(builder, index(0), whole, index(LANES), intp=index) as (i, _):
                here = builder.gep(start, [i])
                prefetch(builder, builder.gep(here, [further]))
                store_vector(builder, load_vector(builder, here, weights.dtype), builder.gep(end, [i]))
            with cgutils.for_range_slice(builder, whole, n, index(1), intp=index) as (i, _):
                lanes = splat_element(builder, builder.gep(start, [i]), weights.dtype, HALF_VECTOR)
                builder.store(builder.extract_element(lanes, ir.IntType(32)(0)), builder.gep(end, [i]))
        return context.get_dummy_value()

    return signature, generate


_HALVES = ir.VectorType(ir.IntType(16), LANES)


def side_by_side(builder: Any, row: Any, other: Any) -> Any:
    """Load sixteen bfloat16 (uint16 bits) of each of two rows: a column's two are a lane, as bits in float32."""
    both = [builder.load(builder.bitcast(pointer, _HALVES.as_pointer()), align=2) for pointer in (row, other)]
    lanes = [column + LANES * which for column in range(LANES) for which in range(2)]
    mixed = builder.shuffle_vector(*both, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), lanes))
    return builder.bitcast(mixed, VECTOR)


@intrinsic
def transpose_tile(
    typingctx: Any, source: Any, source_at: Any, source_stride: Any, target: Any, target_at: Any, target_stride: Any
) -> Any:
    """Write ``target[j, i] = source[i, j]`` of sixteen rows and columns; rows are a stride apart on either side.

    Either side is float32, or bfloat16 as its uint16 bits, which stay as they are where both sides are.
    """
    i64 = types.int64
    signature = types.void(source, i64, i64, target, i64, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from_array, first, step, to_array, target_first, target_step = args
        index = first.type

        rows = [row_of(context, builder, source, from_array, first, step, i) for i in range(LANES)]
        if source.dtype == target.dtype != types.float32:
            pairs = [side_by_side(builder, *rows[i : i + 2]) for i in range(0, LANES, 2)]
            store_columns(builder, pairs, pointer_to(context, builder, target, to_array, target_first), target_step)
            return context.get_dummy_value()
        right = [builder.gep(row, [index(LANES // 2)]) for row in rows]
        columns = [column for half in (rows, right) for column in load_columns(builder, half, source.dtype)]
        for i, column in enumerate(columns):
            store_vector(
                builder, column, row_of(context, builder, target, to_array, target_first, target_step, i), target.dtype
            )
        return context.get_dummy_value()

    return signature, generate


def places_of(builder: Any, first: Any, stride: Any, there: Any) -> list[Any]:
    """Return where eight rows begin, of which ``there`` are there: the last stands for those beyond."""
    index, last = there.type, builder.sub(there, there.type(1))
    rows = [builder.select(builder.icmp_signed("<", index(i), there), index(i), last) for i in range(HALF)]
    return [builder.add(first, builder.mul(stride, row)) for row in rows]


def store_columns(builder: Any, rows: list[Any], first: Any, stride: Any) -> None:
    """Store the sixteen columns of eight vectors, from this place on and so far apart."""
    for i, pair in enumerate(transposed(builder, rows)):
        for half in range(2):
            place = builder.mul(stride, stride.type(i + half * HALF))
            store_as(builder, half_of(builder, pair, half), builder.gep(first, [place]))


@intrinsic
def transpose_strip(
    typingctx: Any, source: Any, source_at: Any, source_stride: Any, there: Any, target: Any, target_at: Any,
    target_stride: Any,
) -> Any:  # fmt: skip
    """Write ``target[j, i] = source[i, j]`` of eight rows and sixteen columns, in float32.

    Of the rows ``there`` are there (1 to 8): the last stands for those beyond.
    """
    i64 = types.int64
    signature = types.void(source, i64, i64, i64, target, i64, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from_array, first, step, rows, to_array, target_first, target_step = args
        loaded = [
            load_vector(builder, pointer_to(context, builder, source, from_array, place), source.dtype)
            for place in places_of(builder, first, step, rows)
        ]
        store_columns(builder, loaded, pointer_to(context, builder, target, to_array, target_first), target_step)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def write_strip(
    typingctx: Any, source: Any, source_at: Any, source_stride: Any, target: Any, target_at: Any, target_stride: Any,
    there: Any,
) -> Any:  # fmt: skip
    """Write ``target[j, i] = source[i, j]`` of sixteen rows, and of ``there`` columns (1 to 8)."""
    i64 = types.int64
    signature = types.void(source, i64, i64, target, i64, i64, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from_array, first, step, to_array, target_first, target_step, columns = args
        rows = [row_of(context, builder, source, from_array, first, step, i) for i in range(LANES)]
        for i, column in enumerate(load_columns(builder, rows, source.dtype)):
            with builder.if_then(builder.icmp_signed("<", columns.type(i), columns)):
                to = row_of(context, builder, target, to_array, target_first, target_step, i)
                store_vector(builder, column, to, target.dtype)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def fetch(typingctx: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of ``array[at]``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, pointer_to(context, builder, array, *args))
        return context.get_dummy_value()

    return types.void(array, types.int64), generate
