"""Define the micro-kernels of attention over latents, as LLVM vectors (why: see `base.small_tiles`).

Scores and weights lie as ``[C, LANES]`` for sixteen query rows at a time: the lanes of a vector are rows, and a key is
read where it lies, one element for all rows, as in the matrix product. Values are added with lanes along the latent.

Where pairs of bfloat16 are multiplied (`DOTS`), a step of a score's chain is two elements of a key, of an output's
chain two tokens, whose weights are rounded to bfloat16.
"""

from itertools import accumulate as accumulated
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import (
    HALF_VECTOR,
    REGISTERS,
    VECTOR,
    accumulate,
    dispatch,
    fma,
    load_as,
    load_halves,
    pointer_to,
    prefetch,
    splat,
    splat_element,
    store_as,
)
from samebit.kernels.cpu.gemm.dots_vectors import dot
from samebit.kernels.cpu.latent.dots import (
    DOTS,
    TOKENS,
    Key,
    by_few_pointers,
    dot_at,
    lie_evenly,
    load_row,
    side_by_side,
    splat_pairs,
)
from samebit.kernels.layout.grids import CACHE_LINE, KV_CHUNK, LANES

LARGE = REGISTERS == 32
"""Whether a vector is one register."""

VECTORS = 2 if LARGE else 1
"""Vectors of rows that `score_tokens` covers at most."""

