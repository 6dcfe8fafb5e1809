"""Find the OpenMP runtimes of this process, and on which processors they have bound threads.

Where OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY is set, libgomp binds its workers each to a place, and to the first
place the thread that loads it and, at its first parallel operation, each other one. It knows what it has bound; the
rest of the process does not: what a bound thread starts, threads of Python and processes, has its one place, and what
counts processors there (Numba, another copy of libgomp) finds those of one place.

Intel's and LLVM's runtimes, of which one answers for all where it is preloaded, do so by KMP_AFFINITY.

For Linux: without its list of what is loaded nothing is found and nothing done.
"""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Names those of the environment that have threads bound."""

_MAPS = Path("/proc/self/maps")
_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)[^/]*$")


@cache
def runtimes() -> tuple[ctypes.CDLL, ...]:
    """List every runtime of this process that can pause (OpenMP 5.0), as of the first call; none where there is no such
    list."""
    return _loaded()


@cache
def places() -> frozenset[int]:
    """Return the processors of all places of `runtimes`; none where these bind no thread."""
    return _processors_of(runtimes())


@contextmanager
def on_all_places() -> Iterator[frozenset[int]]:
    """Let the calling thread run, inside the block, on the processors of all places of the runtimes that are loaded
    now; the block is given them, none where nothing is bound."""
    wide = _processors_of(_loaded())
    if not wide:
        yield wide
        return
    bound = os.sched_getaffinity(0)
    _run_on(wide)
    try:
        yield wide
    finally:
        _run_on(bound)


def leave_place() -> None:
    """Let the calling thread, and what it starts from now on, run on all `places`.

    A runtime binds a thread once: at its first parallel operation or, as here, when it is asked for the thread's place.
    """
    for runtime in runtimes():
        runtime.omp_get_place_num()
    if places():
        _run_on(places())


def _loaded() -> tuple[ctypes.CDLL, ...]:
    if not _MAPS.exists():
        return ()
    lines = os.fsdecode(_MAPS.read_bytes()).splitlines()
    mapped = (line.split(maxsplit=5)[-1] for line in lines if _RUNTIME.search(line))
    paths = sorted({path for path in mapped if Path(path).is_file()})  # else it was replaced: "... (deleted)"
    return tuple(lib for lib in map(ctypes.CDLL, paths) if hasattr(lib, "omp_pause_resource_all"))


def _processors_of(runtimes: tuple[ctypes.CDLL, ...]) -> frozenset[int]:
    found: set[int] = set()
    for runtime in runtimes:
        for place in range(runtime.omp_get_num_places()):
            numbers = (ctypes.c_int * runtime.omp_get_place_num_procs(place))()
            runtime.omp_get_place_proc_ids(place, numbers)
            found.update(numbers)
    return frozenset(found)


def _run_on(processors: set[int] | frozenset[int]) -> None:
    with suppress(OSError):  # the system took them from the process since: the thread runs where it did
        os.sched_setaffinity(0, processors)
