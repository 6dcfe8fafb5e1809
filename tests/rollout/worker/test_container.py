"""What a worker takes is within the limits of a container, of which the machine's own figures say nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch

from samebit.rollout import RolloutConfig
from samebit.rollout.control.compute_threads import ComputeThreads
from samebit.rollout.memory.pool_sizes import check_room

ALL: int = numba.config.NUMBA_DEFAULT_NUM_THREADS


def container(root: Path, **files: str) -> Path:
    """Write what the system says of a process's group; the root of such a file system."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name.replace("_", ".")).write_text(f"{text}\n")
    return root


@pytest.fixture
def _all_processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where nobody has chosen a number of threads."""
    before = torch.get_num_threads(), numba.get_num_threads()
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(ALL)
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


def threads_of(threads: ComputeThreads) -> tuple[int, int]:
    """Torch's and Numba's, in a thread that was set up."""
    found: list[tuple[int, int]] = []

    def look() -> None:
        threads.set_up()
        found.append((torch.get_num_threads(), numba.get_num_threads()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


needs_two = pytest.mark.skipif(ALL < 2 or numba.config.NUMBA_NUM_THREADS < ALL, reason="one processor")


@needs_two
@pytest.mark.usefixtures("_all_processors")
def test_as_many_threads_as_the_container_has_processors_time_for(tmp_path: Path) -> None:
    root = container(tmp_path, cpu_max="50000 100000")
    assert threads_of(ComputeThreads(root=root)) == (1, 1)
    assert threads_of(ComputeThreads(2, root=root)) == (2, 2)
    assert threads_of(ComputeThreads(root=tmp_path / "none")) == (ALL, ALL)


@needs_two
@pytest.mark.usefixtures("_all_processors")
def test_a_number_that_was_chosen_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = container(tmp_path, cpu_max="50000 100000")
    monkeypatch.setenv("NUMBA_NUM_THREADS", str(ALL))
    assert threads_of(ComputeThreads(root=root)) == (1, ALL)
    monkeypatch.setenv("OMP_NUM_THREADS", str(ALL))
    assert threads_of(ComputeThreads(root=root)) == (ALL, ALL)


def test_pages_that_a_container_has_no_memory_for_are_refused(tmp_path: Path) -> None:
    """The system would end the process when it has written so many."""
    root = container(tmp_path, memory_max=str(1 << 30))
    check_room(RolloutConfig(num_blocks=1024), 1024, 1 << 20, root)
    refused = r"KV blocks need 1.000977 GiB, and this process's container may have 1.000000 \(num_blocks=1025, "
    with pytest.raises(ValueError, match=refused):
        check_room(RolloutConfig(num_blocks=1025), 1025, 1 << 20, root)
    check_room(RolloutConfig(num_blocks=1025), 1025, 1 << 20, tmp_path / "none")
