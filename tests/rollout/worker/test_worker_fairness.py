"""Commands under full load wait for a bounded count of steps, leave steps to generation, and none waits for ever."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from samebit.rollout.errors import WorkerStateError
from samebit.rollout.sampling_params import SamplingParams

from ...patience import HANG, wait_until
from ..inside import engine_of, num_waiting
from ..step_gate import StepGate
from .lock_log import LockLog

MakeWorker = Callable[..., tuple[Any, Any]]
Oracle = Callable[..., list[int]]
COMMANDERS = 8
LONG = SamplingParams(max_tokens=50)


class Load:
    """Keeps requests in flight, whatever happens to the worker, until told to stop; then checks all of them."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._stop = threading.Event()
        self._slots = threading.Semaphore(12)
        self._handles: list[Any] = []
        self._pool = ThreadPoolExecutor(12)
        self._feeder = threading.Thread(target=self._feed)
        self._feeder.start()
        wait_until(lambda: len(self._handles) > 10)

    def _feed(self) -> None:
        for number in itertools.count():
            while not self._slots.acquire(timeout=0.05):
                if self._stop.is_set():
                    return
            if self._stop.is_set():
                return
            handle = self._worker.submit([number % 97, 5, number % 3], LONG)
            self._handles.append(handle)
            self._pool.submit(self._await, handle)

    def _await(self, handle: Any) -> None:
        try:
            handle.result(HANG)
        finally:
            self._slots.release()

    def finish(self, oracle: Oracle) -> None:
        self._stop.set()
        self._feeder.join(HANG)
        for handle in self._handles:
            out = handle.result(HANG)
            whole = oracle(out.prompt_token_ids, 0, LONG.max_tokens)
            (sample,) = out.samples
            assert sample.token_ids == (whole if sample.finish_reason == "length" else whole[: len(sample.token_ids)])
        self._pool.shutdown()


def command(worker: Any, weights: dict[str, Any], number: int) -> None:
    """Give one of the commands that take the lock once."""
    [
        lambda: worker.receive_weights(weights),
        lambda: worker.receive_weights(weights, in_flight="recompute"),
        lambda: worker.reset_prefix_cache(),
        lambda: worker.load_state_dict(weights),
        lambda: worker.resume(),
        lambda: worker.wake_up(),
    ][number % 6]()


def in_eight_threads(act: Callable[[int], object]) -> None:
    """Let each of eight threads call `act` 100 times, without a rest."""
    with ThreadPoolExecutor(COMMANDERS) as pool:
        running = [pool.submit(lambda o=o: [act(o + number) for number in range(100)]) for o in range(COMMANDERS)]
        for done in running:
            done.result(HANG)


class SteadyLoad:
    """Gives work for 3,000 steps of a millisecond each, more than any test here needs; what is left at the end is
    aborted.
    """

    def __init__(self, worker: Any, runner: Any) -> None:
        self._worker = worker
        self._launch = runner.launch
        runner.launch = self._step
        self._handles = worker.submit_all([[number % 97, 5, number % 3] for number in range(240)], LONG)

    def _step(self, *args: Any) -> Any:
        threading.Event().wait(0.001)
        return self._launch(*args)

    def finish(self, oracle: Oracle) -> None:
        assert not self._handles[-1].done, "there was work all the time"
        self._worker.abort([handle.request_id for handle in self._handles])
        for handle in self._handles:
            out = handle.result(HANG)
            whole = oracle(out.prompt_token_ids, 0, LONG.max_tokens)
            tokens = out.samples[0].token_ids
            assert tokens == whole[: len(tokens)]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_between_two_commands_of_eight_commanders_there_is_a_step(
    run_ahead: bool, make_worker: MakeWorker, oracle: Oracle
) -> None:
    """A step comes between two commands of eight commanders, each of which asks again at once. No clocks: the lock is
    logged.
    """
    worker, runner = make_worker(max_num_seqs=4, num_blocks=80, run_ahead=run_ahead)
    weights = {name: tensor.clone() for name, tensor in worker.module.state_dict().items()}
    log = LockLog(worker)
    gate = runner.gate = StepGate()
    load = SteadyLoad(worker, runner)
    gate.wait_for_a_step()

    def open_when_all_have_asked() -> None:
        wait_until(lambda: num_waiting(worker) == COMMANDERS)
        runner.gate = None
        gate.release(2)

    opens = threading.Thread(target=open_when_all_have_asked)
    opens.start()
    in_eight_threads(lambda number: command(worker, weights, number))
    opens.join()
    steps, commands = worker.stats()["steps"], log.commands
    load.finish(oracle)
    log.assert_fair()
    assert commands == 100 * COMMANDERS
    assert log.turns_due >= commands - COMMANDERS, "after each, but for those before the first request was taken in"
    assert steps >= log.turns_due - 1, "the step after the last command may be still to come"
    assert len(log.waits) >= 0.5 * commands, "most commands had to wait"
    assert max(wait.queued for wait in log.waits) == COMMANDERS - 1, "all of them asked at once"


