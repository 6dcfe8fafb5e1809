"""Kernels that call kernels: each is compiled once, by itself, for who calls it from Python and from other kernels."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from numba import types

from ..patience import HANG
from . import kernel_of_kernels
from .kernel_of_kernels import add, compiled, use

FILE = Path(kernel_of_kernels.__file__)


def test_a_kernel_calls_another_for_each_dtype() -> None:
    for dtype in (np.float64, np.int64):
        values = np.zeros(3, dtype)
        use(values, 5)
        assert values.tolist() == [6, 11, 11]


def test_a_kernel_brings_nothing_of_what_it_calls() -> None:
    use(np.zeros(3), 5)
    (language,) = {use.inspect_llvm(one) for one in use.overloads if one[0].dtype == types.float64}  # type: ignore[attr-defined]
    assert "declare i32 @callee." in language
    assert "_add_item" not in language


def test_what_the_called_one_raises_reaches_the_caller() -> None:
    with pytest.raises(ValueError, match="no values"):
        use(np.zeros(0), 5)


def test_a_process_that_loads_a_kernel_loads_what_it_calls(tmp_path: Path) -> None:
    """From where it was compiled, or it compiles that again, if it is gone."""
    copy = Path(shutil.copy(FILE, tmp_path))

    def run() -> Any:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", f"import runpy; runpy.run_module({copy.stem!r}, run_name='__main__')"]
        done = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE, timeout=HANG)
        return json.loads(done.stdout)

    assert run() == [[6, 11, 11], [1, 1]]
    assert run() == [[6, 11, 11], [0, 0]]
    for kept in (tmp_path / "cache").rglob("*._add-*.nbi"):
        kept.unlink()
    assert run() == [[6, 11, 11], [0, 1]]


def test_threads_that_compile_a_kernel_and_its_caller_do_not_wait_for_each_other() -> None:
    ready, before = Barrier(2), compiled()

    def call(kernel: Any, *args: Any) -> None:
        ready.wait(HANG)
        kernel(*args)

    values = np.zeros(3, np.int32)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(call, use, values, 5), threads.submit(call, add, 1, values, 5)]
        for one in calls:
            one.result(HANG)
    assert compiled() == [before[0] + 1, before[1] + 1]
