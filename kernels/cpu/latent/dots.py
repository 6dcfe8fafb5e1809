"""Emit what multiplies pairs of bfloat16 in attention over latents: pairs of elements of a key, of tokens of a value.

Weights are rounded to bfloat16 for it. Sixteen pairs are a vector, as bits in float32.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import VECTOR, load_vector, pointer_to, splat, store_vector
from samebit.kernels.cpu.gemm.dots_vectors import available
from samebit.kernels.layout.grids import LANES

_PROCESSOR = cpu_target.target_context.codegen().magic_tuple()[1]

DOTS = available() and _PROCESSOR.startswith("znver")
"""Whether bfloat16 is multiplied in pairs: by AMD's processors, which take as long for a vector of pairs as for one of
float32. Intel's take twice as long, and would gain nothing. Arithmetic."""

TOKENS = LANES
"""Tokens of a call of `tiles.score_tokens`."""

_HALF_BITS = ir.VectorType(ir.IntType(16), LANES)
_BITS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


class Key(NamedTuple):
    """Says where a row of pairs begins: some ``steps`` (0, 1, 2) of ``distance`` bytes behind a pointer."""

    pointer: Any
    distance: Any
    steps: int


def dot_at(builder: Any, pairs: Any, total: Any, key: Key, place: int) -> Any:
    """Do as `gemm.dots_vectors.dot` by one pair for all lanes, that at this place of a key.

    The instruction loads it itself, where the processor would take a second one to spread it. LLVM is not told what is
    read, but that memory is: stores stay before it.
    """
    pointer, distance, steps = key
    operands, address = ([pointer, distance], f"($2,$3,{steps})") if steps else ([pointer], "($2)")
    assembly = ir.InlineAsm(
        ir.FunctionType(total.type, [total.type, *(operand.type for operand in operands), total.type]),
        f"vdpbf16ps {4 * place}{address}{{1to{total.type.count}}}, $1, $0",
        f"=v,v,{'r,' * len(operands)}0,~{{memory}}",
        side_effect=True,
    )
    return builder.call(assembly, [pairs, *operands, total])


def splat_pairs(builder: Any, key: Key, place: int) -> Any:
    """Load the pair at this place of a key, which is a pointer alone, into all lanes."""
    pointer = builder.bitcast(key.pointer, ir.FloatType().as_pointer())
    return splat(builder, builder.load(builder.gep(pointer, [ir.IntType(64)(place)]), align=2))


def by_few_pointers(builder: Any, keys: list[Key]) -> list[Key]:
    """Name keys that lie equally far apart by as few pointers as the processor has registers for."""
    first, second = (builder.ptrtoint(key.pointer, ir.IntType(64)) for key in keys[:2])
    once = builder.sub(second, first)
    distances = [(once, 0), (once, 1), (once, 2), (builder.mul(once, once.type(3)), 1)]
    return [Key(keys[t - t % 4].pointer, *distances[t % 4]) for t in range(len(keys))]


def lie_evenly(builder: Any, places: Any) -> Any:
    """Return whether `TOKENS` tokens begin equally far apart."""
    kind = ir.VectorType(places.type.pointee, TOKENS)
    found = builder.load(builder.bitcast(places, kind.as_pointer()), align=8)
    first, second = (builder.extract_element(found, ir.IntType(32)(t)) for t in range(2))
    step = splat(builder, builder.sub(second, first), kind)
    expected = builder.add(splat(builder, first, kind), builder.mul(step, ir.Constant(kind, list(range(TOKENS)))))
    alike = builder.icmp_signed("==", found, expected)
    bits = builder.bitcast(alike, ir.IntType(TOKENS))
    return builder.icmp_unsigned("==", bits, bits.type((1 << TOKENS) - 1))


def load_row(builder: Any, pointer: Any) -> Any:
    """Load 32 bfloat16 (uint16 bits)."""
    return builder.load(builder.bitcast(pointer, _HALVES.as_pointer()), align=2)


def side_by_side(builder: Any, row: Any, other: Any | None) -> list[Any]:
    """Return two vectors of pairs, an element of each of two rows of 32; zeros stand for a row that is not there.

    The first has columns 0 to 3, 8 to 11, 16 to 19 and 24 to 27, the second the fours behind: an instruction each.
    """
    other = ir.Constant(_HALVES, None) if other is None else other
    found = []
    for half in range(2):
        columns = [8 * (lane // 4) + 4 * half + lane % 4 for lane in range(LANES)]
        mask = [column + 2 * LANES * which for column in columns for which in range(2)]
        mixed = builder.shuffle_vector(row, other, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), mask))
        found.append(builder.bitcast(mixed, VECTOR))
    return found


def pair_of(builder: Any, first: Any, second: Any) -> Any:
    """Return pairs of two vectors' float32, rounded to bfloat16."""
    words = [builder.zext(_rounded(builder, vector), _BITS) for vector in (first, second)]
    return builder.bitcast(builder.or_(words[0], builder.shl(words[1], ir.Constant(_BITS, [16] * LANES))), VECTOR)


def _rounded(builder: Any, vector: Any) -> Any:
    """Return the bits of sixteen bfloat16; what is too small for the exponent is 0, as a product takes it."""
    assembly = ir.InlineAsm(ir.FunctionType(_HALF_BITS, [VECTOR]), "vcvtneps2bf16 $1, $0", "=v,v")
    return builder.call(assembly, [vector])


@intrinsic
def write_columns(typingctx: Any, sums: Any, at: Any, divisor: Any, out: Any, out_at: Any) -> Any:
    """Divide two vectors of ``sums``, whose columns lie as `side_by_side` leaves them, and write 32 elements."""
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, first, total, target, to = args
        index = first.type
        start = pointer_to(context, builder, sums, given, first)
        end = pointer_to(context, builder, out, target, to)
        totals = splat(builder, total)
        halves = [
            builder.fdiv(load_vector(builder, builder.gep(start, [index(half * LANES)]), types.float32), totals)
            for half in range(2)
        ]
        for part in range(2):
            columns = range(part * LANES, (part + 1) * LANES)
            lanes = [column // 4 % 2 * LANES + column // 8 * 4 + column % 4 for column in columns]
            whole = builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(ir.IntType(32), LANES), lanes))
            store_vector(builder, whole, builder.gep(end, [index(part * LANES)]), out.dtype)
        return context.get_dummy_value()

    return types.void(sums, i64, types.float32, out, i64), generate
