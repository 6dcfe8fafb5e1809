"""Commands under full load: how long they wait, what they leave to generation, and that none waits for ever."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from samebit.rollout.errors import WorkerStateError
from samebit.rollout.sampling_params import SamplingParams

from .lock_log import GENERATION, LockLog

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
            handle.result(60)
        finally:
            self._slots.release()

    def finish(self, oracle: Oracle) -> None:
        self._stop.set()
        self._feeder.join(60)
        for handle in self._handles:
            out = handle.result(60)
            whole = oracle(out.prompt_token_ids, 0, LONG.max_tokens)
            (sample,) = out.samples
            assert sample.token_ids == (whole if sample.finish_reason == "length" else whole[: len(sample.token_ids)])
        self._pool.shutdown()
        assert len(self._handles) > 10, "there was no load"


def command(worker: Any, weights: dict[str, Any], number: int) -> None:
    """One of the commands that take the lock once."""
    [
        lambda: worker.receive_weights(weights),
        lambda: worker.receive_weights(weights, in_flight="recompute"),
        lambda: worker.reset_prefix_cache(),
        lambda: worker.load_state_dict(weights),
        lambda: worker.resume(),
        lambda: worker.wake_up(),
    ][number % 6]()


@pytest.mark.parametrize("commanders", [1, COMMANDERS])
def test_a_command_waits_a_step_at_most_and_generation_gets_one_a_command(
    make_worker: MakeWorker, oracle: Oracle, commanders: int
) -> None:
    """No clocks: the queue of the lock is logged. Each commander asks again at once, for 100 commands."""
    worker, _ = make_worker(max_num_seqs=4, num_blocks=80)
    weights = {name: tensor.clone() for name, tensor in worker._weights.module.state_dict().items()}
    log = LockLog(worker)
    load = Load(worker)
    while worker.stats()["steps"] < 20:
        threading.Event().wait(0.001)

    def commander(offset: int) -> None:
        for number in range(100):
            command(worker, weights, offset + number)

    with ThreadPoolExecutor(commanders) as pool:
        for done in [pool.submit(commander, offset) for offset in range(commanders)]:
            done.result(120)
    asked, turns = list(log.waits), list(log.turns)
    load.finish(oracle)
    assert len(asked) >= 50 * commanders, "most commands had to wait: the worker was busy"
    log.assert_fair()
    assert log.most_turns_between_steps() == 1, "of one commander, a second command before a step"
    assert turns.count(GENERATION) >= len(asked) // commanders
    if commanders > 1:
        assert max(wait.queued for wait in asked) == commanders - 1, "all of them asked at once"


def test_waiting_updates_from_many_threads_end_whatever_the_others_do(make_worker: MakeWorker, oracle: Oracle) -> None:
    """in_flight="wait" beside pauses, sleeps, aborts and other updates: it is done, or it says why it can not be."""
    worker, _ = make_worker(max_num_seqs=4, num_blocks=80, while_asleep="wait")
    weights = {name: tensor.clone() for name, tensor in worker._weights.module.state_dict().items()}
    load = Load(worker)
    outcomes: list[str] = []

    def waiter() -> None:
        for _ in range(40):
            try:
                worker.receive_weights(weights, in_flight="wait")
                outcomes.append("done")
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
            done.result(120)
    worker.wake_up()
    worker.resume()
    load.finish(oracle)
    assert len(outcomes) == 160
    assert outcomes.count("done") >= 20
    assert worker._engine.scheduler.admission_open
    assert worker.weight_version == outcomes.count("done")
