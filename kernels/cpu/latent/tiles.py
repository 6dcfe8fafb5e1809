"""Define the micro-kernels of attention over latents, as LLVM vectors (why: see `base.small_tiles`).

Scores and weights lie as ``[C, LANES]`` for sixteen query rows at a time: the lanes of a vector are rows, and a key is
read where it lies, one element for all rows, as in the matrix product. Values are added with lanes along the latent.

Where pairs of bfloat16 are multiplied (`DOTS`), a step of a score's chain is two elements of a key, of an output's
chain two tokens, whose weights are rounded to bfloat16.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import (
    VECTOR,
    accumulate,
    dispatch,
    exponential,
    fma,
    load_as,
    load_halves,
    load_vector,
    pointer_to,
    prefetch,
    splat,
    splat_element,
    store_vector,
    zeros,
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
    pair_of,
    side_by_side,
    splat_pairs,
)
from samebit.kernels.cpu.latent.vectors import greater
from samebit.kernels.layout.grids import CACHE_LINE, KV_CHUNK, LANES

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[-1].split(",")
LARGE = "+avx512f" in _FEATURES
"""Whether a vector is one register."""

_TOKENS = (TOKENS, TOKENS // 2) if LARGE else (4, 2)
"""Tokens that are scored at once for one vector of rows and for two: as many as leave the sums in registers."""

ROWS = (1, 2, 4, 8) if LARGE else (1, 2, 4)
"""Rows that `add_values` may cover."""

COLUMNS = (1, 2) if LARGE else (1,)
"""Vectors of columns that `add_values` may cover."""

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
                tokens, unrolled = _TOKENS[vector_count - 1], UNROLLED // vector_count
                start = pointer_to(context, builder, query, query_array, query_from)
                rows = [builder.gep(start, [builder.mul(pitch, index(v))]) for v in range(vector_count)]
                blocks = builder.udiv(steps, index(unrolled))
                done = builder.mul(blocks, index(unrolled))

                def ask(d: Any, part: int) -> None:
                    moved = builder.mul(d, index(width))
                    ask_some(d, moved, part, min(part + tokens, asked))
                    if part + tokens > asked:
                        with builder.if_then(builder.icmp_signed(">=", builder.add(behind, moved), keys_alone)):
                            ask_some(d, moved, max(part, asked), part + tokens)

                def ask_some(d: Any, moved: Any, first: int, last: int) -> None:
                    turns = min(line // unrolled, tokens)  # each time for some of the tokens: once a line for all
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

                for part in range(0, TOKENS, tokens):
                    keys = given = [key_of(t) for t in range(part, part + tokens)]
                    if tile == _EVENLY:
                        keys = by_few_pointers(builder, keys)
                    targets = []
                    for t in range(part, part + tokens):
                        for v in range(vector_count):
                            at = builder.mul(builder.add(token, index(t + v * KV_CHUNK)), index(LANES))
                            targets.append(pointer_to(context, builder, s, s_array, builder.add(s_from, at)))

                    def block(i: Any, sums: list[Any], keys: list[Any] = keys, part: int = part) -> list[Any]:
                        d = builder.mul(i, index(unrolled))
                        if asking:
                            ask(d, part)
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

            tiles: tuple[int, ...] = (0, 1, 2)
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
def weigh(
    typingctx: Any, whole: Any, paired: Any, s: Any, s_at: Any, scale: Any, seen: Any, peaks: Any, shrinks: Any,
    row: Any, sums: Any, sums_at: Any,
) -> Any:  # fmt: skip
    """Turn the raw scores ``s[j, lane]`` of sixteen rows into weights against their maxima so far, ``peaks``.

    A row sees the first ``seen`` tokens (float32) of the chunk, all of them if ``whole``; the others get weight 0.
    Maxima and the partial sums ``[LANES, lane]`` go on; ``shrinks`` gets what the accumulators are to be multiplied by.
    With ``paired`` (`DOTS`) weights are rounded to bfloat16, and those of two tokens lie at the first, as `dot` reads.
    """
    i64 = types.int64
    signature = types.void(types.boolean, types.boolean, s, i64, types.float32, seen, peaks, shrinks, i64, sums, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (whole_given, paired_given, s_array, s_from, factor, seen_array, peak_array, shrink_array, at, sums_array,
         sums_from) = args  # fmt: skip
        index = at.type
        start = pointer_to(context, builder, s, s_array, s_from)
        totals = pointer_to(context, builder, sums, sums_array, sums_from)
        peak_at = pointer_to(context, builder, peaks, peak_array, at)
        shrink_at = pointer_to(context, builder, shrinks, shrink_array, at)
        limit = load_vector(builder, pointer_to(context, builder, seen, seen_array, at), types.float32)
        old = load_vector(builder, peak_at, types.float32)
        lowest = ir.Constant(VECTOR, [float("-inf")] * LANES)

        def unseen(j: Any) -> Any:
            number = splat(builder, builder.sitofp(j, ir.FloatType()))
            return builder.fcmp_ordered(">=", number, limit)

        def emit(all_seen: int, in_pairs: int) -> None:
            scale_vector = splat(builder, factor)

            def scaled(i: Any, best: list[Any]) -> list[Any]:
                found = []
                for part, greatest in enumerate(best):
                    j = builder.add(builder.mul(i, index(len(best))), index(part))
                    pointer = builder.gep(start, [builder.mul(j, index(LANES))])
                    score = builder.fmul(load_vector(builder, pointer, types.float32), scale_vector)
                    if not all_seen:
                        score = builder.select(unseen(j), lowest, score)
                    store_vector(builder, score, pointer)
                    found.append(greater(builder, score, greatest))
                return found

            best = accumulate(builder, index(KV_CHUNK // 4), [lowest] * 4, scaled)
            best = [greater(builder, a, b) for a, b in zip(best[::2], best[1::2], strict=True)]
            peak = greater(builder, greater(builder, *best), old)
            shrink = exponential(builder, builder.fsub(old, peak))
            shrink = builder.select(builder.fcmp_ordered(">", old, lowest), shrink, zeros())

            together = 1 + in_pairs

            def weights(i: Any, none: list[Any]) -> list[Any]:
                lanes = [builder.add(builder.mul(i, index(together)), index(part)) for part in range(together)]
                targets = [builder.gep(totals, [builder.mul(lane, index(LANES))]) for lane in lanes]
                sums = [builder.fmul(load_vector(builder, target, types.float32), shrink) for target in targets]
                for piece in range(0, KV_CHUNK, LANES):
                    found = []
                    for part, lane in enumerate(lanes):
                        j = builder.add(lane, index(piece))
                        score = load_vector(builder, builder.gep(start, [builder.mul(j, index(LANES))]), types.float32)
                        weight = exponential(builder, builder.fsub(score, peak))
                        if not all_seen:
                            weight = builder.select(unseen(j), zeros(), weight)
                        sums[part] = builder.fadd(sums[part], weight)
                        found.append(weight)
                    first = builder.gep(start, [builder.mul(builder.add(lanes[0], index(piece)), index(LANES))])
                    store_vector(builder, pair_of(builder, *found) if in_pairs else found[0], first)
                for total, target in zip(sums, targets, strict=True):
                    store_vector(builder, total, target)
                return none

            accumulate(builder, index(LANES // together), [], weights)
            store_vector(builder, peak, peak_at)
            store_vector(builder, shrink, shrink_at)

        dispatch(builder, [(whole_given, (0, 1)), (paired_given, (0, 1) if DOTS else (0,))], emit)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def add_values(
    typingctx: Any, rows: Any, columns: Any, shrink: Any, s: Any, s_at: Any, lo: Any, hi: Any, source: Any,
    places: Any, column: Any, pages: Any, coming: Any, shrinks: Any, shrinks_at: Any, acc: Any, acc_at: Any,
    acc_stride: Any,
) -> Any:  # fmt: skip
    """Add to ``acc[r, 16 c + lane]`` the chain over lo <= j < hi of ``s[j, r] * source[places[j] + column + ...]``.

    ``rows`` is one of `ROWS`, ``columns`` (c) one of `COLUMNS`. ``s`` is ``[C, LANES]`` from ``s_at`` on, rows of
    ``acc`` are ``acc_stride`` apart. With ``shrink``, ``acc`` is multiplied by the ``shrinks`` of the rows before.
    Of a source in bfloat16 c is 2, and ``acc`` has the even columns before the odd ones; or, where pairs are multiplied
    (`DOTS`), fours of columns in turns. Then ``lo`` is even, and a last token is multiplied beside zeros.
    """
    i64 = types.int64
    signature = types.void(
        i64, i64, types.boolean, s, i64, i64, i64, source, places, i64, pages, coming, shrinks, i64, acc, i64, i64
    )
    narrow = source.dtype != types.float32
    paired, halves = narrow and DOTS, narrow and not DOTS

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (many, wide, shrinking, s_array, s_from, begin, end, source_array, table, first, page_array, next_table,
         shrink_array, shrink_from, acc_array, acc_from, step) = args  # fmt: skip
        index = many.type

        def emit(row_count: int, column_count: int, shrunk: int) -> None:
            lanes = [index(LANES * c) for c in range(column_count)]
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
                return [splat(builder, builder.load(builder.gep(here, [index(r)]))) for r in range(row_count)]

            def ask(number: Any, line: Any) -> None:
                place = builder.load(pointer_to(context, builder, coming, next_table, number))
                at = builder.add(place, builder.add(first, line))
                prefetch(builder, pointer_to(context, builder, pages, page_array, at))

            def add_pair(j: Any, sums: list[Any], tokens: int = 2) -> list[Any]:
                rows = [load_row(builder, row_at(builder.add(j, index(t)))) for t in range(tokens)]
                loaded = side_by_side(builder, rows[0], rows[1] if tokens > 1 else None)
                pairs = [(factor, vector) for factor in factors_of(j) for vector in loaded]
                return [dot(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            def add_two(i: Any, sums: list[Any]) -> list[Any]:
                if shrunk:  # for the tokens that scores have not asked for
                    group = builder.mul(builder.lshr(i, index(3)), index(TOKENS))
                    within = builder.or_(builder.and_(i, index(7)), index(TOKENS // 2))
                    ask(builder.add(group, within), index(0))
                return add_pair(builder.add(begin, builder.shl(i, index(1))), sums)

            def add_last(_: Any, sums: list[Any]) -> list[Any]:
                return add_pair(builder.sub(end, index(1)), sums, 1)

            def add(i: Any, sums: list[Any]) -> list[Any]:
                j = builder.add(begin, i)
                start = row_at(j)
                if shrunk:
                    half = builder.and_(j, index(TOKENS // 2))
                    ask(builder.or_(j, index(TOKENS // 2)), builder.mul(half, index(LANES * 2 // TOKENS)))
                if halves:
                    loaded = load_halves(builder, start)
                else:
                    loaded = [load_vector(builder, builder.gep(start, [lane]), types.float32) for lane in lanes]
                pairs = [(factor, vector) for factor in factors_of(j) for vector in loaded]
                return [fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            initial = [load_vector(builder, target, types.float32) for target in targets]
            if shrunk:
                places_of = [
                    pointer_to(context, builder, shrinks, shrink_array, builder.add(shrink_from, index(r)))
                    for r in range(row_count)
                    for _ in lanes
                ]
                initial = [
                    builder.fmul(total, splat(builder, builder.load(place)))
                    for total, place in zip(initial, places_of, strict=True)
                ]
            count = builder.sub(end, begin)
            if paired:
                found = accumulate(builder, builder.ashr(count, index(1)), initial, add_two)
                found = accumulate(builder, builder.and_(count, index(1)), found, add_last)
            else:
                found = accumulate(builder, count, initial, add)
            for target, total in zip(targets, found, strict=True):
                store_vector(builder, total, target)

        columns_of = (2,) if narrow else COLUMNS
        dispatch(builder, [(many, ROWS), (wide, columns_of), (shrinking, (0, 1))], emit)
        return context.get_dummy_value()

    return signature, generate
