"""How kernels are compiled: by one process of a machine, for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..patience import HANG

NORMALISE = """
import gc, sys, torch
from samebit.kernels.cpu.base.jit import _Kernel
from samebit.kernels.ops.norm import rms_norm
print("loaded", flush=True)
sys.stdin.readline()
rms_norm(torch.ones(3, 5), torch.ones(5), 1e-6)
kernels = [found for found in gc.get_objects() if isinstance(found, _Kernel)]
print(sum(sum(kernel.stats.cache_misses.values()) for kernel in kernels))
"""


def _process(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", NORMALISE], env=environment, text=True, stdin=pipe, stdout=pipe)


def test_of_two_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    processes = [_process(tmp_path), _process(tmp_path)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    compiled = sorted(int(process.communicate(timeout=HANG)[0]) for process in processes)
    assert compiled == [0, 1]
