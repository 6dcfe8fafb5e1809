"""Score two tokens in one vector, for up to eight rows, which fill half of one: lane 2 r is row r of the first token.

Each score is the chain of `tiles.score_tokens`, so who computes it changes no bit. Keys are copied, the elements of two
tokens side by side: one load gives an element of both to all rows.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import (
    VECTOR,
    accumulate,
    dispatch,
    fma,
    load_as,
    load_vector,
    pointer_to,
    prefetch,
    store_vector,
)
from samebit.kernels.cpu.latent.dots import TOKENS
from samebit.kernels.cpu.latent.tiles import LARGE, UNROLLED
from samebit.kernels.layout.grids import CACHE_LINE, LANES

PAIRED_ROWS = LANES // 2 if LARGE else 0
"""As many rows at most are scored in pairs of tokens: none where eight fill a register of the processor."""

_PAIRS = TOKENS // 2
_ROW = ir.VectorType(ir.FloatType(), LANES // 2)
_TWO = ir.VectorType(ir.FloatType(), 2)


def _mask(lanes: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)


def _interleaved(builder: Any, a: Any, b: Any) -> Any:
    """Return a vector of a0, b0, a1, b1, ... from two of half its size."""
    half = a.type.count
    return builder.shuffle_vector(a, b, _mask([lane // 2 + lane % 2 * half for lane in range(2 * half)]))


@intrinsic
def copy_pairs(
    typingctx: Any, pages: Any, places: Any, first: Any, begin: Any, count: Any, copied: Any, stride: Any
) -> Any:  # fmt: skip
    """Copy ``count`` elements, from ``begin`` on, of `TOKENS` rows of the pages, from the ``first`` of ``places`` on.

    Element d of tokens 2 p and 2 p + 1 goes, in float32, to ``copied[p * stride + 2 d]`` and the place behind it.
    """
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        page_array, table, token, inside, elements, target_array, step = args
        index = elements.type
        whole = builder.udiv(elements, index(LANES))
        done = builder.mul(whole, index(LANES))

        def row(number: int) -> Any:
            place = builder.load(pointer_to(context, builder, places, table, builder.add(token, index(number))))
            return pointer_to(context, builder, pages, page_array, builder.add(place, inside))

        for pair in range(_PAIRS):
            rows = [row(2 * pair), row(2 * pair + 1)]
            target = pointer_to(context, builder, copied, target_array, builder.mul(step, index(pair)))

            def vectors(i: Any, none: list[Any], rows: list[Any] = rows, target: Any = target) -> list[Any]:
                at = builder.mul(i, index(LANES))
                parts = [load_vector(builder, builder.gep(start, [at]), pages.dtype) for start in rows]
                to = builder.gep(target, [builder.mul(at, index(2))])
                for half in range(2):
                    lanes = [half * LANES // 2 + lane // 2 + lane % 2 * LANES for lane in range(LANES)]
                    mixed = builder.shuffle_vector(*parts, _mask(lanes))
                    store_vector(builder, mixed, builder.gep(to, [index(half * LANES)]))
                return none

            def single(i: Any, none: list[Any], rows: list[Any] = rows, target: Any = target) -> list[Any]:
                at = builder.add(done, i)
                to = builder.gep(target, [builder.mul(at, index(2))])
                for place, start in enumerate(rows):
                    element = builder.load(builder.gep(start, [at]))
                    if pages.dtype != types.float32:
                        bits = builder.shl(builder.zext(element, ir.IntType(32)), ir.IntType(32)(16))
                        element = builder.bitcast(bits, ir.FloatType())
                    builder.store(element, builder.gep(to, [index(place)]))
                return none

            accumulate(builder, whole, [], vectors)
            accumulate(builder, builder.sub(elements, done), [], single)
        return context.get_dummy_value()

    return types.void(pages, places, i64, i64, i64, copied, i64), generate


@intrinsic
def score_pairs(
    typingctx: Any, fetch: Any, query: Any, query_at: Any, count: Any, copied: Any, stride: Any, first: Any,
    pages: Any, coming: Any, begin: Any, s: Any, s_at: Any,
) -> Any:  # fmt: skip
    """Do as `tiles.score_tokens` for the first half of a vector of rows and the tokens that `copy_pairs` copied.

    With ``fetch``, asks for the elements from ``begin`` on of half of the tokens whose places are ``coming``.
    """
    i64 = types.int64
    signature = types.void(types.boolean, query, i64, i64, copied, i64, i64, pages, coming, i64, s, i64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (fetching, query_array, query_from, depth, copied_array, step, token, page_array, next_table, behind, s_array,
         s_from) = args  # fmt: skip
        index = depth.type
        line = CACHE_LINE // context.get_abi_sizeof(context.get_value_type(pages.dtype))
        turns = line // UNROLLED
        queries = pointer_to(context, builder, query, query_array, query_from)
        keys = [pointer_to(context, builder, copied, copied_array, builder.mul(step, index(p))) for p in range(_PAIRS)]

        def sums_of(number: int) -> Any:
            at = builder.mul(builder.add(token, index(number)), index(LANES))
            return pointer_to(context, builder, s, s_array, builder.add(s_from, at))

        def ask(d: Any) -> None:
            turn = builder.and_(builder.udiv(d, index(UNROLLED)), index(turns - 1))
            for t in range(0, _PAIRS, turns):
                place = pointer_to(context, builder, coming, next_table, builder.add(token, index(t)))
                place = builder.load(builder.gep(place, [turn]))
                ahead = pointer_to(context, builder, pages, page_array, builder.add(place, behind))
                prefetch(builder, builder.gep(ahead, [d]))

        def add(d: Any, sums: list[Any]) -> list[Any]:
            row = load_as(builder, builder.gep(queries, [builder.mul(d, index(LANES))]), _ROW)
            factor = _interleaved(builder, row, row)
            found = []
            for start, total in zip(keys, sums, strict=True):
                pair = load_as(builder, builder.gep(start, [builder.mul(d, index(2))]), _TWO)
                both = builder.shuffle_vector(pair, pair, _mask([0, 1] * (LANES // 2)))
                found.append(fma(builder, factor, both, total))
            return found

        def emit(asking: int) -> None:
            blocks = builder.udiv(depth, index(UNROLLED))
            done = builder.mul(blocks, index(UNROLLED))

            def block(i: Any, sums: list[Any]) -> list[Any]:
                d = builder.mul(i, index(UNROLLED))
                if asking:
                    ask(d)
                for u in range(UNROLLED):
                    sums = add(builder.add(d, index(u)), sums)
                return sums

            def single(i: Any, sums: list[Any]) -> list[Any]:
                return add(builder.add(done, i), sums)

            targets = [(sums_of(2 * p), sums_of(2 * p + 1)) for p in range(_PAIRS)]
            initial = [_interleaved(builder, *(load_as(builder, at, _ROW) for at in pair)) for pair in targets]
            found = accumulate(builder, builder.sub(depth, done), accumulate(builder, blocks, initial, block), single)
            for pair, total in zip(targets, found, strict=True):
                for place, at in enumerate(pair):
                    lanes = _mask(list(range(place, LANES, 2)))
                    own = builder.shuffle_vector(total, ir.Constant(VECTOR, ir.Undefined), lanes)
                    builder.store(own, builder.bitcast(at, _ROW.as_pointer()), align=4)

        dispatch(builder, [(fetching, (0, 1))], emit)
        return context.get_dummy_value()

    return signature, generate
