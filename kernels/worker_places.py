"""Give each worker of an OpenMP pool a processor of its own, beside the thread that it works for.

Linux puts a thread that starts or wakes on an idle processor, but right after all were busy it looks at none but the
thread's last one (`SIS_UTIL`, Linux 6.0). So the two threads of a pool stayed on one of two processors, the other idle,
for tens of milliseconds: the first token behind a cached prompt took 25 to 48 ms instead of 20, in one to five requests
after long prompts (Linux 6.18, `perf sched`).

Invariants
----------
* The calling thread stays free, so that threads which it starts later, for whatever library, may run anywhere.
* Fewer threads than cores are left to the system: which cores other processes want is not known here.
* A place is a wish: where the system refuses it, the worker runs where it did.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types

from samebit.kernels.openmp import num_threads

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
"""Where Linux says which processors share a core with one of this number."""

_BITS = 64

_set_affinity = types.ExternalFunction("sched_setaffinity", types.int32(types.int32, types.uintp, types.uintp))
_this_thread = types.ExternalFunction("pthread_self", types.uintp())


def bind_workers() -> None:
    """Start the workers of the calling thread's pool, and bind each to a processor or a core for as long as it lives.

    Nothing is done where the pool has not as many threads as there are processors, or cores, that the calling thread
    may use, nor outside of Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    allowed, threads = os.sched_getaffinity(0), num_threads()
    places = places_of(allowed, threads, _libc().sched_getcpu(), siblings_of)
    if not places:
        return
    words = max(allowed) // _BITS + 1
    given = np.zeros((threads, words), np.uint64)  # the first item is the calling thread's
    for mask, place in zip(given[1:], places, strict=True):
        for processor in place:
            mask[processor // _BITS] |= np.uint64(1) << np.uint64(processor % _BITS)
    _run_in_each(threads, np.array([threading.get_ident(), words, given.ctypes.data], np.uintp))


def places_of(
    allowed: set[int], threads: int, here: int, siblings: Callable[[int], frozenset[int]]
) -> list[frozenset[int]]:
    """Return the processors of each worker of a pool; none where its threads are not as many as processors or cores.

    Args:
        allowed: the processors that may be used.
        threads: the workers and the thread that they work for.
        here: where this one runs.
        siblings: returns the processors of a processor's core, itself included.
    """
    processors = {frozenset((processor,)) for processor in allowed}
    cores = {siblings(processor) & allowed for processor in allowed}
    for parts in (processors, cores):
        if 1 < len(parts) == threads:
            return sorted((part for part in parts if here not in part), key=min)[: threads - 1]
    return []


@cache
def siblings_of(processor: int) -> frozenset[int]:
    """Return the processors that share a core with this one, itself included."""
    path = Path(SIBLINGS.format(processor))
    return processors_in(path.read_text()) if path.exists() else frozenset((processor,))


def processors_in(text: str) -> frozenset[int]:
    """Return the processors of a list as Linux writes it: ``0-1,4``."""
    ranges = [[int(end) for end in part.split("-")] for part in text.strip().split(",")]
    return frozenset(number for ends in ranges for number in range(ends[0], ends[-1] + 1))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _bind_worker(item_at: Any, _sizes: Any, _steps: Any, given_at: Any) -> None:
    """Bind the thread that computes this item to its place, unless it is the one that they all work for."""
    item, given = numba.carray(item_at, 1)[0], numba.carray(given_at, 3)
    owner, words, masks = given[0], given[1], given[2]
    if _this_thread() != owner:
        _set_affinity(0, 8 * words, masks + 8 * words * item)


def _run_in_each(threads: int, given: Any) -> None:
    """Have each thread of the pool call `_bind_worker` with its number."""
    numbers = [np.array([number], np.uintp) for number in (0, threads, 1)]  # the first, how many, how far apart
    first, count, step = (number.ctypes.data for number in numbers)
    _parallel_for()(_compiled().address, first, count, step, given.ctypes.data, 0, 1, threads)


@cache
def _compiled() -> Any:
    numbers = types.CPointer(types.uintp)
    return numba.cfunc(types.void(numbers, numbers, numbers, numbers), cache=True)(_bind_worker)


@cache
def _parallel_for() -> Callable[..., None]:
    """Return what starts a `prange` of Numba: a function, its arguments, their number, steps, data; threads last."""
    address = import_module("numba.np.ufunc.omppool").parallel_for
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)(address)
