"""A pause does to requests what it should, and readers need not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from samebit.rollout.errors import WorkerStateError
from samebit.rollout.sampling_params import SamplingParams

from ...patience import HANG, wait_until
from ..inside import num_waiting
from ..step_gate import StepGate

MakeWorker = Callable[..., tuple[Any, Any]]
Oracle = Callable[..., list[int]]
LONG = SamplingParams(max_tokens=40)
PROMPT = [1, 2, 3]


def started(worker: Any, runner: Any) -> Any:
    """Return a request that has tokens, and whose next step waits at the gate."""
    runner.gate = StepGate(2)
    handle = worker.submit(PROMPT, LONG)
    runner.gate.wait_for_a_step()
    return handle


def let_go(runner: Any) -> None:
    gate, runner.gate = runner.gate, None
    gate.release(100)


def paused(worker: Any, runner: Any, mode: str) -> None:
    thread = threading.Thread(target=worker.pause, args=(mode,))
    thread.start()
    wait_until(lambda: num_waiting(worker))
    let_go(runner)
    thread.join()
    assert worker.paused


def test_a_pause_that_keeps_goes_on_with_the_same_tokens(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker()
    handle = started(worker, runner)
    paused(worker, runner, "keep")
    worker.reset_prefix_cache(recompute_running=True)
    worker.resume()
    assert handle.result(HANG).samples[0].token_ids == oracle(PROMPT, 0, 40)
    assert not worker.paused


def test_a_pause_that_aborts_ends_all_requests(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker()
    handle, waiting = started(worker, runner), worker.submit([4], LONG)
    paused(worker, runner, "abort")
    sample = handle.result(HANG).samples[0]
    assert sample.finish_reason == "abort"
    assert sample.token_ids == oracle(PROMPT, 0, 40)[: len(sample.token_ids)]
    assert waiting.result(HANG).samples[0].finish_reason == "abort"
    later = worker.submit([5], LONG)
    worker.resume()
    assert later.result(HANG).samples[0].finish_reason == "length"


def test_a_pause_that_waits_lets_what_has_begun_finish(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    handle = started(worker, runner)
    paused(worker, runner, "wait")
    assert handle.done
    assert handle.result(0).samples[0].finish_reason == "length"
    late = worker.submit(PROMPT, LONG)
    worker.pause("wait")
    assert not late.done
    worker.resume()
    assert late.result(HANG).samples[0].finish_reason == "length"


def test_a_wrong_pause_changes_nothing(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    with pytest.raises(ValueError, match="mode must be one of keep, wait, abort, got 'stop'"):
        worker.pause("stop")
    handle = started(worker, runner)
    let_go(runner)
    worker.pause()
    if not handle.done:
        with pytest.raises(WorkerStateError, match="paused"):
            worker.pause("wait")
    worker.resume()


def test_a_sleeping_worker_says_what_sleeps(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    worker.sleep("kv_cache")
    assert worker.sleeping == ("kv_cache",)
    worker.wake_up()
    assert worker.sleeping == ()


def test_a_reader_gives_every_token_once_and_never_waits(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    stepped = threading.Event()
    worker.after_steps(stepped.set)
    runner.gate = StepGate()
    handle = worker.submit(PROMPT, SamplingParams(max_tokens=9, n=3))
    reader = handle.reader()
    assert not reader.ready
    assert reader.read() == []
    runner.gate.release(100)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while not reader.ended:
        for chunk in reader.read():
            tokens[chunk.sample] += chunk.token_ids
            assert (chunk.weight_versions == [(0, 9, 0)]) == chunk.finished
    assert stepped.wait(HANG)
    assert tokens == {sample.index: sample.token_ids for sample in handle.result(HANG).samples}


def test_a_reader_that_leaves_does_not_hold_up_another(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    runner.gate = StepGate(1)
    handle, found = worker.submit(PROMPT, LONG), list[Any]()
    first = iter(handle)
    next(first)
    other = threading.Thread(target=lambda: found.extend(handle))
    other.start()
    wait_until(lambda: len(found) == 1 and handle._delivery._waiting)
    first.close()
    runner.gate.release(1)
    wait_until(lambda: len(found) == 2)
    let_go(runner)
    other.join()
    assert sum(len(chunk.token_ids) for chunk in found) == 40


def test_a_listener_that_raises_harms_nobody(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    worker.after_steps(lambda: 1 / 0)
    assert worker.generate([PROMPT], LONG)[0].samples[0].finish_reason == "length"
