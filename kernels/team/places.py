"""Choose a processor for each thread of a team, beside the one that it works for.

Linux puts a thread that starts or wakes on an idle processor, but right after all were busy it looks at none but the
thread's last one (`SIS_UTIL`, Linux 6.0). So the two threads of a pool stayed on one of two processors, the other idle,
for tens of milliseconds: the first token behind a cached prompt took 25 to 48 ms instead of 20, in one to five requests
after long prompts (Linux 6.18, `perf sched`).

Fewer threads than cores are left to the system: which cores other processes want is not known here.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
"""Where Linux says which processors share a core with one of this number."""


def places_of(
    allowed: set[int], threads: int, here: int, siblings: Callable[[int], frozenset[int]]
) -> list[frozenset[int]]:
    """Return the processors of each thread of a team but the first; none where processors, or cores, are not as many.

    Args:
        allowed: the processors that may be used.
        threads: all of the team.
        here: where the first one runs.
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
