"""Steps that are launched before the tokens of the one before are read give the same samples, and leave nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from samebit.rollout import SamplingParams, WorkerStateError
from samebit.rollout.engine.engine import Engine
from samebit.rollout.engine.step_plan import ScheduledSequence
from samebit.rollout.requests.request import Request

from ...patience import HANG, wait_until
from ..cache.cache_integrity import check_cache
from ..inside import num_waiting
from ..step_gate import StepGate

Build = Callable[..., Any]
Oracle = Callable[..., list[int]]

PROMPT = [1, 2, 3]
LONG = SamplingParams(max_tokens=40)


def finish(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        check_cache(engine.cache)
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


def test_what_was_computed_behind_the_end_of_a_sample_is_void(
    make_engine: Build, make_request: Build, oracle: Oracle
) -> None:
    engine = make_engine(run_ahead=True)
    alone = oracle(PROMPT, 0, 12)
    stops = make_request("stops", PROMPT, max_tokens=12, eos=(alone[4],))
    goes_on = make_request("goes on", [7], max_tokens=12)
    finish(engine, stops, goes_on)
    assert stops.sequences[0].output_ids.tolist() == alone[:5]
    assert goes_on.sequences[0].output_ids.tolist() == oracle([7], 0, 12)
    counters = engine.counters
    assert counters.void_tokens == 1
    assert counters.output_tokens == 17
    assert counters.decode_tokens_computed == 15
    assert counters.steps == 12, "all but the prompts' step were launched ahead, and none for lengths that end"
    assert counters.steps_ahead == 10, "the first decode is planned when the prompts are computed"


def test_nobody_waits_for_a_step_longer_because_of_it(make_engine: Build, make_request: Build) -> None:
    """Nobody waits for a step longer because others run ahead: a request that finds a seat is in the step after next at
    the latest.
    """
    engine = make_engine(run_ahead=True)
    engine.add(make_request("first", PROMPT, max_tokens=30))
    for _ in range(5):
        engine.step()
    late = make_request("late", [9], max_tokens=2)
    engine.add(late)
    engine.step()
    engine.step()
    assert late.sequences[0].num_new_tokens == 1


@pytest.mark.parametrize("wish", [{"logprobs": 2}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.5}])
def test_what_needs_the_token_before_is_not_launched_ahead(
    wish: dict[str, Any], make_engine: Build, make_request: Build
) -> None:
    engine = make_engine(run_ahead=True)
    finish(engine, make_request("plain", PROMPT, max_tokens=8), make_request("wishes", [4], max_tokens=8, **wish))
    assert engine.counters.steps_ahead == 0


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("length", range(2, 8))
def test_the_state_of_a_sample_that_ended_is_kept_only_as_of_a_boundary_it_still_has(
    block_size: int, length: int, make_engine: Build, make_request: Build, oracle: Oracle
) -> None:
    """The state of a sample that ended is kept only as of a boundary that it still has: the step ahead has moved the
    state on, and what is resumed from must be that of the tokens before it.
    """
    engine = make_engine(recurrent=True, num_checkpoints=8, num_held=1, run_ahead=True, block_size=block_size)
    alone = oracle(PROMPT, 0, length)
    finish(engine, make_request("first", PROMPT, max_tokens=12, eos=(alone[-1],)))
    assert engine.counters.void_tokens == 1
    turn = [*PROMPT, *alone, 5, 6]
    second = make_request("second", turn, max_tokens=3)
    finish(engine, second)
    assert second.sequences[0].output_ids.tolist() == oracle(turn, 0, 3)


def test_a_token_that_is_computed_again_alone_is_no_decode(
    make_engine: Build, make_request: Build, oracle: Oracle
) -> None:
    """A token that a preempted sample computes again alone, to get its context back, counts as no decode: the decodes
    leave room for one token a step.
    """
    engine = make_engine(run_ahead=True, max_num_seqs=4, max_num_batched_tokens=4, prefix_caching=False)
    requests = [make_request(f"r{i}", [i + 1], max_tokens=21 if i < 3 else 12) for i in range(4)]
    for request in requests:
        engine.add(request)
    for _ in range(8):
        engine.step()
    engine.settle()
    engine.preempt_all()
    while engine.has_work:
        engine.step()
    for i, request in enumerate(requests):
        assert request.sequences[0].output_ids.tolist() == oracle([i + 1], 0, request.shared.max_new_tokens)


def test_a_seat_that_is_known_to_come_free_is_taken_at_once(make_engine: Build, make_request: Build) -> None:
    engines = [make_engine(run_ahead=ahead, max_num_seqs=2) for ahead in (False, True)]
    for engine in engines:
        finish(engine, *(make_request(str(i), [i + 1], max_tokens=30 if i == 1 else 3) for i in range(11)))
    assert engines[1].counters.steps_ahead > 0
    assert engines[1].counters.steps == engines[0].counters.steps


def test_an_engine_refuses_to_change_under_a_step_in_flight(make_engine: Build, make_request: Build) -> None:
    engine = make_engine(run_ahead=True)
    engine.add(make_request("r", PROMPT, max_tokens=9))
    for _ in range(3):
        engine.step()
    for change in (engine.preempt_all, engine.clear_prefix_cache, lambda: engine.weights_changed(1)):
        with pytest.raises(RuntimeError, match=r"settle\(\) first"):
            change()
    assert engine.settle() == []
    engine.weights_changed(1)
    while engine.has_work:
        engine.step()
    assert engine.counters.requests.finished == 1


def test_commands_meet_no_step_in_flight(make_worker: Build, oracle: Oracle) -> None:
    """Every sample is the oracle's after updates, sleeps and resets between steps that run ahead, some requests
    aborted.
    """
    worker, _ = make_worker(num_blocks=64, max_num_seqs=4, run_ahead=True)
    weights = {name: tensor.clone() for name, tensor in worker.module.state_dict().items()}
    handles = [worker.submit([index, 5], LONG) for index in range(40)]
    for number in range(60):
        [
            lambda: worker.receive_weights(weights, in_flight="keep"),
            lambda: worker.receive_weights(weights, in_flight="recompute"),
            lambda: (worker.sleep("kv_cache"), worker.wake_up()),
            worker.reset_prefix_cache,
            lambda: (worker.pause(), worker.resume()),
            lambda: worker.receive_weights(weights, in_flight="wait"),
        ][number % 6]()  # type: ignore[operator]
        if number % 10 == 9:
            worker.abort(handles[number % 40].request_id)
    for index, handle in enumerate(handles):
        sample = handle.result(HANG).samples[0]
        whole = oracle([index, 5], 0, 40)
        assert sample.token_ids == (whole if sample.finish_reason == "length" else whole[: len(sample.token_ids)])
    assert worker.stats()["steps_ahead"] > 100


def test_a_step_ahead_that_fails_breaks_the_worker_and_says_so(make_worker: Build) -> None:
    worker, runner = make_worker(run_ahead=True)
    runner.gate = StepGate(4)
    handle = worker.submit(PROMPT, SamplingParams(max_tokens=50))
    next(iter(handle))
    runner.fail_with = ValueError("the device is lost")
    runner.gate.release()
    with pytest.raises(WorkerStateError, match="the device is lost"):
        handle.result(HANG)
    with pytest.raises(WorkerStateError, match="the device is lost"):
        worker.receive_weights({})


def test_a_result_does_not_wait_for_a_step_that_is_void(make_worker: Build, oracle: Oracle) -> None:
    worker, runner = make_worker(run_ahead=True)
    runner.gate = StepGate(6)  # all that the request needs, and nothing for the step behind it
    stop = oracle([1, 2], 0, 6)[5]
    handle = worker.submit([1, 2], SamplingParams(max_tokens=40, stop_token_ids=[stop]))
    assert len(handle.result(HANG).samples[0].token_ids) == 6


def test_a_stream_sees_what_a_command_has_committed(make_worker: Build) -> None:
    worker, runner = make_worker(run_ahead=True)
    gate = runner.gate = StepGate(4)
    handle = worker.submit(PROMPT, LONG)
    seen: list[int] = []
    reads = threading.Thread(target=lambda: [seen.extend(piece.token_ids) for piece in handle])
    reads.start()

    def open_for_two_steps() -> None:
        """Open the gate for the step that computes when the pause is asked for, and the one that was launched ahead."""
        wait_until(lambda: num_waiting(worker))
        gate.release()
        wait_until(lambda: len(seen) >= 5)
        gate.release()

    gate.wait_for_a_step()
    opens = threading.Thread(target=open_for_two_steps)
    opens.start()
    worker.pause()
    wait_until(lambda: len(seen) >= 6)
    assert len(seen) == worker.stats()["output_tokens"] == 6
    opens.join()
    gate.release(100)
    worker.resume()
    reads.join(HANG)
    assert len(seen) == 40


def test_a_commit_that_fails_in_a_command_leaves_nobody_waiting(make_worker: Build) -> None:
    worker, runner = make_worker(run_ahead=True)
    publish = worker._engine.scheduler.publish_item

    def in_the_thread(item: ScheduledSequence) -> None:
        """Fail where a command commits the step in flight: in any thread but the one that generates."""
        if threading.current_thread().name != "samebit-generation":
            raise IndexError("piece id is out of range")
        publish(item)

    worker._engine.scheduler.publish_item = in_the_thread
    gate = runner.gate = StepGate(4)
    handles = worker.submit_all([[1, 2], PROMPT], SamplingParams(max_tokens=50))
    gate.wait_for_a_step()

    def open_for_two_steps() -> None:
        """Open the gate for the step that computes when the pause is asked for, and the one that was launched ahead."""
        wait_until(lambda: num_waiting(worker))
        gate.release(2)

    opens = threading.Thread(target=open_for_two_steps)
    opens.start()
    with pytest.raises(IndexError, match="piece id is out of range"):
        worker.pause()
    opens.join()
    for handle in handles:
        with pytest.raises(WorkerStateError, match="piece id is out of range"):
            handle.result(HANG)
    assert "piece id" in worker.trouble()
