"""Choose the processors that each thread of a team is bound to, away from the thread that it works for.

Linux puts a thread that starts or wakes on an idle processor, but right after all were busy it looks at none but the
thread's last one (`SIS_UTIL`, Linux 6.0). So the two threads of a pool stayed on one of two processors, the other idle,
for tens of milliseconds: the first token behind a cached prompt took 25 to 48 ms instead of 20, in one to five requests
after long prompts (Linux 6.18, `perf sched`).

A team with fewer threads than cores is left to the system: which cores other processes want is not known here.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
"""Where Linux lists the processors that share a core with the one of this number."""


def places_of(
    allowed: set[int], threads: int, here: int, siblings: Callable[[int], frozenset[int]]
) -> list[frozenset[int]]:
    """Return the processors of each thread but the first; an empty list unless there are as many processors, or cores.

    Args:
        allowed: the processors that may be used.
        threads: how many the team has, the first included.
        here: the processor that the first thread runs on.
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
    """Parse a list of processors as Linux writes it: ``0-1,4``."""
    ranges = [[int(end) for end in part.split("-")] for part in text.strip().split(",")]
    return frozenset(number for ends in ranges for number in range(ends[0], ends[-1] + 1))
