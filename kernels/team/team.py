"""Start the threads of a team, bind each to its processors, and end them.

Invariants
----------
* A team belongs to the thread that makes it: in that thread alone `share_out` finds it.
* The first thread is not bound: threads that it starts later, for other libraries, would inherit that. Where OpenMP
  has bound it, it has left its place before (`openmp_runtimes.leave_place`).
* Where the system refuses to bind a thread, it runs where it did.
"""

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import numpy as np

from samebit.kernels.team.current import set_team
from samebit.kernels.team.places import places_of, siblings_of
from samebit.kernels.team.sharing import LINE, RANGES, SHARE, SIZE, functions

_WORD = 8


def teams_run_here() -> bool:
    """Return whether this system is one that `sharing` is written for."""
    return sys.platform.startswith("linux") and platform.machine() == "x86_64"


class Team:
    """Helps the thread that makes it to compute kernels, until that thread calls `end`.

    Args:
        size: of the team, the calling thread included.

    Raises:
        ValueError: a size below 2.
        RuntimeError: the system can not start a thread.
    """

    def __init__(self, size: int) -> None:
        if size < 2:
            raise ValueError(f"a team has at least two threads, got {size}")
        compiled = functions()
        self._size = size
        self._memory = np.zeros((RANGES + LINE * (size + 1)) // _WORD, np.int64)
        skipped = -self._memory.ctypes.data % LINE // _WORD
        words = self._memory[skipped:]
        words[SHARE // _WORD], words[SIZE // _WORD] = compiled.share, size
        self._address = words.ctypes.data
        self._threads: list[threading.Thread] = []
        try:
            for number in range(1, size):
                self._threads.append(_started(compiled.serve, self._address, number))
        except RuntimeError:  # the system has no thread left
            self.end()
            raise
        set_team(self._address)

    def take_places(self) -> None:
        """Bind each thread to a processor or a core of its own, where the caller may use as many as the team has."""
        allowed = os.sched_getaffinity(0)
        self._place(places_of(allowed, self._size, _libc().sched_getcpu(), siblings_of))

    def leave_places(self) -> None:
        """Let each thread run where the caller may."""
        self._place([frozenset(os.sched_getaffinity(0))] * len(self._threads))

    def end(self) -> None:
        """End the other threads; the caller computes without a team again."""
        set_team(0)
        functions().end(self._address)
        for thread in self._threads:
            thread.join()

    def _place(self, places: list[frozenset[int]]) -> None:
        for thread, place in zip(self._threads, places, strict=False):  # none: all stay where they are
            if thread.native_id is not None:
                with suppress(OSError):
                    os.sched_setaffinity(thread.native_id, place)


def _started(serve: Callable[[int, int], None], team: int, number: int) -> threading.Thread:
    thread = threading.Thread(target=serve, args=(team, number), name=f"samebit-compute-{number}", daemon=True)
    thread.start()
    return thread


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