def test_commanders_that_pause_and_resume_leave_a_step_after_each_resume(
    make_worker: MakeWorker, oracle: Oracle
) -> None:
    """Commanders that pause and resume leave a step after each resume, though the next pause stands in the queue
    already when generation may go on.
    """
    worker, runner = make_worker(max_num_seqs=4, num_blocks=80)
    log = LockLog(worker)
    load = SteadyLoad(worker, runner)
    in_eight_threads(lambda number: worker.pause() if number % 2 else worker.resume())
    worker.resume()
    load.finish(oracle)
    log.assert_fair()
    assert worker.stats()["steps"] >= log.turns_due - 1
    assert log.turns_due >= 50 * COMMANDERS - COMMANDERS, "after each resume, but for those before there was work"


def test_waiting_updates_from_many_threads_end_whatever_the_others_do(make_worker: MakeWorker, oracle: Oracle) -> None:
    """Waiting updates from many threads end whatever the others do (pauses, sleeps, aborts and other updates): each is
    done, or says why it can not be.
    """
    worker, _ = make_worker(max_num_seqs=4, num_blocks=80, while_asleep="wait")
    weights = {name: tensor.clone() for name, tensor in worker.module.state_dict().items()}
    load = Load(worker)
    outcomes: list[str] = []

    def waiter() -> None:
        """Update at least 40 times, and until 5 were done; if refused, come again at once, before who would resume."""
        done, limit = 0, time.monotonic() + HANG
        for number in itertools.count():
            if number >= 40 and done >= 5:
                return
            assert time.monotonic() < limit, "every update is refused"
            try:
                worker.receive_weights(weights, in_flight="wait")
                outcomes.append("done")
                done += 1
            except WorkerStateError as error:
                if not any(text in str(error) for text in ("needs a worker that generates", "weights are asleep")):
                    raise
                outcomes.append("refused")

    def other(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            kind = rng.randrange(5)
            if kind == 0:
                worker.pause()
                worker.resume()
            elif kind == 1:
                worker.sleep("kv_cache")
                worker.wake_up()
            elif kind == 2:
                worker.sleep()
                worker.wake_up()
            elif kind == 3:
                worker.abort([f"request-{rng.randrange(1000)}"])
            else:
                worker.pause()
                worker.reset_prefix_cache()
                worker.resume()

    with ThreadPoolExecutor(6) as pool:
        running = [*(pool.submit(waiter) for _ in range(4)), *(pool.submit(other, seed) for seed in range(2))]
        for done in running:
            done.result(HANG)
    worker.wake_up()
    worker.resume()
    load.finish(oracle)
    assert len(outcomes) >= 160
    assert outcomes.count("done") >= 20
    assert engine_of(worker).scheduler.admission_open
    assert worker.weight_version == outcomes.count("done")
