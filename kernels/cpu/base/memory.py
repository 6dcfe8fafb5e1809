"""Make arrays over the memory of tensors, inside of a kernel, and copy their elements.

Handing over an address costs a tenth of what a NumPy array does; in a decode step a linear layer takes some 50 us. The
caller keeps the tensor alive and vouches for its size.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from samebit.kernels.cpu.base.part import inlined_part
from samebit.kernels.cpu.base.vectors import pointer_to
from samebit.kernels.layout.grids import CACHE_LINE
from samebit.kernels.layout.shape_checks import check_dtype_of_cpu

NO_END = 1 << 40
"""Stands for the length of an array that nothing is cut by."""

_LINE = CACHE_LINE // 4
"""A cache line holds this many float32."""

_KINDS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}


def kind_of(dtype: torch.dtype) -> Any:
    """Return a number of the elements' type, by which Numba knows it (bfloat16 travels as its uint16 bits).

    Raises:
        TypeError: a dtype that the kernels of the CPU do not compute in.
    """
    if dtype not in _KINDS:
        check_dtype_of_cpu(dtype)
    return _KINDS[dtype]


def with_unit_stride(rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return ``[T, W]`` with the elements of a row side by side and behind those of the row before, no copy where they
    are, and how far apart its rows are. (One stride alone takes twice as long as both.)"""
    (stride, step), width = rows.stride(), rows.shape[1]
    return (rows, stride) if step == 1 and stride >= width else (rows.contiguous(), width)


@intrinsic
def pointer(typingctx: Any, address: Any, kind: Any) -> Any:
    """Make a pointer to elements of the type of ``kind``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(types.int64, kind), generate


@intrinsic(prefer_literal=True)
def read(typingctx: Any, address: Any, count: Any, kind: Any) -> Any:
    """Read a tuple of ``count`` numbers, a constant, of the type of ``kind``, each from eight bytes of its own.

    It costs a call from Python a fraction of what a tuple among its arguments does.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None
    number = types.unliteral(kind)
    numbers = types.UniTuple(number, count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer_type = context.get_value_type(number).as_pointer()
        places = [builder.add(args[0], ir.Constant(args[0].type, 8 * place)) for place in range(numbers.count)]
        values = [builder.load(builder.inttoptr(place, pointer_type)) for place in places]
        return context.make_tuple(builder, signature.return_type, values)

    return numbers(types.int64, count, number), generate


@inlined_part
def elements(address: int, count: int, kind: Any) -> Any:
    """Make a flat array of ``count`` elements of the type of ``kind`` at the address ``tensor.data_ptr()``."""
    return carray(pointer(address, kind), (count,))


@inlined_part
def floats(address: int, count: int) -> Any:
    """Make an array of ``count`` float32."""
    return elements(address, count, np.float32(0))


@inlined_part
def scratch(count: int) -> Any:
    """Allocate ``count`` float32 from the start of a cache line on: no vector of sixteen lies across two lines."""
    room = np.empty(count + _LINE, np.float32)
    return room[(-room.ctypes.data // 4) % _LINE :]


@inlined_part
def copy(source: Any, target: Any) -> None:
    """Copy the elements of an array, as vectors: the assignment of a slice takes two cycles for each of them."""
    for i in range(len(source)):
        target[i] = source[i]


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


@inlined_part
def whole_lines(count: int) -> int:
    """Return ``count`` float32 in whole cache lines."""
    return (count + _LINE - 1) // _LINE * _LINE


@inlined_part
def doubles(address: int, count: int) -> Any:
    """Make an array of ``count`` float64."""
    return elements(address, count, np.float64(0))


@inlined_part
def integers(address: int, count: int) -> Any:
    """Make an array of ``count`` int32."""
    return elements(address, count, np.int32(0))


@inlined_part
def rows_at(address: int, rows: int, width: int, kind: Any) -> Any:
    """Make an array ``[rows, width]`` of elements of the type of ``kind``."""
    return carray(pointer(address, kind), (rows, width))


@inlined_part
def table(address: int, rows: int, columns: int) -> Any:
    """Make an array of int32 of two dimensions."""
    return rows_at(address, rows, columns, np.int32(0))


@inlined_part
def longs(address: int, count: int) -> Any:
    """Make an array of ``count`` int64."""
    return elements(address, count, np.int64(0))
