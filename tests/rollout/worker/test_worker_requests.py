"""Requests to a worker come from threads, wait in queues, stream, and fail rightly. The runner is the fake one."""

from __future__ import annotations

import asyncio
import atexit
import copy
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from samebit.kernels.layout.lora.adapters import Adapter
from samebit.rollout.adapters.layout import AdapterLayout
from samebit.rollout.adapters.registry import Loaded
from samebit.rollout.control.delivery import RequestHandle
from samebit.rollout.errors import (
    AdapterError,
    NonFiniteLogitsError,
    RequestError,
    RequestIdInUseError,
    WorkerStateError,
)
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

from ...forks import python
from ...patience import HANG, wait_until
from ..conftest import worker_parts
from ..inside import num_waiting
from ..step_gate import StepGate

MakeWorker = Callable[..., tuple[Any, Any]]
Oracle = Callable[..., list[int]]
FEW = SamplingParams(max_tokens=5)


def test_generate_keeps_the_order_of_the_prompts(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, _ = make_worker()
    prompts = [[index, index + 1] for index in range(30)]
    lengths = [1 + index % 7 for index in range(30)]
    outputs = worker.generate(prompts, [SamplingParams(max_tokens=length, n=2) for length in lengths])
    for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        for index, sample in enumerate(output.samples):
            assert sample.token_ids == oracle(prompt, index, length)
    stats = worker.stats()
    assert stats["requests_finished"] == 30
    assert stats["output_tokens"] == 2 * sum(lengths)
    assert stats["prefill_tokens_computed"] == 2 * 30, "the samples of a prompt share it"
    assert stats["decode_tokens_computed"] == 2 * sum(length - 1 for length in lengths)
    assert (stats["running"], stats["waiting"], stats["blocks_free"]) == (0, 0, stats["blocks_total"])
    assert all(isinstance(value, int | float) for value in stats.values())


def test_without_params_it_samples_sixteen_tokens(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    assert worker.generate([]) == []
    assert len(worker.generate([[1]])[0].samples[0].token_ids) == 16


def test_one_bad_prompt_and_nothing_is_submitted(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
        worker.generate([[1], []], FEW)
    with pytest.raises(RequestError, match="2 prompts, but 1 params"):
        worker.generate([[1], [2]], [FEW])
    with pytest.raises(RequestError, match="SamplingParams, got dict"):
        worker.generate([[1]], {})
    with pytest.raises(RequestError, match="prompts must be a list"):
        worker.generate("text", FEW)
    assert runner.plans == []
    assert worker.stats()["waiting"] == 0


def test_a_bad_request_does_not_disturb_those_in_flight(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker()
    runner.gate = StepGate(1)
    handle = worker.submit([1, 2], FEW)
    assert runner.entered.wait(HANG)
    with pytest.raises(RequestError):
        worker.generate([[999]], FEW)
    runner.gate.release(10)
    assert handle.result(HANG).samples[0].token_ids == oracle([1, 2], 0, 5)


def test_a_request_that_the_pool_can_not_hold_takes_nothing_from_the_others(
    make_worker: MakeWorker, oracle: Oracle
) -> None:
    """A request that the pool can not hold is refused by name, and takes nothing from the others, which run and wait:
    they and those after it get their tokens.
    """
    worker, runner = make_worker(num_blocks=4, max_num_seqs=1)
    runner.gate = StepGate(1)
    handles = [worker.submit([1, last], FEW) for last in (2, 3)]
    runner.gate.wait_for_a_step()
    before = worker.stats()
    with pytest.raises(
        RequestError, match="needs 5 KV blocks of 4 tokens, the pool has 4; max_tokens may be at most 12"
    ):
        worker.submit([1] * 5, SamplingParams(max_tokens=13))
    with pytest.raises(RequestError, match=r"prompt 1: .* the pool has 4; shorten the prompt"):
        worker.generate([[1], [1] * 17], FEW)
    assert [worker.stats()[name] for name in ("running", "waiting")] == [before["running"], before["waiting"]]
    handles.append(worker.submit([1, 4], SamplingParams(max_tokens=15)))
    runner.gate.release(100)
    got = [handle.result(HANG).samples[0].token_ids for handle in handles]
    assert got == [oracle([1, last], 0, count) for last, count in ((2, 5), (3, 5), (4, 15))]
    stats = worker.stats()
    assert (stats["requests_finished"], stats["blocks_free"]) == (3, 4)


def test_a_request_id_can_not_be_used_twice_at_once(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    runner.gate = StepGate()
    first = worker.submit([1], FEW, request_id="mine")
    with pytest.raises(
        RequestIdInUseError, match=r"'mine' is in use by .* not finished; allowed: any other non-empty string, or None"
    ):
        worker.submit([2], FEW, request_id="mine")
    with pytest.raises(RequestError, match="non-empty string"):
        worker.submit([2], FEW, request_id=3)
    runner.gate.release(10)
    assert first.result(HANG).request_id == "mine"
    assert worker.submit([2], FEW, request_id="mine").result(HANG).prompt_token_ids == [2]


def test_a_stream_gives_every_token_once_and_in_order(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker()
    runner.gate = StepGate(1)
    handle = worker.submit([1, 2], SamplingParams(max_tokens=6, n=2))
    got: dict[int, list[int]] = {0: [], 1: []}
    logprobs: dict[int, list[float]] = {0: [], 1: []}
    ends: list[tuple[int, str | None]] = []
    chunks = 0
    for chunk in handle:
        chunks += 1
        got[chunk.sample] += chunk.token_ids
        logprobs[chunk.sample] += chunk.logprobs
        if chunk.finished:
            ends.append((chunk.sample, chunk.finish_reason))
        runner.gate.release()
    result = handle.result(0)
    assert sorted(ends) == [(0, "length"), (1, "length")]
    assert chunks > 4, "tokens came one step at a time"
    for index in (0, 1):
        assert got[index] == oracle([1, 2], index, 6)
        assert logprobs[index] == result.samples[index].logprobs
    again = [token for chunk in handle if chunk.sample == 0 for token in chunk.token_ids]
    assert again == got[0], "a second reading starts at the first token"


def test_a_step_wakes_no_stream_of_a_request_that_has_no_token(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker(max_num_seqs=1)
    runner.gate = StepGate()
    running, waiting = (worker.submit([1, last], FEW) for last in (2, 3))
    tokens: list[int] = []
    thread = threading.Thread(target=lambda: tokens.extend(i for chunk in waiting for i in chunk.token_ids))
    thread.start()
    wait_until(lambda: waiting._delivery._waiting)
    [asleep] = waiting._delivery._waiting
    for count in range(1, 5):
        runner.gate.release()
        wait_until(lambda count=count: len(running._delivery.request.sequences[0].output_ids) == count)
    runner.gate.wait_for_a_step()
    assert list(waiting._delivery._waiting) == [asleep]
    runner.gate.release(100)
    thread.join()
    assert tokens == oracle([1, 3], 0, 5)


def test_cancel_gives_what_there_is(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker()
    runner.gate = StepGate()
    handle = worker.submit([1, 2], SamplingParams(max_tokens=50))
    stream = iter(handle)
    runner.gate.release(2)
    tokens = list(next(stream).token_ids)
    handle.cancel()
    runner.gate.release(3)
    sample = handle.result(HANG).samples[0]
    assert sample.finish_reason == "abort"
    assert sample.token_ids == oracle([1, 2], 0, len(sample.token_ids))
    assert 1 <= len(sample.token_ids) < 50
    for chunk in stream:
        tokens += chunk.token_ids
    assert tokens == sample.token_ids
    assert worker.stats()["requests_aborted"] == 1


def test_results_can_be_awaited(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker()
    runner.gate = StepGate()
    first, second = worker.submit_all([[1], [2]], FEW)

    async def both() -> list[Any]:
        waiting = [asyncio.ensure_future(handle.result_async()) for handle in (second, first, second)]
        await asyncio.sleep(0)
        runner.gate.release(10)
        return await asyncio.gather(*waiting)

    outputs = asyncio.run(both())
    assert [output.samples[0].token_ids for output in outputs] == [oracle([i], 0, 5) for i in (2, 1, 2)]
    assert asyncio.run(first.result_async()) is first.result(0), "a result that is there already"


def test_cancelling_a_finished_request_leaves_the_next_one_of_its_name_alone(
    make_worker: MakeWorker, oracle: Oracle
) -> None:
    worker, runner = make_worker()
    first = worker.submit([1, 2], FEW, request_id="mine")
    first.result(HANG)
    runner.gate = StepGate()
    second = worker.submit([1, 3], FEW, request_id="mine")
    first.cancel()
    runner.gate.release(100)
    assert second.result(HANG).samples[0].token_ids == oracle([1, 3], 0, 5)


def test_an_adapter_that_is_dropped_with_its_requests_ends_those_that_have_just_come(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    worker._adapters.registry.put(Loaded(Adapter("policy", {}, version=1, number=1), AdapterLayout({}, None)))
    runner.gate = StepGate()
    other = worker.submit([1, 2], FEW)
    assert runner.entered.wait(HANG)
    handle = worker.submit([1, 3], SamplingParams(max_tokens=5, adapter="policy"))
    with ThreadPoolExecutor(1) as beside:
        dropped = beside.submit(worker.drop_adapter, "policy", in_flight="abort")
        wait_until(lambda: num_waiting(worker))
        runner.gate.release(100)
        dropped.result(HANG)
    assert handle.result(HANG).samples[0].finish_reason == "abort"
    assert other.result(HANG).samples[0].finish_reason == "length"


def test_an_await_that_is_cancelled_cancels_the_request(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    runner.gate = StepGate()
    handle = worker.submit([1], SamplingParams(max_tokens=50))
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(handle.result_async(), 0.05))
    runner.gate.release(3)
    assert handle.result(HANG).samples[0].finish_reason == "abort"


def test_a_failed_request_raises_where_it_is_awaited(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    runner.nan_ids = {"bad"}
    with pytest.raises(NonFiniteLogitsError, match="NaN"):
        asyncio.run(worker.submit([1], FEW, request_id="bad").result_async())
    assert worker.trouble() is None
    worker.close()
    assert worker.trouble() == "the worker is closed"


def test_abort_by_id_reaches_waiting_requests_while_paused(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    worker.pause()
    handles = [worker.submit([index], FEW, request_id=str(index)) for index in range(3)]
    worker.abort(["0", "2", "unknown"])
    assert [handles[index].result(HANG).samples[0].finish_reason for index in (0, 2)] == ["abort", "abort"]
    assert runner.plans == []
    with pytest.raises(TimeoutError, match="'1' is not finished"):
        handles[1].result(0)
    worker.resume()
    assert handles[1].result(HANG).samples[0].finish_reason == "length"
    for wrong in ([3], 3, None):
        with pytest.raises(RequestError, match=r"strings, got \[(3|None)\]"):
            worker.abort(wrong)


@pytest.mark.parametrize("wrong", ["1", float("nan"), True, 10**400, [1]])
def test_a_time_to_wait_that_is_none_is_named(make_worker: MakeWorker, wrong: Any) -> None:
    worker, _ = make_worker()
    handle = worker.submit([1], FEW)
    with pytest.raises(ValueError, match="timeout must be a number of seconds or None, got"):
        handle.result(wrong)
    assert handle.result(float("inf")).samples[0].finish_reason == "length"


def test_nan_logits_fail_one_request(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker()
    runner.nan_ids = {"bad"}
    worker.pause()
    bad = worker.submit([1], FEW, request_id="bad")
    good = worker.submit([2], FEW)
    worker.resume()
    with pytest.raises(NonFiniteLogitsError, match="NaN"):
        bad.result(HANG)
    with pytest.raises(NonFiniteLogitsError, match="NaN"):
        list(bad)
    assert good.result(HANG).samples[0].token_ids == oracle([2], 0, 5)
    assert worker.generate([[3]], FEW)[0].samples[0].finish_reason == "length"


def test_a_broken_step_fails_everyone_with_the_cause(make_worker: MakeWorker) -> None:
    worker, runner = make_worker(max_num_seqs=1)
    worker.pause()
    handles = [worker.submit([index], FEW) for index in range(3)]
    runner.fail_with = ZeroDivisionError("in the kernel")
    worker.resume()
    for handle in handles:
        with pytest.raises(WorkerStateError, match="in the kernel") as caught:
            handle.result(HANG)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(WorkerStateError, match="broken") as caught:
        worker.submit([1], FEW)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(WorkerStateError, match="broken"):
        worker.pause()


def test_close_fails_what_is_pending_and_can_be_called_twice(make_worker: MakeWorker) -> None:
    worker, runner = make_worker(max_num_seqs=1)
    worker.pause()
    handles = [worker.submit([index], FEW) for index in range(3)]
    streamed: list[BaseException] = []

    def stream() -> None:
        try:
            list(handles[0])
        except WorkerStateError as error:
            streamed.append(error)

    reader = threading.Thread(target=stream)
    reader.start()
    worker.close()
    worker.close()
    reader.join(HANG)
    assert "closed" in str(streamed[0])
    for handle in handles:
        with pytest.raises(WorkerStateError, match="closed before this request finished"):
            handle.result(HANG)
    with pytest.raises(WorkerStateError, match="the worker is closed"):
        worker.generate([[1]], FEW)
    with pytest.raises(WorkerStateError, match="the worker is closed"):
        worker.receive_weights({})
    assert runner.pages is None


def test_a_worker_is_neither_pickled_nor_copied(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    for copies in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="a RolloutWorker is neither pickled nor copied: it has a thread"):
            copies(worker)


def test_leaving_the_with_block_closes(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    with worker as same:
        assert same is worker
    with pytest.raises(WorkerStateError, match="closed"):
        worker.submit([1], FEW)


def test_a_worker_that_is_dropped_stops_its_thread(make_worker: MakeWorker) -> None:
    donor, _ = make_worker()
    engine, weights = donor._engine, donor._weights
    donor.close()
    engine.runner.allocate_cache(4)
    before = set(threading.enumerate())
    worker = RolloutWorker.over(worker_parts(engine, weights))
    (thread,) = set(threading.enumerate()) - before
    gone = weakref.ref(worker)
    del worker
    thread.join(HANG)
    assert gone() is None
    assert not thread.is_alive()


def test_at_exit_the_thread_ends_before_the_interpreter_does(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's thread ends at exit before the interpreter does: a kernel that still runs while that goes away
    aborts the process (seen).
    """
    callbacks: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", callbacks.append)
    before = set(threading.enumerate())
    worker, runner = make_worker()
    (thread,) = set(threading.enumerate()) - before
    gate = runner.gate = StepGate(3)
    handle = worker.submit([1, 2], SamplingParams(max_tokens=30))
    gate.wait_for_a_step()

    def end_the_step() -> None:
        wait_until(lambda: worker._status.closed)
        gate.release(100)

    ending = threading.Thread(target=end_the_step)
    ending.start()
    (at_exit,) = callbacks
    at_exit()
    assert not thread.is_alive()
    ending.join(HANG)
    with pytest.raises(WorkerStateError, match="closed"):
        handle.result(0)


CLOSED_AT_EXIT = """
import atexit, sys
sys.path.insert(0, sys.argv[1])
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.control import shelter
from tiny_llama import tiny
worker = RolloutWorker(tiny(0), config=RolloutConfig(max_model_len=64))
worker.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
def refuse(*arguments):
    raise RuntimeError("can't create new thread at interpreter shutdown")
@atexit.register
def close():
    shelter.start_new_thread = refuse  # as Python 3.12 has it by then
    worker.close()
    print("closed", worker.stats()["running"])
"""


def test_a_worker_may_be_closed_at_exit() -> None:
    """A worker may be closed at exit, when the interpreter starts no thread any more."""
    command = [*python(), "-c", CLOSED_AT_EXIT, str(Path(__file__).parents[1])]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=HANG)
    assert done.stdout == "closed 0\n"


CLOSED_AS_MODULES_END = """
import sys
sys.path.insert(0, sys.argv[1])
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from tiny_llama import tiny
def samples():
    with RolloutWorker(tiny(0), config=RolloutConfig(max_model_len=64)) as worker:
        for _ in range(9):
            yield worker.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
begun = samples()
next(begun)
"""


def test_a_worker_may_be_closed_by_a_generator_that_python_ends() -> None:
    """A worker may be closed by a generator that Python ends. Before Python 3.12 a thread that is started by then never
    runs: who waited for it hung.
    """
    command = [sys.executable, "-c", CLOSED_AS_MODULES_END, str(Path(__file__).parents[1])]  # a fork ends otherwise
    subprocess.run(command, check=True, timeout=HANG)


def test_an_interrupted_generate_aborts_its_requests(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    runner.nan_ids = {"request-0"}
    with pytest.raises(NonFiniteLogitsError):
        worker.generate([[1], [2]], SamplingParams(max_tokens=60))
    worker.pause()
    worker.resume()
    assert worker.generate([[5]], FEW)[0].samples[0].finish_reason == "length"
    assert worker.stats()["running"] == 0, "the second request was aborted with the call"


def test_many_threads_share_a_worker(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, _ = make_worker(num_blocks=20, max_num_seqs=4)
    errors: list[BaseException] = []

    def client(base: int) -> None:
        try:
            for index in range(10):
                prompts = [[base, index, k] for k in range(3)]
                for prompt, output in zip(prompts, worker.generate(prompts, FEW), strict=True):
                    assert output.samples[0].token_ids == oracle(prompt, 0, 5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(base,)) for base in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert errors == []
    assert worker.stats()["requests_finished"] == 180


def test_a_request_without_an_id_gets_one_that_nobody_has_given(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    runner.gate = StepGate()
    given = [worker.submit([index], FEW, request_id=f"request-{index}") for index in (0, 1, 3)]
    own = worker.submit_all([[7], [8]], FEW)
    runner.gate.release(100)
    assert [handle.request_id for handle in own] == ["request-2", "request-4"]
    assert [handle.result(HANG).prompt_token_ids for handle in (*given, *own)] == [[0], [1], [3], [7], [8]]


def test_a_cancel_that_comes_late_ends_no_later_request_of_the_id(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel that comes late ends no later request of the id: the request ends, and another takes its id, after
    `cancel` has seen that it goes on.
    """
    worker, runner = make_worker()
    first = worker.submit([1], FEW, request_id="mine")
    later = []

    def seen_too_early(handle: Any) -> bool:
        monkeypatch.undo()
        handle.result(HANG)
        runner.gate = StepGate()
        later.append(worker.submit([2], FEW, request_id="mine"))
        return False

    monkeypatch.setattr(RequestHandle, "done", property(seen_too_early))
    first.cancel()
    runner.gate.release(100)
    assert later[0].result(HANG).samples[0].finish_reason == "length"


class DroppedMeanwhile(str):
    """Names an adapter that another thread drops after the name was looked up once."""

    __slots__ = ("drop", "looks")

    def __hash__(self) -> int:
        self.looks = getattr(self, "looks", 0) + 1
        if self.looks == 2:
            self.drop(str(self))
        return super().__hash__()


@pytest.mark.parametrize("call", ["submit", "drop_adapter"])
def test_an_adapter_dropped_at_the_same_time_gives_no_bare_key_error(make_worker: MakeWorker, call: str) -> None:
    """An adapter that is dropped at the same time gives no bare KeyError: who comes first has it; who comes second is
    told by name.
    """
    worker, _ = make_worker()
    worker._adapters.registry.put(Loaded(Adapter("policy", {}, version=1, number=1), AdapterLayout({}, None)))
    name = DroppedMeanwhile("policy")
    name.drop = worker.drop_adapter
    if call == "submit":
        assert worker.submit([1], SamplingParams(max_tokens=5, adapter=name)).result(HANG).samples
    else:
        worker.drop_adapter(name)
        with pytest.raises(AdapterError, match="no adapter 'policy' was loaded"):
            worker.drop_adapter("policy")
