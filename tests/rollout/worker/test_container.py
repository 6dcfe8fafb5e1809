"""A worker takes what is within the limits of a container, of which the machine's own figures say nothing."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numba
import pytest
import torch

from samebit.rollout import RolloutConfig, RolloutWorker
from samebit.rollout.control.compute_threads import ComputeThreads
from samebit.rollout.memory import pool_sizes
from samebit.rollout.memory.pool_sizes import check_room
from samebit.rollout.memory.shape import MemoryShape

from ...exactness.families import bound_model, make_model

ALL: int = numba.config.NUMBA_DEFAULT_NUM_THREADS


def container(root: Path, **files: str) -> Path:
    """Write what the system says of a process's group; return the root of such a file system."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name.replace("_", ".")).write_text(f"{text}\n")
    return root


@pytest.fixture
def _all_processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use all processors, as where nobody has chosen a number of threads."""
    before = torch.get_num_threads(), numba.get_num_threads()
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(ALL)
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


def threads_of(threads: ComputeThreads) -> tuple[int, int]:
    """Return torch's and Numba's threads, in a thread that was set up."""
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
    """Pages that a container has no memory for are refused: the system would end the process when it has written so
    many.
    """
    root = container(tmp_path, memory_max=str(1 << 30))
    check_room(RolloutConfig(num_blocks=1024), 1024, 1 << 20, 0, 0, root)
    refused = r"KV blocks need 1.000977 GiB, and this process's container may have 1.000000 \(num_blocks=1025, "
    with pytest.raises(ValueError, match=refused):
        check_room(RolloutConfig(num_blocks=1025), 1025, 1 << 20, 0, 0, root)
    check_room(RolloutConfig(num_blocks=1025), 1025, 1 << 20, 0, 0, tmp_path / "none")


def test_so_are_states_of_recurrent_layers_beside_them(tmp_path: Path) -> None:
    root = container(tmp_path, memory_max=str(1 << 30))
    config = RolloutConfig(num_blocks=512, max_num_seqs=8)
    check_room(config, 512, 1 << 20, 1 << 28, 1 << 28, root)
    refused = re.escape(
        "512 KV blocks + live states of recurrent layers + cached states need 0.500000 + 0.250000 + 0.250977 = "
        "1.000977 GiB, and this process's container may have 1.000000 (num_blocks=512, kv_cache_gb=None, "
        "max_model_len=None, max_num_seqs=8, state_cache_gb=None): give a smaller num_blocks, kv_cache_gb, "
        "max_model_len, max_num_seqs or state_cache_gb"
    )
    with pytest.raises(ValueError, match=f"^{refused}$"):
        check_room(config, 512, 1 << 20, 1 << 28, (1 << 28) + (1 << 20), root)
    without_pages = "^live states of recurrent layers need 2.000000 GiB, .*: give a smaller max_num_seqs$"
    with pytest.raises(ValueError, match=without_pages):
        check_room(config, 512, 0, 1 << 31, 0, root)


@pytest.mark.parametrize(("field", "value"), [("max_num_seqs", 4), ("state_cache_gb", 0.01)])
def test_a_worker_is_built_where_its_states_have_room_and_not_with_more(
    monkeypatch: pytest.MonkeyPatch, field: str, value: float
) -> None:
    """A worker is built where its states have room, and not with more, to the byte. A sequence that has no block does
    not run, so it needs no state.
    """
    model = bound_model("NemotronH")
    small = {"num_blocks": 4, "block_size": 64, "max_model_len": 64, "max_num_seqs": 2, "state_cache_gb": 0}
    config = RolloutConfig(**small | {field: value})
    shape = MemoryShape.of(model, config)
    needed = 4 * shape.bytes_per_block() + shape.bytes_of_states()
    monkeypatch.setattr(pool_sizes, "memory_limit", lambda root: needed)
    with RolloutWorker(model, config=config) as worker:
        assert len(worker.generate([[1, 2, 3]])) == 1
    monkeypatch.setattr(pool_sizes, "memory_limit", lambda root: needed - 1)
    with pytest.raises(ValueError, match=f"need .* GiB, and this process's container may have .*{field}={value}"):
        RolloutWorker(model, config=config)
    more_seats = {"max_num_seqs": 99, "enable_prefix_caching": False, "state_cache_gb": None}
    RolloutWorker(model, config=replace(config, **more_seats)).close()


def test_a_worker_is_built_where_a_draft_models_pool_has_room_too_and_not_with_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker is built where a draft model's pool has room beside its own, and not with more, to the byte."""
    model = bound_model("Qwen3")
    make_model("Llama").save_pretrained(tmp_path)
    config = RolloutConfig(num_blocks=4, num_speculative_tokens=3, draft_model=tmp_path, draft_cache_gb=2**-12)
    own, draft = (MemoryShape.of(one, config.with_block_size(None)) for one in (model, bound_model("Llama")))
    needed = 4 * own.bytes_per_block() + 2**18 // draft.bytes_per_block() * draft.bytes_per_block()
    monkeypatch.setattr(pool_sizes, "memory_limit", lambda root: needed)
    with RolloutWorker(model, config=config) as worker:
        assert len(worker.generate([[1, 2, 3]])) == 1
    monkeypatch.setattr(pool_sizes, "memory_limit", lambda root: needed - 1)
    refused = r"4 KV blocks \+ the draft model's KV blocks need .* = .* GiB, .* or draft_cache_gb$"
    with pytest.raises(ValueError, match=refused):
        RolloutWorker(model, config=config)
