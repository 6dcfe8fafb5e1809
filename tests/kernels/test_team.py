"""Teams of threads (`kernels/team`) compute what they should, and where they should."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.kernels.openmp import process_environment
from samebit.kernels.openmp_runtimes import VARIABLES, runtimes
from samebit.kernels.team import team as teams
from samebit.kernels.team.places import SIBLINGS, places_of, processors_in, siblings_of
from samebit.kernels.team.sharing import functions
from samebit.kernels.team.team import Team
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from ..patience import HANG
from ..rollout.tiny_llama import tiny
from .counting_kernel import kernel

PROCESSORS = sorted(os.sched_getaffinity(0))
MODELS = Path(__file__).parents[1] / "rollout"

WHILE_IT_GENERATES = """
import json, os, sys, time
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
sys.path.insert(0, sys.argv[2])
from tiny_llama import tiny

ALL = os.sched_getaffinity(0)

def bound():
    places = []
    for thread in os.listdir("/proc/self/task"):
        try:
            places.append(sorted(os.sched_getaffinity(int(thread))))
        except ProcessLookupError:
            pass  # it ended meanwhile
    return [place for place in places if set(place) != ALL]

def when(condition):
    while not condition(bound()):
        time.sleep(.001)
    return bound()

with RolloutWorker(tiny(0), config=RolloutConfig(num_threads=int(sys.argv[1]), max_model_len=2048)) as worker:
    worker.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    ended = "length"
    while ended == "length":  # a process that waits long for a processor looks when all is done
        handle = worker.submit([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True))
        next(iter(handle))
        working = bound()
        handle.cancel()
        ended = handle.result().samples[0].finish_reason
    print(json.dumps([working, when(lambda places: not places)]))
"""

WHERE_OPENMP_BINDS = """
import json, os, sys, threading
if sys.argv[1] == "torch":
    import torch
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
import numba
sys.path.insert(0, sys.argv[3])
from tiny_llama import tiny

def places():
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(("Main", "samebit"))]
    return {thread.name: sorted(os.sched_getaffinity(thread.native_id)) for thread in threads}

with RolloutWorker(tiny(0), config=RolloutConfig(num_threads=json.loads(sys.argv[2]), max_model_len=2048)) as worker:
    ended = "length"
    while ended == "length":  # a process that waits long for a processor looks when all is done
        handle = worker.submit([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True))
        next(iter(handle))
        working = places()
        handle.cancel()
        ended = handle.result().samples[0].finish_reason
    print(json.dumps([numba.config.NUMBA_NUM_THREADS, working]))
"""


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """Put the number of threads back: Numba takes the threads of a thread's last kernel for its wish."""
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


@contextmanager
def a_team(size: int) -> Iterator[Team]:
    team = Team(size)
    try:
        yield team
    finally:
        team.end()


def counted(threads: int, items: int) -> bool:
    """Tell whether a kernel computes each item once, and no other."""
    counts = np.zeros(items + 1)
    kernel(threads, items, 0.5, counts, -1)
    return np.array_equal(counts, [*(0.5 * np.arange(1, items + 1)), 0.0])


def compute_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("samebit-compute")}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_team_computes_each_item_once(size: int) -> None:
    before = compute_threads()
    with a_team(size):
        assert len(compute_threads() - before) == size - 1
        for items in (0, 1, 2, 3, 7, 129, 1000):
            for threads in (1, 2, size, 16):  # as many as there are, fewer, and more: those are of OpenMP
                assert counted(threads, items)
    assert not compute_threads() - before
    assert counted(size, 129)


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(2, 4),
    calls=st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 4), st.sampled_from([0, 0, 0, 1e-4, 1e-3])), max_size=60
    ),
)
def test_calls_follow_each_other_while_threads_wake_work_and_fall_asleep(
    size: int, calls: list[tuple[int, int, float]]
) -> None:
    with a_team(size):
        for items, threads, rest in calls:
            assert counted(threads, items)
            time.sleep(rest)


