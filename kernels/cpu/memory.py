"""Arrays over the memory of tensors, made inside of a kernel.

Handing over an address costs a tenth of what a NumPy array does; in a decode step a linear layer takes some 50 us. The
caller keeps the tensor alive and vouches for its size.
"""

from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic

NO_END = 1 << 40
"""For the length of an array that nothing is cut by."""

_CACHE_LINE = 16
"""Float32 of a cache line."""

_KINDS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}


def kind_of(dtype: torch.dtype) -> Any:
    """What tells a kernel the type of the elements (bfloat16 travels as its uint16 bits)."""
    return _KINDS[dtype]


def with_unit_stride(rows: torch.Tensor) -> torch.Tensor:
    """``[T, W]`` with the elements of a row side by side; no copy where they are."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


@intrinsic
def _pointer(typingctx: Any, address: Any, kind: Any) -> Any:
    """A pointer to elements of the type of ``kind``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(types.int64, kind), generate


@njit(inline="always")
def elements(address: int, count: int, kind: Any) -> Any:
    """``count`` elements of the type of ``kind`` at the address ``tensor.data_ptr()``, as a flat array."""
    return carray(_pointer(address, kind), (count,))


@njit(inline="always")
def floats(address: int, count: int) -> Any:
    """``count`` float32."""
    return elements(address, count, np.float32(0))


@njit(inline="always")
def scratch(count: int) -> Any:
    """``count`` float32 of any value from the start of a cache line on: no vector of sixteen lies across two lines."""
    room = np.empty(count + _CACHE_LINE, np.float32)
    return room[(-room.ctypes.data // 4) % _CACHE_LINE :]


@njit(inline="always")
def doubles(address: int, count: int) -> Any:
    """``count`` float64."""
    return elements(address, count, np.float64(0))


@njit(inline="always")
def integers(address: int, count: int) -> Any:
    """``count`` int32."""
    return elements(address, count, np.int32(0))


@njit(inline="always")
def longs(address: int, count: int) -> Any:
    """``count`` int64."""
    return elements(address, count, np.int64(0))
