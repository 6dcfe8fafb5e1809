"""Emit vectors of sixteen float32 lanes in LLVM: what the micro-kernels are made of.

Each function emits instructions at the builder's place. Arrays are flat; offsets count elements.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from samebit.kernels.cpu.base import numeric
from samebit.kernels.layout.grids import LANES

VECTOR = ir.VectorType(ir.FloatType(), LANES)
"""A vector has this type."""

REGISTERS = 32 if "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[-1].split(",") else 8
"""Vectors that the processor's registers hold: each is one of 32, or two of 16."""

HALF_VECTOR = ir.VectorType(ir.FloatType(), LANES // 2)
"""Half of one."""

_BITS = ir.VectorType(ir.IntType(32), LANES)
_HALF_BITS = ir.VectorType(ir.IntType(16), LANES)


def dispatch(builder: Any, choices: list[tuple[Any, tuple[int, ...]]], emit: Callable[..., None]) -> None:
    """Emit a variant for each combination of the values that some numbers may have, and branch to the one asked for.

    choices: a number and its allowed values, of each argument of ``emit``. Numbers are compared one after the other, so
    that the way to a variant grows with the sum of their values, not with the product.
    """
    if not choices:
        emit()
        return
    (number, allowed), *others = choices
    for value in allowed:
        with builder.if_then(builder.icmp_signed("==", number, number.type(value))):
            dispatch(builder, others, partial(emit, value))


def pointer_to(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Return where the element at ``offset`` lies."""
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(data, [offset])


def row_of(context: Any, builder: Any, array_type: Any, array: Any, base: Any, stride: Any, row: int) -> Any:
    """Return where a row begins of an array whose rows are ``stride`` apart, the first at ``base``."""
    offset = builder.add(base, builder.mul(stride, base.type(row)))
    return pointer_to(context, builder, array_type, array, offset)


def in_register(builder: Any, pointer: Any) -> Any:
    """Return the pointer itself, of which LLVM then knows nothing: in a loop it would compute it anew from others."""
    return builder.call(ir.InlineAsm(ir.FunctionType(pointer.type, [pointer.type]), "", "=r,0"), [pointer])


def keep_order(builder: Any) -> None:
    """Have LLVM move no load and no store across this place.

    A processor asks ahead for lines that are read in ascending order. LLVM begins a row where it likes, at its end too,
    and reading states from memory then takes half as long again.
    """
    nothing = ir.FunctionType(ir.VoidType(), [])
    builder.call(ir.InlineAsm(nothing, "", "~{memory}", side_effect=True), [])


def load_vector(builder: Any, pointer: Any, dtype: Any) -> Any:
    """Load sixteen elements as float32; bfloat16 (uint16 bits) is widened."""
    if dtype == types.float32:
        return builder.load(builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
    return _widened(builder, builder.load(builder.bitcast(pointer, _HALF_BITS.as_pointer()), align=2))


def load_halves(builder: Any, pointer: Any, kind: Any) -> list[Any]:
    """Load bfloat16 (uint16 bits) as two vectors of this type of float32: the even ones and the odd ones."""
    bits = ir.VectorType(ir.IntType(32), kind.count)
    words = builder.load(builder.bitcast(pointer, bits.as_pointer()), align=2)
    even = builder.shl(words, ir.Constant(bits, [16] * kind.count))
    odd = builder.and_(words, ir.Constant(bits, [0xFFFF0000] * kind.count))
    return [builder.bitcast(even, kind), builder.bitcast(odd, kind)]


def _widened(builder: Any, halves: Any) -> Any:
    """Return sixteen bfloat16 (uint16 bits) as float32."""
    return builder.bitcast(builder.shl(builder.zext(halves, _BITS), ir.Constant(_BITS, [16] * LANES)), VECTOR)


def store_vector(builder: Any, value: Any, pointer: Any, dtype: Any = types.float32) -> None:
    """Store sixteen float32 as elements of this type, bfloat16 (uint16 bits) rounded as by `numeric.narrow`."""
    if dtype == types.float32:
        builder.store(value, builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
        return

    def every(number: int) -> Any:
        return ir.Constant(_BITS, [number] * LANES)

    bits = builder.bitcast(value, _BITS)
    odd = builder.and_(builder.lshr(bits, every(16)), every(1))
    rounded = builder.lshr(builder.add(builder.add(bits, every(0x7FFF)), odd), every(16))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), every(0x7FC0), rounded)
    builder.store(builder.trunc(kept, _HALF_BITS), builder.bitcast(pointer, _HALF_BITS.as_pointer()), align=2)


def stream_vector(builder: Any, value: Any, pointer: Any) -> None:
    """Store past the caches, where the target begins a cache line: what is not read soon would only fill them."""
    stored = builder.store(value, builder.bitcast(pointer, VECTOR.as_pointer()), align=64)
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


def splat_pair(builder: Any, pointer: Any, kind: Any) -> tuple[Any, Any]:
    """Load two neighbouring bfloat16 (uint16 bits), each widened and in every lane: one load, two instructions."""
    bits = ir.VectorType(ir.IntType(32), kind.count)
    word = builder.load(builder.bitcast(pointer, ir.IntType(32).as_pointer()), align=2)
    lane0 = builder.insert_element(ir.Constant(bits, ir.Undefined), word, ir.IntType(32)(0))
    words = builder.shuffle_vector(lane0, ir.Constant(bits, ir.Undefined), ir.Constant(bits, [0] * kind.count))
    low = builder.shl(words, ir.Constant(bits, [16] * kind.count))
    high = builder.and_(words, ir.Constant(bits, [0xFFFF0000] * kind.count))
    return builder.bitcast(low, kind), builder.bitcast(high, kind)


def splat_element(builder: Any, pointer: Any, dtype: Any, kind: Any = VECTOR) -> Any:
    """Load an element into every lane; bfloat16 (uint16 bits) is widened."""
    element = builder.load(pointer)
    if dtype != types.float32:
        i32 = ir.IntType(32)
        element = builder.bitcast(builder.shl(builder.zext(element, i32), i32(16)), ir.FloatType())
    return splat(builder, element, kind)


def gather_elements(builder: Any, pointers: list[Any], dtype: Any) -> Any:
    """Load sixteen elements from anywhere as float32."""
    element = ir.FloatType() if dtype == types.float32 else ir.IntType(16)
    gathered: Any = ir.Constant(ir.VectorType(element, LANES), ir.Undefined)
    for lane, pointer in enumerate(pointers):
        gathered = builder.insert_element(gathered, builder.load(pointer), ir.IntType(32)(lane))
    return gathered if dtype == types.float32 else _widened(builder, gathered)


def load_as(builder: Any, pointer: Any, kind: Any) -> Any:
    """Load float32 as a vector of this type."""
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=4)


def store_as(builder: Any, value: Any, pointer: Any) -> None:
    """Store float32 of a vector of any type."""
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def half_of(builder: Any, vector: Any, half: int) -> Any:
    """Return the lower (0) or the upper (1) half of a vector."""
    count = LANES // 2
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(half * count, (half + 1) * count)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), lanes)


def part_of(builder: Any, vector: Any, kind: Any) -> Any:
    """Return a vector, or its lower half where that is of the type ``kind``."""
    return vector if kind == vector.type else half_of(builder, vector, 0)


def splat(builder: Any, scalar: Any, kind: Any = VECTOR) -> Any:
    """Put a number into every lane of a vector of this type."""
    undefined = ir.Constant(kind, ir.Undefined)
    lane0 = builder.insert_element(undefined, scalar, ir.IntType(32)(0))
    zeros_of = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
    return builder.shuffle_vector(lane0, undefined, zeros_of)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function_type = ir.FunctionType(c.type, [c.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fma.v{c.type.count}f32")
    return builder.call(function, [a, b, c])


def greater(builder: Any, a: Any, b: Any) -> Any:
    """Return the greater of each lane's two."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def exponential(builder: Any, x: Any) -> Any:
    """Compute e**x of a vector as `numeric.exp` does, step by step."""
    kind, bits = x.type, ir.VectorType(ir.IntType(32), x.type.count)

    def every(number: Any) -> Any:
        return ir.Constant(kind, [float(number)] * kind.count)

    lowest, highest, shift = every(numeric.EXP_LOWEST), every(numeric.EXP_HIGHEST), every(numeric.ROUND)
    clamped = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    clamped = builder.select(builder.fcmp_ordered(">", clamped, highest), highest, clamped)
    shifted = fma(builder, clamped, every(numeric.LOG2E), shift)
    n = builder.fsub(shifted, shift)
    r = fma(builder, n, every(-numeric.LN2_HI), clamped)
    r = fma(builder, n, every(-numeric.LN2_LO), r)
    p = every(numeric.E0)
    for term in (numeric.E1, numeric.E2, numeric.E3, numeric.E4, numeric.E5):
        p = fma(builder, p, r, every(term))
    p = builder.fadd(fma(builder, p, builder.fmul(r, r), r), every(1))
    power = builder.shl(builder.bitcast(shifted, bits), ir.Constant(bits, [23] * kind.count))
    power = builder.add(power, ir.Constant(bits, [0x3F800000] * kind.count))
    return builder.fmul(p, builder.bitcast(power, kind))


def prefetch(builder: Any, pointer: Any) -> None:
    """Ask for a cache line (a read, into the second-level cache, of data)."""
    i32, address = ir.IntType(32), ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [address, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(pointer, address), i32(0), i32(2), i32(1)])


def accumulate(builder: Any, count: Any, initial: list[Any], step: Any) -> list[Any]:
    """Emit ``for i in range(count): accumulators = step(i, accumulators)``, the accumulators in registers."""
    i64 = count.type
    entry = builder.block
    body = builder.append_basic_block("simd.body")
    done = builder.append_basic_block("simd.done")
    builder.cbranch(builder.icmp_signed(">", count, i64(0)), body, done)
    builder.position_at_end(body)
    index = builder.phi(i64)
    carried = [builder.phi(start.type) for start in initial]
    updated = step(index, carried)
    following = builder.add(index, i64(1))
    index.add_incoming(i64(0), entry)
    index.add_incoming(following, builder.block)
    for phi, start, new in zip(carried, initial, updated, strict=True):
        phi.add_incoming(start, entry)
        phi.add_incoming(new, builder.block)
    last = builder.block
    builder.cbranch(builder.icmp_signed("<", following, count), body, done)
    builder.position_at_end(done)
    results = []
    for start, new in zip(initial, updated, strict=True):
        phi = builder.phi(start.type)
        phi.add_incoming(start, entry)
        phi.add_incoming(new, last)
        results.append(phi)
    return results


def zeros() -> Any:
    """Return a vector of zeros."""
    return ir.Constant(VECTOR, [0.0] * LANES)


def load_columns(builder: Any, pointers: list[Any], dtype: Any) -> list[Any]:
    """Load the columns of sixteen rows of eight elements as float32; each pointer is a row's first element."""
    half = LANES // 2
    pairs = [_load_halves(builder, pointers[i], pointers[i + half], dtype) for i in range(half)]
    return transposed(builder, pairs)


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Return sixteen vectors as the columns of what they were the rows of.

    Eight are the rows of two squares side by side, each of which is transposed by itself.
    """
    rows, distance = list(rows), 1
    while distance < len(rows):  # swap the off-diagonal squares of this size
        for i in (i for i in range(len(rows)) if not i & distance):
            rows[i], rows[i + distance] = _swap_halves(builder, rows[i], rows[i + distance], distance)
        distance *= 2
    return rows


def _load_halves(builder: Any, first: Any, second: Any, dtype: Any) -> Any:
    """Load eight elements from here and eight from there as a vector: the second load needs no shuffle."""
    half = LANES // 2
    element = ir.FloatType() if dtype == types.float32 else ir.IntType(16)
    kind = ir.VectorType(element, half).as_pointer()
    parts = [builder.load(builder.bitcast(place, kind), align=2) for place in (first, second)]
    both = builder.shuffle_vector(*parts, ir.Constant(_BITS, list(range(LANES))))
    return both if dtype == types.float32 else _widened(builder, both)


def _swap_halves(builder: Any, upper: Any, lower: Any, distance: int) -> tuple[Any, Any]:
    """Return two rows whose lanes with the bit ``distance`` (upper) and without it (lower) have changed places."""
    mask = ir.VectorType(ir.IntType(32), LANES)
    first = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
    second = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
    return (
        builder.shuffle_vector(upper, lower, ir.Constant(mask, first)),
        builder.shuffle_vector(upper, lower, ir.Constant(mask, second)),
    )