def test_nobody_waits_for_a_thread_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Event()

    def late(team: int, me: int) -> None:
        begin.wait()
        functions().serve(team, me)

    monkeypatch.setattr(teams, "functions", lambda: replace(functions(), serve=late))
    ended, right = threading.Event(), []

    def compute() -> None:
        with a_team(3):
            right.append(all(counted(3, items) for items in (2, 3, 129)))
            ended.set()
            begin.wait()
            right.append(all(counted(3, items) for items in (2, 3, 129)))

    thread = threading.Thread(target=compute)
    thread.start()
    before_they_began = ended.wait(HANG)
    begin.set()
    thread.join()
    assert before_they_began
    assert right == [True, True]


def test_an_item_that_raises_in_a_team_is_known_to_the_caller() -> None:
    with a_team(2):
        for refused in (0, 7):
            with pytest.raises(MemoryError, match="no memory for a kernel's scratch"):
                kernel(2, 8, 1.0, np.zeros(8), refused)
        assert counted(2, 8)


def test_a_team_is_of_the_thread_that_makes_it() -> None:
    """A team is of the thread that makes it: two threads with a team each compute beside one without."""
    right: list[bool] = []
    before = compute_threads()

    def compute(size: int) -> None:
        team = Team(size) if size > 1 else None
        right.extend(counted(2, 100) for _ in range(300))
        if team is not None:
            team.end()

    threads = [threading.Thread(target=compute, args=(size,)) for size in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 900
    assert not compute_threads() - before


def test_a_team_that_can_not_be_started_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = threading.Thread.start, compute_threads()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "samebit-compute-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        Team(4)
    assert not compute_threads() - before
    assert counted(4, 129)


def test_one_thread_is_no_team() -> None:
    with pytest.raises(ValueError, match="at least two threads, got 1"):
        Team(1)


def test_a_rollout_worker_has_a_team_until_it_is_closed() -> None:
    before = compute_threads()
    with RolloutWorker(tiny(0), config=RolloutConfig(num_threads=2)) as worker:
        worker.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert [thread.name for thread in compute_threads() - before] == ["samebit-compute-1"]
    assert not compute_threads() - before


def one_core_each(processor: int) -> frozenset[int]:
    return frozenset((processor,))


def two_in_a_core(processor: int) -> frozenset[int]:
    """Return the processors of a core, which n and n + 4 share."""
    return frozenset((processor % 4, processor % 4 + 4))


@pytest.mark.parametrize(
    ("allowed", "threads", "here", "siblings", "places"),
    [
        ({0, 1}, 2, 0, one_core_each, [{1}]),
        ({0, 1}, 2, 1, one_core_each, [{0}]),
        ({2, 5, 7}, 3, 5, one_core_each, [{2}, {7}]),
        (set(range(8)), 8, 3, two_in_a_core, [{0}, {1}, {2}, {4}, {5}, {6}, {7}]),
        (set(range(8)), 4, 5, two_in_a_core, [{0, 4}, {2, 6}, {3, 7}]),
        ({0, 1, 4}, 2, 4, two_in_a_core, [{1}]),
        (set(range(8)), 3, 0, two_in_a_core, []),
        (set(range(8)), 9, 0, two_in_a_core, []),
        ({0, 1}, 1, 0, one_core_each, []),
        ({3}, 1, 3, one_core_each, []),
    ],
)
def test_each_worker_has_a_processor_or_a_core(
    allowed: set[int], threads: int, here: int, siblings: Callable[[int], frozenset[int]], places: list[set[int]]
) -> None:
    assert [set(place) for place in places_of(allowed, threads, here, siblings)] == places


def test_the_caller_may_have_moved_to_a_processor_that_was_taken_from_it() -> None:
    assert len(places_of({0, 1}, 2, 5, one_core_each)) == 1


def test_which_processors_share_a_core_is_read_where_the_system_says_it() -> None:
    assert processors_in("0-1,4\n") == {0, 1, 4}
    assert processors_in("3\n") == {3}
    for processor in PROCESSORS:
        assert Path(SIBLINGS.format(processor)).exists() == Path(SIBLINGS.format(processor)).parent.exists()
        assert processor in siblings_of(processor)


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="one processor")
@pytest.mark.parametrize("fewer", [0, 1])
def test_workers_are_bound_while_a_rollout_worker_generates_and_not_afterwards(fewer: int) -> None:
    """Workers are bound to processors only while a rollout worker generates. Neither the generation thread is nor the
    caller's; nor any with fewer threads than processors and than cores.
    """
    threads = len(PROCESSORS) - fewer
    done = subprocess.run(
        [sys.executable, "-c", WHILE_IT_GENERATES, str(threads), str(MODELS)],
        env=os.environ | process_environment(threads),
        check=True, text=True, stdout=subprocess.PIPE, timeout=HANG,
    )  # fmt: skip
    working, resting = json.loads(done.stdout)
    assert resting == []
    bound = [processor for place in working for processor in place]
    assert fewer or len(working) == threads - 1
    assert len(working) == len(places_of(set(PROCESSORS), threads, PROCESSORS[0], siblings_of))
    assert len(set(bound)) == len(bound)