PASSES: tuple[tuple[int, ...], ...] = (
    ((TOKENS,), (TOKENS,), (TOKENS // 2, TOKENS // 2), (TOKENS,)) if LARGE else ((TOKENS // 2, TOKENS // 2), (6, 6, 4))
)
"""Tokens that are scored at once, one count after the other, for each tile: as many as leave the sums in registers, and
enough of them to fill the processor."""

ROWS = (1, 2, 4, 8) if LARGE else (1, 2, 4, 6)
"""Rows that `add_values` may cover."""

COLUMNS = (1, 2) if LARGE else (1,)
"""Vectors of columns that `add_values` may cover."""

NARROW_COLUMNS = COLUMNS[-1]
"""Vectors of columns of bfloat16 that it covers: the even ones lie before the odd ones."""

_EVENLY = 3
"""Stands for half a vector of rows and tokens that lie equally far apart."""

UNROLLED = 8
"""Steps that are taken for a token at once, each for all tokens: as many chains as are under way fill the processor."""


def _score_tokens(asked: int) -> Any:
    """Make a micro-kernel: for each d < count in turn, ``s[v, j, lane] += query[v, d, lane] * source[at + d]``.

    Of a source in bfloat16 (``DOTS``) d counts pairs, of which ``query`` holds the bits; ``count`` counts elements, and
    sums begin with 0 instead of ``s``.
    ``at`` is ``places[j] + offset``. For the `TOKENS` tokens j from ``first`` on and 1 or 2 vectors v of rows, or the
    first half of one if ``vectors`` is 0. The queries of a vector are ``query_step`` apart, ``s`` is ``[v, C, LANES]``
    from ``s_at`` on; flat arrays. With ``fetch``, asks for the elements from ``begin`` on of the first ``asked`` of
    the tokens whose places in the pages are ``coming``, and for those from ``alone`` on, which no value has, of all.
    """

    @intrinsic
    def kernel(
        typingctx: Any, vectors: Any, fetch: Any, query: Any, query_at: Any, query_step: Any, count: Any, source: Any,
        places: Any, offset: Any, first: Any, pages: Any, coming: Any, begin: Any, alone: Any, s: Any, s_at: Any,
    ) -> Any:  # fmt: skip
        i64 = types.int64
        signature = types.void(
            i64, types.boolean, query, i64, i64, i64, source, places, i64, i64, pages, coming, i64, i64, s, i64
        )

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (many, fetching, query_array, query_from, pitch, depth, source_array, table, inside, token, page_array,
             next_table, behind, keys_alone, s_array, s_from) = args  # fmt: skip
            index = many.type
            paired = DOTS and source.dtype != types.float32
            width = 2 if paired else 1  # elements of a step
            line = CACHE_LINE // context.get_abi_sizeof(context.get_value_type(pages.dtype)) // width
            steps = builder.lshr(depth, index(1)) if paired else depth

            def key_of(number: int) -> Key:
                place = builder.load(pointer_to(context, builder, places, table, builder.add(token, index(number))))
                return Key(pointer_to(context, builder, source, source_array, builder.add(place, inside)), None, 0)

            def emit(tile: int, asking: int) -> None:
                kind = ir.VectorType(ir.FloatType(), LANES if tile in (1, 2) else LANES // 2)
                vector_count = 2 if tile == 2 else 1
                unrolled = UNROLLED // vector_count
                start = pointer_to(context, builder, query, query_array, query_from)
                rows = [builder.gep(start, [builder.mul(pitch, index(v))]) for v in range(vector_count)]
                blocks = builder.udiv(steps, index(unrolled))
                done = builder.mul(blocks, index(unrolled))

                def ask(d: Any, part: int, tokens: int) -> None:
                    moved = builder.mul(d, index(width))
                    turns = min(line // unrolled, tokens)  # each time for some of the tokens: once a line for all
                    ask_some(d, moved, part, min(part + tokens, asked), turns)
                    if part + tokens > asked:
                        with builder.if_then(builder.icmp_signed(">=", builder.add(behind, moved), keys_alone)):
                            ask_some(d, moved, max(part, asked), part + tokens, turns)

                def ask_some(d: Any, moved: Any, first: int, last: int, turns: int) -> None:
                    turn = builder.and_(builder.udiv(d, index(unrolled)), index(turns - 1))
                    for t in range(first, last, turns):
                        place = pointer_to(context, builder, coming, next_table, builder.add(token, index(t)))
                        place = builder.load(builder.gep(place, [turn]))
                        ahead = pointer_to(context, builder, pages, page_array, builder.add(place, behind))
                        prefetch(builder, builder.gep(ahead, [moved]))

                def multiply(factors: list[Any], key: Key, u: int, sums: list[Any], half: bool) -> list[Any]:
                    """Go on with a token's sums by the step ``u`` behind ``key``, half of a pair at the end."""
                    if paired and not half and vector_count > 1:  # a load for all vectors: loads are what limits
                        pair = splat_pairs(builder, key, u)
                        return [dot(builder, factor, pair, total) for factor, total in zip(factors, sums, strict=True)]
                    if paired and not half:
                        return [dot_at(builder, *each, key, u) for each in zip(factors, sums, strict=True)]
                    pointer = builder.gep(key.pointer, [index(u * width)])
                    if paired:
                        word = builder.bitcast(builder.zext(builder.load(pointer), ir.IntType(32)), ir.FloatType())
                        pair = splat(builder, word, kind)
                        return [dot(builder, factor, pair, total) for factor, total in zip(factors, sums, strict=True)]
                    value = splat_element(builder, pointer, source.dtype, kind)
                    return [fma(builder, factor, value, total) for factor, total in zip(factors, sums, strict=True)]

                def add(keys: list[Key], d: Any, many_steps: int, sums: list[Any], half: bool = False) -> list[Any]:
                    found = list(sums)
                    places = [builder.mul(builder.add(d, index(u)), index(LANES)) for u in range(many_steps)]
                    factors = [[load_as(builder, builder.gep(row, [at]), kind) for at in places] for row in rows]
                    moved = builder.mul(d, index(width))
                    starts = [key._replace(pointer=builder.gep(key.pointer, [moved])) for key in keys]
                    for u in range(many_steps):
                        for t, here in enumerate(starts):
                            own = slice(t * vector_count, (t + 1) * vector_count)
                            found[own] = multiply([row[u] for row in factors], here, u, found[own], half)
                    return found

                for part, tokens in zip(accumulated((0, *PASSES[tile])), PASSES[tile], strict=False):
                    keys = given = [key_of(t) for t in range(part, part + tokens)]
                    if tile == _EVENLY:
                        keys = by_few_pointers(builder, keys)
                    targets = []
                    for t in range(part, part + tokens):
                        for v in range(vector_count):
                            at = builder.mul(builder.add(token, index(t + v * KV_CHUNK)), index(LANES))
                            targets.append(pointer_to(context, builder, s, s_array, builder.add(s_from, at)))

                    def block(
                        i: Any, sums: list[Any], keys: list[Any] = keys, part: int = part, tokens: int = tokens
                    ) -> list[Any]:
                        d = builder.mul(i, index(unrolled))
                        if asking:
                            ask(d, part, tokens)
                        return add(keys, d, unrolled, sums)

                    def single(i: Any, sums: list[Any], keys: list[Any] = keys) -> list[Any]:
                        return add(keys, builder.add(done, i), 1, sums)

                    none = ir.Constant(kind, [0.0] * kind.count)
                    begun = [none if paired else load_as(builder, target, kind) for target in targets]
                    sums = accumulate(builder, blocks, begun, block)
                    sums = accumulate(builder, builder.sub(steps, done), sums, single)
                    if paired:  # a last element without a partner

                        def last(_: Any, sums: list[Any], keys: list[Any] = given) -> list[Any]:
                            return add(keys, steps, 1, sums, half=True)

                        sums = accumulate(builder, builder.and_(depth, index(1)), sums, last)
                    for target, total in zip(targets, sums, strict=True):
                        builder.store(total, builder.bitcast(target, kind.as_pointer()), align=4)

            tiles: tuple[int, ...] = (0, 1, 2) if LARGE else (0, 1)
            if paired:
                begin_of = pointer_to(context, builder, places, table, token)
                few = builder.and_(builder.icmp_signed("==", many, index(0)), lie_evenly(builder, begin_of))
                many, tiles = builder.select(few, index(_EVENLY), many), (*tiles, _EVENLY)
            dispatch(builder, [(many, tiles), (fetching, (0, 1))], emit)
            return context.get_dummy_value()

        return signature, generate

    return kernel


score_tokens = _score_tokens(TOKENS // 2)
score_and_fetch = _score_tokens(TOKENS)


@intrinsic
def add_values(
    typingctx: Any, rows: Any, columns: Any, shrink: Any, s: Any, s_at: Any, lo: Any, hi: Any, source: Any,
    places: Any, column: Any, pages: Any, coming: Any, shrinks: Any, shrinks_at: Any, acc: Any, acc_at: Any,
    acc_stride: Any,
) -> Any:  # fmt: skip
    """Add to ``acc[r, 16 c + lane]`` the chain over lo <= j < hi of ``s[j, r] * source[places[j] + column + ...]``.

    ``rows`` is one of `ROWS`, ``columns`` (c) one of `COLUMNS`. ``s`` is ``[C, LANES]`` from ``s_at`` on, rows of
    ``acc`` are ``acc_stride`` apart. With ``shrink`` 1 or 2, ``acc`` is multiplied by the ``shrinks`` of the rows
    before; 2 also asks for those tokens of the ``coming`` places that scores have not asked for.
    Of a source in bfloat16 c is `NARROW_COLUMNS`, and ``acc`` has the even columns before the odd ones; or, where pairs
    are multiplied (`DOTS`), fours of columns in turns. Then ``lo`` is even, and a last token is multiplied beside
    zeros.
    """
    i64 = types.int64
    signature = types.void(
        i64, i64, i64, s, i64, i64, i64, source, places, i64, pages, coming, shrinks, i64, acc, i64, i64
    )
    narrow = source.dtype != types.float32
    paired, halves = narrow and DOTS, narrow and not DOTS

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (many, wide, shrinking, s_array, s_from, begin, end, source_array, table, first, page_array, next_table,
         shrink_array, shrink_from, acc_array, acc_from, step) = args  # fmt: skip
        index = many.type

        def emit(row_count: int, column_count: int, shrunk: int) -> None:
            kind = HALF_VECTOR if halves and not LARGE else VECTOR
            lanes = [index(lane) for lane in range(0, LANES * column_count, kind.count)]
            targets = []
            for r in range(row_count):
                start = builder.add(acc_from, builder.mul(step, index(r)))
                targets += [pointer_to(context, builder, acc, acc_array, builder.add(start, lane)) for lane in lanes]
            weights = pointer_to(context, builder, s, s_array, s_from)

            def row_at(j: Any) -> Any:
                place = builder.load(pointer_to(context, builder, places, table, j))
                return pointer_to(context, builder, source, source_array, builder.add(place, first))

            def factors_of(j: Any) -> list[Any]:
                here = builder.gep(weights, [builder.mul(j, index(LANES))])
                return [splat(builder, builder.load(builder.gep(here, [index(r)])), kind) for r in range(row_count)]

            def ask(number: Any, line: Any) -> None:
                place = builder.load(pointer_to(context, builder, coming, next_table, number))
                at = builder.add(place, builder.add(first, line))
                prefetch(builder, pointer_to(context, builder, pages, page_array, at))

            def add_pair(j: Any, sums: list[Any], tokens: int = 2) -> list[Any]:
                rows = [load_row(builder, row_at(builder.add(j, index(t)))) for t in range(tokens)]
                loaded = side_by_side(builder, rows[0], rows[1] if tokens > 1 else None)
                pairs = [(factor, vector) for factor in factors_of(j) for vector in loaded]
                return [dot(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            def ask_next(i: Any) -> None:
                group = builder.mul(builder.lshr(i, index(3)), index(TOKENS))
                within = builder.or_(builder.and_(i, index(7)), index(TOKENS // 2))
                ask(builder.add(group, within), index(0))

            def add_two(i: Any, sums: list[Any]) -> list[Any]:
                if shrunk > 1:
                    ask_next(i)
                return add_pair(builder.add(begin, builder.shl(i, index(1))), sums)

            def add_last(_: Any, sums: list[Any]) -> list[Any]:
                return add_pair(builder.sub(end, index(1)), sums, 1)

            def add(i: Any, sums: list[Any]) -> list[Any]:
                j = builder.add(begin, i)
                start = row_at(j)
                if shrunk > 1 and LARGE:
                    half = builder.and_(j, index(TOKENS // 2))
                    ask(builder.or_(j, index(TOKENS // 2)), builder.mul(half, index(LANES * 2 // TOKENS)))
                if halves:
                    loaded = load_halves(builder, start, kind)
                else:
                    loaded = [load_as(builder, builder.gep(start, [lane]), kind) for lane in lanes]
                pairs = [(factor, vector) for factor in factors_of(j) for vector in loaded]
                return [fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            initial = [load_as(builder, target, kind) for target in targets]
            if shrunk:
                places_of = [
                    pointer_to(context, builder, shrinks, shrink_array, builder.add(shrink_from, index(r)))
                    for r in range(row_count)
                    for _ in lanes
                ]
                initial = [
                    builder.fmul(total, splat(builder, builder.load(place), kind))
                    for total, place in zip(initial, places_of, strict=True)
                ]
            count = builder.sub(end, begin)
            if paired:
                found = accumulate(builder, builder.ashr(count, index(1)), initial, add_two)
                found = accumulate(builder, builder.and_(count, index(1)), found, add_last)
            elif shrunk > 1 and not LARGE:

                def add_both(i: Any, sums: list[Any]) -> list[Any]:
                    ask_next(i)
                    j = builder.shl(i, index(1))
                    return add(builder.add(j, index(1)), add(j, sums))

                found = accumulate(builder, builder.ashr(count, index(1)), initial, add_both)
                done = builder.and_(count, index(-2))
                odd = builder.sub(count, done)
                found = accumulate(builder, odd, found, lambda i, sums: add(builder.add(done, i), sums))
            else:
                found = accumulate(builder, count, initial, add)
            for target, total in zip(targets, found, strict=True):
                store_as(builder, total, target)

        columns_of = (NARROW_COLUMNS,) if narrow else COLUMNS
        dispatch(builder, [(many, ROWS), (wide, columns_of), (shrinking, (0, 1, 2))], emit)
        return context.get_dummy_value()

    return signature, generate
