"""Computes as a processor with AVX-512 that multiplies pairs (AVX512-BF16) for a run of tests, on one that does not.

``PYTHONPATH=tests/processors NUMBA_CACHE_DIR=<an empty folder> pytest -p emulated_pairs ...``. The code around the
instructions is the library's own, and its kernels are those of wide registers.

Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS: to each lane first the product of the
odd elements is added, then that of the even ones; each time numbers too small for the exponent are 0.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from samebit.kernels.cpu.base import vectors

vectors.REGISTERS = 32  # before anything else reads it

from samebit.kernels.cpu.gemm import dots_vectors  # noqa: E402


def _normal(builder: Any, numbers: Any) -> Any:
    """Return zeros for what is too small for the exponent, as these instructions do."""
    bits = ir.VectorType(ir.IntType(32), numbers.type.count)
    exponent = builder.and_(builder.bitcast(numbers, bits), ir.Constant(bits, [0x7F800000] * bits.count))
    small = builder.icmp_unsigned("==", exponent, ir.Constant(bits, None))
    return builder.select(small, ir.Constant(numbers.type, None), numbers)


def _halves(builder: Any, pairs: Any) -> list[Any]:
    """Return the odd and the even elements of pairs as float32."""
    bits = ir.VectorType(ir.IntType(32), pairs.type.count)
    words = builder.bitcast(pairs, bits)
    odd = builder.and_(words, ir.Constant(bits, [0xFFFF0000] * bits.count))
    even = builder.shl(words, ir.Constant(bits, [16] * bits.count))
    return [_normal(builder, builder.bitcast(half, pairs.type)) for half in (odd, even)]


def dot(builder: Any, pairs: Any, others: Any, total: Any) -> Any:
    """Do as `dots_vectors.dot` does."""
    for half, other in zip(_halves(builder, pairs), _halves(builder, others), strict=True):
        total = _normal(builder, vectors.fma(builder, half, other, total))
    return total


dots_vectors.dot = dot
dots_vectors.available = lambda: True

from samebit.kernels.cpu.latent import dots  # noqa: E402


def dot_at(builder: Any, pairs: Any, total: Any, key: dots.Key, place: int) -> Any:
    """Do as `latent.dots.dot_at` does."""
    pointer, distance, steps = key
    if steps:
        distance = builder.mul(distance, distance.type(steps))
        pointer = builder.gep(builder.bitcast(pointer, ir.IntType(8).as_pointer()), [distance])
    word = builder.gep(builder.bitcast(pointer, ir.FloatType().as_pointer()), [ir.IntType(64)(place)])
    return dot(builder, pairs, vectors.splat(builder, builder.load(word, align=2), total.type), total)


def rounded(builder: Any, vector: Any) -> Any:
    """Do as `latent.dots._rounded` does."""
    room = cgutils.alloca_once(builder, ir.VectorType(ir.IntType(16), vector.type.count))  # not anew in each loop
    vectors.store_vector(builder, _normal(builder, vector), room, types.uint16)
    return builder.load(room)


dots.DOTS = True
dots.dot_at = dot_at
dots._rounded = rounded
