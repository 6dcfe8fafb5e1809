"""Define the micro-kernels of attention over one chunk of tokens, as LLVM vectors (why: see `base.small_tiles`).

A chunk is stored in pieces of sixteen tokens that may lie anywhere: piece c of the keys is ``[D, 16]`` from element
``keys[c]`` on, rows ``key_stride`` apart; piece c of the values is ``[16, D]`` from element ``values[c]`` on.
D is the head size.
With ``fetch`` a kernel also asks for the cache lines at the same places of the ``coming`` chunk.
"""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from samebit.kernels.cpu.base.rows import unpacked
from samebit.kernels.cpu.base.vectors import (
    REGISTERS,
    accumulate,
    dispatch,
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
def copy_vectors(typingctx: Any, source: Any, at: Any, target: Any, to: Any, count: Any) -> Any:
    """Copy ``count // 16`` vectors; either side is float32, or bfloat16 as its uint16 bits (rounded to nearest)."""
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from_array, first, to_array, target_first, n = args
        index = n.type
        start = pointer_to(context, builder, source, from_array, first)
        end = pointer_to(context, builder, target, to_array, target_first)
        whole = builder.and_(n, index(-LANES))
        with cgutils.for_range_slice(builder, index(0), whole, index(LANES), intp=index) as (i, _):
            value = load_vector(builder, builder.gep(start, [i]), source.dtype)
            store_vector(builder, value, builder.gep(end, [i]), target.dtype)
        return context.get_dummy_value()

    return types.void(source, i64, target, i64, i64), generate
