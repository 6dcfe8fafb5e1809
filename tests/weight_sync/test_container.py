"""What a container allows is read from its control groups, of Linux's first kind and second."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebit.weight_sync.transports.container import memory_left, memory_limit, processors
from samebit.weight_sync.transports.shared_buckets import SharedBuckets

GIB = 1 << 30
FIRST_KIND = "5:memory:/docker/c\n4:cpuacct,cpu:/docker/c\n1:name=systemd:/docker/c\n"
NO_LIMIT = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "0"}


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write what the system says of a process's groups, and of each group; return the root of such a file system."""
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert (memory_limit(tmp_path), memory_left(tmp_path), processors(tmp_path)) == (None, None, None)


def test_a_word_is_no_limit(tmp_path: Path) -> None:
    root = system(tmp_path, "0::/a", {"a/memory.max": "max", "a/memory.current": "5", "a/cpu.max": "max 100000"})
    assert (memory_limit(root), memory_left(root), processors(root)) == (None, None, None)


def test_the_second_kind_as_a_container_sees_it(tmp_path: Path) -> None:
    files = {
        "memory.max": f"{8 * GIB}",
        "memory.current": f"{7 * GIB}",
        "memory.stat": f"anon {4 * GIB}\ninactive_file {2 * GIB}",
        "cpu.max": "250000 100000",
    }
    root = system(tmp_path, "0::/", files)
    assert (memory_limit(root), memory_left(root), processors(root)) == (8 * GIB, 3 * GIB, 3)


def test_the_least_of_the_groups_around_a_process_counts(tmp_path: Path) -> None:
    files = {
        **{"a/memory.max": "900", "a/memory.current": "800", "a/cpu.max": "400000 100000"},
        **{"a/b/memory.max": "500", "a/b/memory.current": "100", "a/b/cpu.max": "100000 50000"},
        **{"a/b/c/memory.max": "max", "a/b/c/memory.current": "100"},
        **{"a/other/memory.max": "1", "a/other/cpu.max": "1000 100000"},
    }
    root = system(tmp_path, "0::/a/b/c", files)
    assert (memory_limit(root), memory_left(root), processors(root)) == (500, 100, 2)


@pytest.mark.parametrize("seen", ["", "docker/c/"], ids=["its own group at the top", "all groups"])
def test_the_first_kind(seen: str, tmp_path: Path) -> None:
    files = {
        f"memory/{seen}memory.limit_in_bytes": f"{8 * GIB}",
        f"memory/{seen}memory.usage_in_bytes": f"{7 * GIB}",
        f"memory/{seen}memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GIB}",
        f"cpu/{seen}cpu.cfs_quota_us": "400000",
        f"cpu/{seen}cpu.cfs_period_us": "100000",
    }
    root = system(tmp_path, FIRST_KIND, files)
    assert (memory_limit(root), memory_left(root), processors(root)) == (8 * GIB, 3 * GIB, 4)


def test_the_first_kind_without_a_limit(tmp_path: Path) -> None:
    files = {f"memory/{name}": text for name, text in NO_LIMIT.items()}
    root = system(tmp_path, FIRST_KIND, files | {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"})
    assert processors(root) is None
    assert (memory_limit(root) or 0) > 1 << 62


def test_no_room_for_shared_memory_in_a_container(tmp_path: Path) -> None:
    """Memory beyond a container's limit is refused: the system would end the process, whatever its machine has."""
    root = system(tmp_path, "0::/", {"memory.max": "9000", "memory.current": "8000"})
    with pytest.raises(OSError, match=r"no room for 2048 bytes of shared memory: 1000 bytes are available"):
        SharedBuckets.create(1024, root)
    (root / "sys/fs/cgroup/memory.current").write_text("100")
    SharedBuckets.create(1024, root)
