"""What kernels are made of: parts that are compiled within them."""

from typing import Any

import numpy as np
import pytest

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.part import inlined_part, kernel_part


@inlined_part
def _twice(x: Any) -> Any:
    return x + x


@kernel_part
def _sum_of_doubles(values: Any) -> Any:
    """Add up what an inlined part makes of each value."""
    total = values[0] - values[0]
    for i in range(len(values)):
        total += _twice(values[i])
    return total


def _kernel(values: Any, out: Any) -> None:
    out[0] = _sum_of_doubles(values) + _sum_of_doubles(values[1:])


kernel = compile_kernel(_kernel)


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_a_kernel_calls_parts_of_parts_for_each_dtype(dtype: type) -> None:
    out = np.zeros(1, dtype)
    kernel(np.array([1, 2, 3], dtype), out)
    assert out[0] == 22


def test_a_part_is_no_function_of_python() -> None:
    kernel(np.ones(2, np.float32), np.zeros(1, np.float32))
    for one in (_twice, _sum_of_doubles):
        with pytest.raises(TypeError, match=f"{one.py_func.__name__} is a part of kernels, which compiled code alone"):
            one(np.ones(2, np.float32))
