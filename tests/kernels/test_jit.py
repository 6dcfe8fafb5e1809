"""Kernels are compiled by one process of a machine, for all of them."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from samebit.kernels import openmp
from samebit.kernels.openmp_runtimes import runtimes

from ..forks import python
from ..patience import HANG

SHARED = """
import numpy as np
from samebit.kernels.cpu.base.jit import compile_kernel
def write(out):
    out[0] = 1
kernel = compile_kernel(write)
"""

AT_ONCE = """
import os, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from shared import kernel
waiting, ready = os.pipe()
for _ in range(4):
    if not os.fork():
        os.close(ready)
        os.read(waiting, 1)
        kernel(np.zeros(1))
        os.write(1, b"%d\\n" % sum(kernel.stats.cache_misses.values()))
        os._exit(0)
os.close(ready)
for _ in range(4):
    os.wait()
"""


def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    """One of the processes that start together, here forks of one that has loaded, compiles for all."""
    (tmp_path / "shared.py").write_text(SHARED)
    command = [*python(), "-c", AT_ONCE, str(tmp_path)]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=HANG)
    assert sorted(map(int, done.stdout.split())) == [0, 0, 0, 1]


ONCE = """
import ctypes, struct, sys
import numpy as np
ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24))  # else root may write to any file
sys.path.insert(0, sys.argv[1])
from shared import kernel
out = np.zeros(1)
kernel(out)
print(int(out[0]))
"""


def test_a_lock_of_another_user_keeps_no_kernel_from_compiling(tmp_path: Path) -> None:
    """A lock that another user left, as root does in a folder that is not root's, keeps no kernel from compiling."""
    (tmp_path / "shared.py").write_text(SHARED)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [*python(), "-c", ONCE, str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(command, check=True, env=environment, text=True, stdout=subprocess.PIPE, timeout=HANG)
        assert done.stdout == "1\n"
        (lock,) = tmp_path.rglob("*.lock")
        lock.chmod(0o444)


WITHOUT_LOCKS = """
import errno, fcntl, os, sys
import numpy as np
def flock(file, operation):
    code = getattr(errno, sys.argv[2])
    raise OSError(code, os.strerror(code))
fcntl.flock = flock
sys.path.insert(0, sys.argv[1])
from shared import kernel
out = np.zeros(1)
kernel(out)
print(int(out[0]))
"""


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks_keeps_no_kernel_from_compiling(tmp_path: Path, error: str) -> None:
    """NFS without its daemon of locks refuses one (ENOLCK), as some file systems of users do (EOPNOTSUPP)."""
    (tmp_path / "shared.py").write_text(SHARED)
    command = [*python(), "-c", WITHOUT_LOCKS, str(tmp_path), error]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=HANG)
    assert done.stdout == "1\n"


NOWHERE = """
import sys
sys.path.insert(0, sys.argv[1])
try:
    import shared
except OSError as error:
    print(error)
"""


def test_where_compiled_code_can_be_kept_nowhere_the_error_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text(SHARED)
    command = [*python(), "-c", NOWHERE, str(tmp_path)]
    environment = {**os.environ, "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": ""}
    done = subprocess.run(command, check=True, env=environment, text=True, stdout=subprocess.PIPE, timeout=HANG)
    assert done.stdout == (
        f"no folder to keep the compiled code of {tmp_path}/shared.py in: neither the __pycache__ beside it nor the "
        "user's cache folder can be written, NUMBA_CACHE_DIR=''; set NUMBA_CACHE_DIR to a folder that can be written\n"
    )


PART = """
from samebit.kernels.cpu.base.part import kernel_part
from made.constant import VALUE
@kernel_part
def part():
    return VALUE
"""

KERNEL = """
import numpy as np
from samebit.kernels.cpu.base.jit import compile_kernel
from made.part import (  # in brackets
    part,
)
def write(out):
    out[0] = part()
kernel = compile_kernel(write)
def run():
    out = np.zeros(1)
    kernel(out)
    print(int(out[0]), sum(kernel.stats.cache_misses.values()), flush=True)
"""

RUN = """
import os, sys
from pathlib import Path
import samebit.kernels.cpu.base.jit
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
for value in (1, 1, 2):
    Path(sys.argv[1], "made", "constant.py").write_text(f"VALUE = {value}")
    if not os.fork():
        from made.kernel import run
        run()
        os._exit(0)
    os.wait()
"""


def test_a_kernel_is_compiled_anew_when_a_file_that_it_takes_in_has_changed(tmp_path: Path) -> None:
    """A kernel is compiled anew when a file that it takes in has changed. Numba looks at the kernel's own file alone,
    and the next process would run old code.
    """
    made = tmp_path / "made"
    made.mkdir()
    (made / "part.py").write_text(PART)
    (made / "kernel.py").write_text(KERNEL)
    command = [*python(), "-c", RUN, str(tmp_path)]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=HANG)
    assert done.stdout.splitlines() == ["1 1", "1 0", "2 1"]


