"""Kernels are made of parts that are compiled within them."""

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
from numba.core.runtime import _nrt_python, rtsys

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


@inlined_part
def _from(values: Any, first: int) -> Any:
    """Lend a view."""
    return values[first:]


@kernel_part
def _pair(values: Any, first: int) -> Any:
    """Lend two views."""
    return _from(values, first), _from(_from(values, 1), first)


@kernel_part
def _ones(count: int) -> Any:
    """Give memory."""
    return np.ones(count, np.float32)


@kernel_part
def _own_from(values: Any, first: int, owned: bool) -> Any:
    """Give a view of what it makes, or of what it is given."""
    return _from(_ones(len(values)), first) if owned else _pair(values, first)[1]


@kernel_part
def _read(values: Any, rounds: int) -> Any:
    """Own some of what it reads."""
    total = np.float32(0)
    for first in range(rounds):
        one, other = _pair(values, first)
        lent, given = _own_from(values, first, False), _own_from(one, first, True)
        made = np.zeros(len(lent), np.float32)
        made[:] = lent
        total += one[0] + other[0] + lent[0] + given[0] + made[0]
    return total


@kernel_part
def _borrow(values: Any, rounds: int) -> Any:
    """Own nothing, and call what does."""
    total = np.float32(0)
    for first in range(rounds):
        one, other = _pair(values, first)
        total += one[0] + other[0] + _read(other, 1)
    return total


def _use_memory(values: Any, rounds: int, out: Any) -> None:
    lent, _ = _pair(values, 0)
    given = _own_from(values, 0, True)
    out[0] = _read(values, rounds) + _borrow(values, rounds) + lent[0] + given[0]


use_memory = compile_kernel(_use_memory)

CLOSURES = Path(__file__).with_name("closures_of_one_maker.py")


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_a_kernel_calls_parts_of_parts_for_each_dtype(dtype: type) -> None:
    out = np.zeros(1, dtype)
    kernel(np.array([1, 2, 3], dtype), out)
    assert out[0] == 22


def test_memory_that_parts_lend_and_give_is_dropped_once() -> None:
    values, out = np.arange(20, dtype=np.float32), np.zeros(1, np.float32)
    _nrt_python.memsys_enable_stats()
    try:
        use_memory(values, 5, out)
        held = sys.getrefcount(values)
        before = rtsys.get_allocation_stats()
        for _ in range(100):
            use_memory(values, 5, out)
        after = rtsys.get_allocation_stats()
    finally:
        _nrt_python.memsys_disable_stats()
    assert out[0] == 166
    assert sys.getrefcount(values) == held
    assert after.mi_alloc - before.mi_alloc == after.mi_free - before.mi_free > 0
    assert after.alloc - before.alloc == after.free - before.free


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
    """A kernel shows other kernels nothing of what it is made of: what is weak in object code is replaced by what has
    its name in a kernel loaded before.
    """
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
