"""Teams of threads: `kernels/team`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from samebit.kernels.openmp import process_environment
from samebit.kernels.team.places import SIBLINGS, places_of, processors_in, siblings_of

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


def one_core_each(processor: int) -> frozenset[int]:
    return frozenset((processor,))


def two_in_a_core(processor: int) -> frozenset[int]:
    """Processors n and n + 4 share a core."""
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
    """Neither the generation thread is nor the caller's; nor any with fewer threads than processors and than cores."""
    threads = len(PROCESSORS) - fewer
    done = subprocess.run(
        [sys.executable, "-c", WHILE_IT_GENERATES, str(threads), str(MODELS)],
        env=os.environ | process_environment(threads),
        check=True, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    working, resting = json.loads(done.stdout)
    assert resting == []
    bound = [processor for place in working for processor in place]
    assert fewer or len(working) == threads - 1
    assert len(working) == len(places_of(set(PROCESSORS), threads, PROCESSORS[0], siblings_of))
    assert len(set(bound)) == len(bound)