def bound_by_openmp(
    variable: str, script: str, *arguments: str, preloaded: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script where this variable, given as NAME=VALUE, has OpenMP bind threads, and none says how many."""
    counts = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
    others = {name: value for name, value in os.environ.items() if name not in (*counts, *VARIABLES)}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=others | dict([variable.split("=", 1)]) | ({} if preloaded is None else {"LD_PRELOAD": str(preloaded)}),
        check=True, text=True, capture_output=True, timeout=HANG,
    )  # fmt: skip


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="one processor")
@pytest.mark.parametrize(
    ("first", "variable"),
    [("samebit", "OMP_PROC_BIND=close"), ("torch", "OMP_PLACES=threads")],
)
def test_a_worker_has_the_processors_of_all_places_of_openmp(first: str, variable: str) -> None:
    """The caller's thread has one of them, as OpenMP wants it."""
    threads = len(PROCESSORS)
    done = bound_by_openmp(variable, WHERE_OPENMP_BINDS, first, str(threads), str(MODELS))
    counted, places = json.loads(done.stdout)
    bound = [processor for name in places if name.startswith("samebit-compute") for processor in places[name]]
    assert counted == threads
    assert set(places["MainThread"]) < set(PROCESSORS)
    assert places["samebit-generation"] == PROCESSORS
    assert len(bound) == len(set(bound)) == threads - 1
    assert "RuntimeWarning" not in done.stderr


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="one processor")
@pytest.mark.parametrize("name", ["libiomp5.so", "libomp.so.5"])
def test_a_runtime_of_another_name_that_is_preloaded_is_asked_for_its_places(name: str, tmp_path: Path) -> None:
    """A preloaded runtime, as PyTorch's and Accelerate's launchers preload Intel's, binds the thread that loads it: a
    worker's threads leave that place. (A copy of libgomp under their names.)
    """
    preloaded = Path(shutil.copy(runtimes()[0]._name, tmp_path / name))
    threads = len(PROCESSORS)
    arguments = ("samebit", str(threads), str(MODELS))
    done = bound_by_openmp("OMP_PROC_BIND=close", WHERE_OPENMP_BINDS, *arguments, preloaded=preloaded)
    counted, places = json.loads(done.stdout)
    bound = [processor for name in places if name.startswith("samebit-compute") for processor in places[name]]
    assert counted == threads
    assert places["samebit-generation"] == PROCESSORS
    assert len(bound) == len(set(bound)) == threads - 1


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="one processor")
def test_a_worker_keeps_to_the_places_that_openmp_is_given() -> None:
    """It has as many threads, unless it is told how many."""
    place = f"{{{PROCESSORS[-1]}}}"
    done = bound_by_openmp(f"OMP_PLACES={place}", WHERE_OPENMP_BINDS, "samebit", "null", str(MODELS))
    _, places = json.loads(done.stdout)
    assert places["samebit-generation"] == PROCESSORS[-1:]
    assert not [name for name in places if name.startswith("samebit-compute")]


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="one processor")
def test_a_numba_that_has_counted_one_place_is_said_by_name() -> None:
    script = "import torch, numba, samebit.kernels"
    done = bound_by_openmp("GOMP_CPU_AFFINITY=" + " ".join(map(str, PROCESSORS)), script)
    said = f"kernels have 1 of the {len(PROCESSORS)} processors that OpenMP computes on: GOMP_CPU_AFFINITY="
    assert f"RuntimeWarning: {said}" in done.stderr
    assert "Import samebit before numba, or set NUMBA_NUM_THREADS" in done.stderr
