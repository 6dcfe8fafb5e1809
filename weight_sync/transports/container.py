"""Read what a container leaves to this process: the limits of its control groups, of Linux's first kind and second.

Invariants
----------
* A group's limit holds for those inside of it: the least of all groups from this process's to the outermost counts.
* What is not there, or can not be read, is no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_CACHED = ("inactive_file", "total_inactive_file")
"""Names what a group's use counts though the system gives it up when memory is asked for: contents of files."""


def memory_limit(root: Path = ROOT) -> int | None:
    """Return how many bytes this process's groups may have; None for no limit. root: of the file system."""
    return min((limit for _, limit in _limited(root)), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Return how many bytes more this process's groups may take; None for no limit."""
    return min((limit - _used(group) for group, limit in _limited(root)), default=None)


def processors(root: Path = ROOT) -> int | None:
    """Return how many processors' time this process's groups get, rounded up; None for no limit."""
    shares = (share for group in _groups("cpu", root) if (share := _share(group)) is not None)
    return min((-(-quota // period) for quota, period in shares), default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of the groups that this process is in, with those around them."""
    top = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            mounts = [top, top / "unified"]
        else:
            mounts = [top / controller] if controller in controllers.split(",") else []
        inner = PurePosixPath(path.lstrip("/"))
        yield from (mount / group for mount in mounts for group in (inner, *inner.parents))


def _limited(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the groups that have a limit of memory, with it."""
    for group in _groups("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            for limit in _numbers(group / name):
                yield group, limit


def _used(group: Path) -> int:
    used = sum(sum(_numbers(group / name)) for name in ("memory.current", "memory.usage_in_bytes"))
    counts = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    return used - max(int(counts.get(name, 0)) for name in _CACHED)


def _share(group: Path) -> tuple[int, int] | None:
    """Return the microseconds that a group may compute in a period, and those of the period."""
    found = _numbers(group / "cpu.max")
    found = found or [*_numbers(group / "cpu.cfs_quota_us"), *_numbers(group / "cpu.cfs_period_us")]
    return (found[0], found[1]) if len(found) == 2 and min(found) > 0 else None


def _numbers(path: Path) -> list[int]:
    """Return the numbers in a file; none where one is a word, which says that there is no limit."""
    words = _text(path).split()
    return [int(word) for word in words] if all(word.lstrip("-").isdecimal() for word in words) else []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
