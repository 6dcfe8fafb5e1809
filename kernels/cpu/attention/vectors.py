"""Define the micro-kernels of attention over one chunk of tokens, as LLVM vectors (why: see `base.small_tiles`).

A chunk is stored in pieces of sixteen tokens that may lie anywhere: piece c of the keys is ``[D, 16]`` from element
``keys[c]`` on, rows ``key_stride`` apart; piece c of the values is ``[16, D]`` from element ``values[c]`` on.
D is the head size.
With ``fetch`` a kernel also asks for the cache lines at the same places of the ``coming`` chunk.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from samebit.kernels.cpu.base.rows import unpacked
from samebit.kernels.cpu.base.vectors import (
    REGISTERS,
    VECTOR,
    accumulate,
    dispatch,
    exponential,
    fma,
    load_vector,
    pointer_to,
    prefetch,
    row_of,
    splat,
    store_vector,
    zeros,
)
from samebit.kernels.layout.grids import LANES

_LANE_NUMBERS = ir.VectorType(ir.IntType(32), LANES)
_ROWS = (1, 2, 4)
_PIECES = (1, 2, 3, 4)
_COLUMNS = (1, 2, 4)

_SUMS = REGISTERS // 2
"""Vectors of sums that are under way at once: as many as leave what is added to them in registers."""


def _fitting(rows: int, vectors: int) -> list[range]:
    """Divide the vectors of a tile of this count of rows into those that are computed at once."""
    most = _SUMS // rows
    return [range(first, min(first + most, vectors)) for first in range(0, vectors, most)]


@intrinsic
def score_chunk(
    typingctx: Any, rows: Any, pieces: Any, fetch: Any, query: Any, source: Any, keys: Any, coming: Any,
    key_stride: Any, s: Any,
) -> Any:  # fmt: skip
    """Compute ``s[r, 16 c + lane] = chain over d < D of query[r, d] * key[16 c + lane, d]``, from 0.

    ``rows`` is 1, 2 or 4, ``pieces`` (c) 1 to 4. ``query`` and ``s`` are `Rows`, those of ``query`` D apart.
    """
    i64 = types.int64
    signature = types.void(i64, i64, types.boolean, query, source, keys, coming, i64, s)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, wide, fetching, query_given, pages, places, next_places, step, s_given = args
        index = many.type
        queries, scores = unpacked(context, builder, query, query_given), unpacked(context, builder, s, s_given)
        depth = queries[-1]

        def piece_at(table_type: Any, table: Any, piece: int) -> Any:
            offset = builder.load(pointer_to(context, builder, table_type, table, index(piece)))
            return pointer_to(context, builder, source, pages, offset)

        def emit(row_count: int, piece_count: int, asking: int) -> None:
            for some in _fitting(row_count, piece_count):
                emit_some(row_count, some, asking)

        def emit_some(row_count: int, some: range, asking: int) -> None:
            here = [piece_at(keys, places, c) for c in some]
            ahead = [piece_at(coming, next_places, c) for c in some if asking]
            query_rows = [row_of(context, builder, *queries, r) for r in range(row_count)]

            def body(d: Any, sums: list[Any]) -> list[Any]:
                moved = builder.mul(d, step)
                loaded = [load_vector(builder, builder.gep(piece, [moved]), source.dtype) for piece in here]
                for piece in ahead:
                    prefetch(builder, builder.gep(piece, [moved]))
                factors = [splat(builder, builder.load(builder.gep(row, [d]))) for row in query_rows]
                pairs = [(factor, piece) for factor in factors for piece in loaded]
                return [fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            found = accumulate(builder, depth, [zeros() for _ in range(row_count * len(some))], body)
            for r in range(row_count):
                row = row_of(context, builder, *scores, r)
                for i, c in enumerate(some):
                    store_vector(builder, found[r * len(some) + i], builder.gep(row, [index(LANES * c)]))

        dispatch(builder, [(many, _ROWS), (wide, _PIECES), (fetching, (0, 1))], emit)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def add_values(
    typingctx: Any, rows: Any, columns: Any, fetch: Any, s: Any, lo: Any, hi: Any, source: Any, values: Any,
    coming: Any, column: Any, acc: Any,
) -> Any:  # fmt: skip
    """Add to ``acc[r, 0 : 16 columns]`` the chain over lo <= j < hi of ``s[r, j] * value[j, column : ...]``.

    The chain starts at ``acc`` and ascends. ``rows`` is 1, 2 or 4, ``columns`` 1, 2 or 4. ``s`` and ``acc`` are
    `Rows`, those of ``acc`` D apart.
    """
    i64 = types.int64
    signature = types.void(i64, i64, types.boolean, s, i64, i64, source, values, coming, i64, acc)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        many, wide, fetching, s_given, begin, end, pages, places, next_places, first_column, acc_given = args
        index = many.type
        scores, sums_at = unpacked(context, builder, s, s_given), unpacked(context, builder, acc, acc_given)
        depth = sums_at[-1]

        def value_at(table_type: Any, table: Any, token: Any) -> Any:
            """Return where the value of this token of the chunk begins."""
            piece = builder.load(
                pointer_to(context, builder, table_type, table, builder.lshr(token, index(LANES.bit_length() - 1)))
            )
            inside = builder.mul(builder.and_(token, index(LANES - 1)), depth)
            offset = builder.add(builder.add(piece, inside), first_column)
            return pointer_to(context, builder, source, pages, offset)

        def emit(row_count: int, column_count: int, asking: int) -> None:
            for some in _fitting(row_count, column_count):
                emit_some(row_count, some, asking)

        def emit_some(row_count: int, some: range, asking: int) -> None:
            lanes = [index(LANES * c) for c in some]
            weights = [row_of(context, builder, *scores, r) for r in range(row_count)]
            targets = [
                builder.gep(row_of(context, builder, *sums_at, r), [lane]) for r in range(row_count) for lane in lanes
            ]

            def body(i: Any, sums: list[Any]) -> list[Any]:
                token = builder.add(begin, i)
                start = value_at(values, places, token)
                if asking:
                    ahead = value_at(coming, next_places, token)
                    for lane in lanes:
                        prefetch(builder, builder.gep(ahead, [lane]))
                loaded = [load_vector(builder, builder.gep(start, [lane]), source.dtype) for lane in lanes]
                factors = [splat(builder, builder.load(builder.gep(row, [token]))) for row in weights]
                pairs = [(factor, vector) for factor in factors for vector in loaded]
                return [fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            initial = [load_vector(builder, target, types.float32) for target in targets]
            count = builder.sub(end, begin)
            for target, total in zip(targets, accumulate(builder, count, initial, body), strict=True):
                store_vector(builder, total, target)

        dispatch(builder, [(many, _ROWS), (wide, _COLUMNS), (fetching, (0, 1))], emit)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def scale_scores(typingctx: Any, s: Any, at: Any, scale: Any, lo: Any, hi: Any) -> Any:
    """Multiply the chunk's scores ``s[at + lo : at + hi]`` by ``scale``; return the greatest.

    The others become the lowest number. A row that sees all of the chunk takes a shorter way to the same bits.
    """
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, first, factor, begin, end = args
        best = cgutils.alloca_once_value(builder, ir.Constant(ir.FloatType(), float("-inf")))

        def emit(whole: int) -> None:
            found = []
            for piece, pointer in enumerate(_pieces_from(context, builder, s, array, first)):
                scaled = builder.fmul(load_vector(builder, pointer, types.float32), splat(builder, factor))
                if not whole:
                    scaled = builder.select(_seen(builder, piece, begin, end), scaled, _every(float("-inf")))
                store_vector(builder, scaled, pointer)
                found.append(scaled)
            while len(found) > 1:
                found = [_greater(builder, a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
            builder.store(builder.extract_element(_greatest_lane(builder, found[0]), ir.IntType(32)(0)), best)

        dispatch(builder, [(_is_whole(builder, begin, end), (0, 1))], emit)
        return builder.load(best)

    return types.float32(s, i64, types.float32, i64, i64), generate


@intrinsic
def weigh_scores(typingctx: Any, s: Any, at: Any, peak: Any, lo: Any, hi: Any, sums: Any, sums_at: Any) -> Any:
    """Turn the chunk's scores ``s[at + lo : at + hi]`` into ``exp(s - peak)`` and the others into 0; add to the sums.

    Lane l of ``sums[sums_at : sums_at + LANES]`` goes on with the weights at l, 16 + l, 32 + l and 48 + l, in order.
    """
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, first, shift, begin, end, sums_array, sums_first = args
        target = pointer_to(context, builder, sums, sums_array, sums_first)

        def emit(whole: int) -> None:
            total = load_vector(builder, target, types.float32)
            for piece, pointer in enumerate(_pieces_from(context, builder, s, array, first)):
                score = load_vector(builder, pointer, types.float32)
                weight = exponential(builder, builder.fsub(score, splat(builder, shift)))
                if not whole:
                    weight = builder.select(_seen(builder, piece, begin, end), weight, zeros())
                store_vector(builder, weight, pointer)
                total = builder.fadd(total, weight)
            store_vector(builder, total, target)

        dispatch(builder, [(_is_whole(builder, begin, end), (0, 1))], emit)
        return context.get_dummy_value()

    return types.void(s, i64, types.float32, i64, i64, sums, i64), generate


def _pieces_from(context: Any, builder: Any, array_type: Any, array: Any, first: Any) -> list[Any]:
    """Return where the vectors of a chunk's scores begin."""
    start = pointer_to(context, builder, array_type, array, first)
    return [builder.gep(start, [first.type(LANES * piece)]) for piece in range(_PIECES[-1])]


