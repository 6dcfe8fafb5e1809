"""Measure how much of the machine other processes used while something ran."""

import os
import time
from collections.abc import Callable
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Numbers the columns of /proc/stat that are not work: idle, and waiting for a disk."""


class Neighbours:
    """Measures other processes from its construction on; without /proc/stat none. `own_seconds`: our CPU time."""

    def __init__(self, own_seconds: Callable[[], float] = time.process_time) -> None:
        self._own_seconds = own_seconds
        self._began = time.perf_counter()
        self._busy = _busy_seconds()
        self._own = own_seconds()

    def share(self) -> float:
        """Return the share of all cores that went to other processes since then."""
        others = _busy_seconds() - self._busy - (self._own_seconds() - self._own)
        return max(0.0, others / ((time.perf_counter() - self._began) * (os.cpu_count() or 1)))


def _busy_seconds() -> float:
    """Return the seconds in which cores worked, for any process, since boot (stolen time counts as work)."""
    if not _STAT.exists():
        return time.process_time()
    columns = [int(column) for column in _STAT.read_text().splitlines()[0].split()[1:9]]
    return sum(ticks for i, ticks in enumerate(columns) if i not in _IDLE) / os.sysconf("SC_CLK_TCK")
