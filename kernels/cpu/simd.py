"""Sixteen-lane micro-kernels of the attention loops, written as LLVM vectors.

Why not plain Numba loops: LLVM guards them with alias checks and spills the accumulators, which cost a
factor of four. Every lane does the same scalar operations in the same order as a plain loop would: one
fused multiply-add per step, ascending. Handling several rows at once only shares the loads.

Arrays are flat; positions in them are given as element offsets.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16

_F32 = ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_BITS = ir.VectorType(ir.IntType(32), LANES)
_HALF_BITS = ir.VectorType(ir.IntType(16), LANES)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(data, [offset])


def _load_vector(builder: Any, pointer: Any, dtype: Any) -> Any:
    """Sixteen elements as float32; bfloat16 (uint16 bits) is widened."""
    if dtype == types.float32:
        return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
    halves = builder.load(builder.bitcast(pointer, _HALF_BITS.as_pointer()), align=2)
    shift = ir.Constant(_BITS, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(halves, _BITS), shift), _VECTOR)


def _store_vector(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)


def _splat(builder: Any, scalar: Any) -> Any:
    lane0 = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(lane0, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_BITS, [0] * LANES))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function_type = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR])
    function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [a, b, c])


def _prefetch(builder: Any, pointer: Any) -> None:
    """Ask for a cache line (a read, into the second-level cache, of data)."""
    i32, address = ir.IntType(32), ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [address, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(pointer, address), i32(0), i32(2), i32(1)])


def _accumulate(builder: Any, count: Any, initial: list[Any], step: Any) -> list[Any]:
    """``for i in range(count): accumulators = step(i, accumulators)``, the accumulators in registers."""
    i64 = count.type
    entry = builder.block
    body = builder.append_basic_block("simd.body")
    done = builder.append_basic_block("simd.done")
    builder.cbranch(builder.icmp_signed(">", count, i64(0)), body, done)
    builder.position_at_end(body)
    index = builder.phi(i64)
    carried = [builder.phi(_VECTOR) for _ in initial]
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
        phi = builder.phi(_VECTOR)
        phi.add_incoming(start, entry)
        phi.add_incoming(new, last)
        results.append(phi)
    return results


def _multiply_accumulate(rows: int, from_zero: bool, fetch: bool) -> Any:
    """Micro-kernel: ``out[r, 0:16] (+)= sum over i < count of weight[r, i] * vectors[i, 0:16]``.

    With ``fetch`` it also asks for the cache lines of as many vectors from ``ahead`` on.
    """

    @intrinsic
    def kernel(
        typingctx: Any,
        weights: Any,
        weights_at: Any,
        weights_stride: Any,
        vectors: Any,
        vectors_at: Any,
        vectors_stride: Any,
        ahead: Any,
        count: Any,
        out: Any,
        out_at: Any,
        out_stride: Any,
    ) -> Any:
        i64 = types.int64
        signature = types.void(weights, i64, i64, vectors, i64, i64, i64, i64, out, i64, i64)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weight, weight_at, weight_stride, vector, vector_at, vector_stride, ahead_at, n, target, at, stride = args
            weight_rows = [
                _pointer(
                    context, builder, weights, weight, builder.add(weight_at, builder.mul(weight_stride, n.type(r)))
                )
                for r in range(rows)
            ]
            out_rows = [
                _pointer(context, builder, out, target, builder.add(at, builder.mul(stride, n.type(r))))
                for r in range(rows)
            ]
            base = _pointer(context, builder, vectors, vector, vector_at)
            coming = _pointer(context, builder, vectors, vector, ahead_at)

            def step(index: Any, sums: list[Any]) -> list[Any]:
                step_offset = builder.mul(index, vector_stride)
                tile = _load_vector(builder, builder.gep(base, [step_offset]), vectors.dtype)
                if fetch:
                    _prefetch(builder, builder.gep(coming, [step_offset]))
                return [
                    _fma(builder, _splat(builder, builder.load(builder.gep(row, [index]))), tile, total)
                    for row, total in zip(weight_rows, sums, strict=True)
                ]

            zero = ir.Constant(_VECTOR, [0.0] * LANES)
            initial = [zero if from_zero else _load_vector(builder, row, types.float32) for row in out_rows]
            for row, total in zip(out_rows, _accumulate(builder, n, initial, step), strict=True):
                _store_vector(builder, total, row)
            return context.get_dummy_value()

        return signature, generate

    return kernel


scores_1 = _multiply_accumulate(rows=1, from_zero=True, fetch=False)
scores_2 = _multiply_accumulate(rows=2, from_zero=True, fetch=False)
scores_4 = _multiply_accumulate(rows=4, from_zero=True, fetch=False)
accumulate_1 = _multiply_accumulate(rows=1, from_zero=False, fetch=False)
accumulate_2 = _multiply_accumulate(rows=2, from_zero=False, fetch=False)
accumulate_4 = _multiply_accumulate(rows=4, from_zero=False, fetch=False)
scores_1_fetching = _multiply_accumulate(rows=1, from_zero=True, fetch=True)
scores_2_fetching = _multiply_accumulate(rows=2, from_zero=True, fetch=True)
scores_4_fetching = _multiply_accumulate(rows=4, from_zero=True, fetch=True)
accumulate_1_fetching = _multiply_accumulate(rows=1, from_zero=False, fetch=True)
accumulate_2_fetching = _multiply_accumulate(rows=2, from_zero=False, fetch=True)
accumulate_4_fetching = _multiply_accumulate(rows=4, from_zero=False, fetch=True)
