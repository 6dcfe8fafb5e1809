"""What kernels are made of: parts that are compiled within them."""

import json
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types
from numba.core.registry import CPUDispatcher

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.part import OPTIONS, KernelCompiler, inlined_part, kernel_part

from ..campaign import long


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

CLOSURES = Path(__file__).with_name("closures_of_one_maker.py")


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


def test_a_part_is_compiled_once_for_a_variable_that_begins_as_a_constant() -> None:
    @kernel_part
    def doubled(value: int) -> int:
        return value + value

    def walk(end: int) -> int:
        at = 0
        while at < end:
            at += doubled(at) + 1
        return at

    assert CPUDispatcher(walk, targetoptions=OPTIONS, pipeline_class=KernelCompiler)(5) == 13
    assert list(doubled.overloads) == [(types.int64,)]


def test_a_kernel_shows_other_kernels_nothing_of_what_it_is_made_of(tmp_path: Path) -> None:
    """What is weak in object code is replaced by what has its name in a kernel loaded before."""
    spec = spec_from_file_location("closures", shutil.copy(CLOSURES, tmp_path))
    assert spec is not None
    assert spec.loader is not None
    closures = module_from_spec(spec)
    spec.loader.exec_module(closures)
    assert closures.run("first") == [1.0, 1.0, 1.0]
    (language,) = closures.KERNELS["first"].inspect_llvm().values()
    assert "define internal" in language
    assert "define linkonce_odr" not in language


@long
def test_kernels_compiled_by_two_processes_keep_their_own_closures(tmp_path: Path) -> None:
    copy = shutil.copy(CLOSURES, tmp_path)

    def run(*names: str) -> Any:
        done = subprocess.run([sys.executable, copy, *names], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    one, two = [1.0] * 3, [2.0] * 3
    assert run("first") == [one]
    assert run("second") == [two]
    assert run("first", "second") == [one, two]
