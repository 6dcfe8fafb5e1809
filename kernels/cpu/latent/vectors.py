"""Copy rows of latents as LLVM vectors (why: see `base.small_tiles`)."""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from samebit.kernels.cpu.base.vectors import accumulate, load_vector, pointer_to, store_vector
from samebit.kernels.layout.grids import LANES


@intrinsic
def widen_vectors(typingctx: Any, source: Any, at: Any, count: Any, target: Any, to: Any) -> Any:
    """Write ``target[to : to + 16 count] = source[at : at + 16 count]`` in float32.

    ``source`` is float32, or bfloat16 as its uint16 bits.
    """
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, first, vectors, out, out_first = args
        start = pointer_to(context, builder, source, given, first)
        end = pointer_to(context, builder, target, out, out_first)

        def copy_one(i: Any, sums: list[Any]) -> list[Any]:
            moved = builder.mul(i, i.type(LANES))
            row = load_vector(builder, builder.gep(start, [moved]), source.dtype)
            store_vector(builder, row, builder.gep(end, [moved]))
            return sums

        accumulate(builder, vectors, [], copy_one)
        return context.get_dummy_value()

    return types.void(source, i64, i64, target, i64), generate


@intrinsic
def copy_elements(typingctx: Any, source: Any, at: Any, count: Any, target: Any, to: Any) -> Any:
    """Write ``target[to : to + count] = source[at : at + count]``, of one type, which do not overlap."""
    i64 = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, first, number, out, out_first = args
        start = pointer_to(context, builder, source, given, first)
        end = pointer_to(context, builder, target, out, out_first)
        size = context.get_abi_sizeof(context.get_value_type(source.dtype))
        cgutils.raw_memcpy(builder, end, start, number, size)
        return context.get_dummy_value()

    return types.void(source, i64, i64, target, i64), generate