NAMED = """
from typing import NamedTuple
import numpy as np
from samebit.kernels.cpu.base.jit import compile_kernel
class {name}(NamedTuple):
    first: int
def write(given, out):
    out[0] = given.first
kernel = compile_kernel(write)
def run():
    out = np.zeros(1)
    kernel({name}(3), out)
    print(int(out[0]), sum(kernel.stats.cache_misses.values()), flush=True)
"""

RUN_NAMED = """
import os, sys
from pathlib import Path
import samebit.kernels.cpu.base.jit
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
for name in ("Before", "Before", "After"):
    Path(sys.argv[1], "named.py").write_text(sys.argv[2].format(name=name))
    if not os.fork():
        from named import run
        run()
        os._exit(0)
    os.wait()
"""


def test_a_kernel_is_compiled_anew_when_the_class_of_an_argument_is_gone(tmp_path: Path) -> None:
    """A kernel is compiled anew when the class of an argument is gone, as Numba can not read its index then."""
    command = [*python(), "-c", RUN_NAMED, str(tmp_path), NAMED]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=HANG)
    assert done.stdout.splitlines() == ["3 1", "3 0", "3 1"]


def test_torch_lends_numba_its_openmp_runtime_where_the_system_has_none() -> None:
    """Torch lends Numba each of its copies of OpenMP in turn where the system has none; an error names what is missing
    and what to do.
    """
    asked: list[int] = []
    copies = openmp._copies_of_torch()
    assert copies, "torch for Linux brings one along"

    def found_at(turn: int) -> None:
        asked.append(turn)
        if len(asked) <= turn:
            raise ImportError("libgomp.so.1: cannot open shared object file")

    openmp.load_openmp(lambda: found_at(0), lambda: pytest.fail("the system has one"))
    asked.clear()
    openmp.load_openmp(lambda: found_at(1), lambda: copies)
    assert len(asked) == 2
    with pytest.raises(ImportError, match=r"Numba \(libgomp.so.1: cannot open .*\): install your system's libgomp"):
        openmp.load_openmp(lambda: found_at(9), list)
    asked.clear()
    with pytest.raises(ImportError, match=r"or let torch's copy stand in, .*LD_LIBRARY_PATH=~/.local/lib/gomp$"):
        openmp.load_openmp(lambda: found_at(9), lambda: copies)


def test_another_system_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another system is refused when samebit is imported, before a runtime is missed that is not for it."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ImportError, match="samebit runs on Linux, on x86-64; this system is 'darwin': use a Linux mac"):
        runpy.run_path(openmp.__file__)


def test_no_parallel_operation_of_the_trainer_holds_another_one() -> None:
    """No parallel operation of the trainer holds another one. (Numba, whose pool starts with the first kernel, allows
    it to the thread in which that is.)
    """
    script = """
from samebit.kernels.openmp_runtimes import runtimes
import torch
from samebit.kernels.ops.linear import linear
linear(torch.randn(3, 8), torch.randn(4, 8))
print([runtime.omp_get_max_active_levels() for runtime in runtimes()])
"""
    done = subprocess.run([*python(), "-c", script], check=True, text=True, stdout=subprocess.PIPE)
    assert set(json.loads(done.stdout)) == {1}


def test_the_trainer_keeps_its_number_of_threads() -> None:
    """The trainer keeps its number of threads. (Numba, whose pool starts with the first kernel, sets it to its own.)"""
    script = """
import torch
torch.set_num_threads(1)
from samebit.kernels.ops.linear import linear
linear(torch.randn(3, 8), torch.randn(4, 8))
print(torch.get_num_threads())
"""
    done = subprocess.run([*python(), "-c", script], check=True, text=True, stdout=subprocess.PIPE)
    assert int(done.stdout) == 1


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("name", [b"my env", b"caf\xe9"], ids=["a space", "not UTF-8"])
def test_a_runtime_may_lie_in_a_folder_of_any_name(name: bytes, gone: bool, tmp_path: Path) -> None:
    """OpenMP's runtime is found in a folder of any name, as an environment's may be, even where the system calls its
    file deleted because it was replaced since.
    """
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    copy = shutil.copy(runtimes()[0]._name, folder / "libgomp-of-another-package.so")
    script = """
import ctypes, os, sys
ctypes.CDLL(sys.argv[1])
if sys.argv[2] == "True":
    os.remove(sys.argv[1])
import torch
from samebit.kernels.ops.linear import linear
print(len(linear(torch.randn(3, 8), torch.randn(4, 8))))
"""
    done = subprocess.run([*python(), "-c", script, copy, str(gone)], check=True, text=True, stdout=subprocess.PIPE)
    assert int(done.stdout) == 3