def _is_whole(builder: Any, begin: Any, end: Any) -> Any:
    """Return 1 where all of a chunk is seen, else 0."""
    from_first = builder.icmp_signed("==", begin, begin.type(0))
    to_last = builder.icmp_signed("==", end, end.type(LANES * _PIECES[-1]))
    return builder.zext(builder.and_(from_first, to_last), begin.type)


def _seen(builder: Any, piece: int, begin: Any, end: Any) -> Any:
    """Tell of each lane of a vector of the chunk whether the row sees it."""
    places = ir.Constant(_LANE_NUMBERS, [LANES * piece + lane for lane in range(LANES)])
    bounds = [splat(builder, builder.trunc(bound, ir.IntType(32)), _LANE_NUMBERS) for bound in (begin, end)]
    return builder.and_(builder.icmp_signed(">=", places, bounds[0]), builder.icmp_signed("<", places, bounds[1]))


def _every(number: float) -> Any:
    return ir.Constant(VECTOR, [number] * LANES)


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _greatest_lane(builder: Any, vector: Any) -> Any:
    """Return the greatest lane, in every lane."""
    distance = LANES // 2
    while distance:
        turned = [(lane + distance) % LANES for lane in range(LANES)]
        other = builder.shuffle_vector(vector, ir.Constant(VECTOR, ir.Undefined), ir.Constant(_LANE_NUMBERS, turned))
        vector = _greater(builder, other, vector)
        distance //= 2
    return vector
