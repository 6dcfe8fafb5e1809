"""A kernel that other kernels call is compiled once, by itself, for who calls it from Python and from kernels."""

import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from struct import pack
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from numba import types

from samebit.kernels.cpu.base.callee import address_of

from ..forks import python
from ..patience import HANG

FILE = Path(__file__).with_name("kernel_of_kernels.py")


@pytest.fixture
def kernels(tmp_path: Path) -> Any:
    """Return the module of kernels that call kernels, of which nothing is compiled yet."""
    spec = spec_from_file_location(FILE.stem, shutil.copy(FILE, tmp_path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kernel_calls_another_for_each_dtype_and_brings_nothing_of_it(kernels: Any) -> None:
    for dtype in (np.float64, np.int64):
        values = np.zeros(3, dtype)
        kernels.use(values, 5)
        assert values.tolist() == [6, 11, 11]
    for language in kernels.use.inspect_llvm().values():
        assert "declare i32 @callee." in language
        assert "_add_item" not in language


def test_what_the_called_one_raises_reaches_the_caller(kernels: Any) -> None:
    with pytest.raises(ValueError, match="no values"):
        kernels.use(np.zeros(0), 5)


def test_a_kernel_is_called_at_its_address_with_numbers_that_lie_in_memory(kernels: Any) -> None:
    numbers, out = np.frombuffer(pack("2qf4x", 3, 4, 0.5), np.int64), np.zeros(1)
    address = address_of(kernels.add_read, (types.int64,) * 3)
    kernels.add_reads(address, np.array([1, 2]), numbers.ctypes.data, out.ctypes.data)
    assert out[0] == 3 * 7.5
    with pytest.raises(ValueError, match="below 0"):
        kernels.add_reads(address, np.array([4, -1]), numbers.ctypes.data, out.ctypes.data)
    assert out[0] == 7 * 7.5


def test_a_process_that_loads_a_kernel_loads_what_it_calls(tmp_path: Path) -> None:
    """A process that loads a kernel loads what that calls from the cache, or compiles it again if it is gone."""
    copy = shutil.copy(FILE, tmp_path)

    def run() -> Any:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [*python(), copy], env=environment, check=True, text=True, stdout=subprocess.PIPE, timeout=HANG
        )
        return json.loads(done.stdout)

    assert run() == [[6, 11, 11], [1, 1]]
    assert run() == [[6, 11, 11], [0, 0]]
    for kept in (tmp_path / "cache").rglob("*._add-*.nbi"):
        kept.unlink()
    assert run() == [[6, 11, 11], [0, 1]]


def test_threads_that_compile_a_kernel_and_its_caller_do_not_wait_for_each_other(kernels: Any) -> None:
    ready = Barrier(2)

    def call(kernel: Any, *args: Any) -> None:
        ready.wait(HANG)
        kernel(*args)

    with ThreadPoolExecutor(2) as threads:
        of_both = np.zeros(3), np.zeros(3)
        calls = [threads.submit(call, kernels.use, of_both[0], 5), threads.submit(call, kernels.add, 1, of_both[1], 5)]
        for one in calls:
            one.result(HANG)
    assert kernels.compiled() == [1, 1]
