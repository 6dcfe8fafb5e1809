"""A worker goes on after Ctrl-C at any point of a call or a command as if that call had been made, or had not.

A timer's signal handler raises `KeyboardInterrupt` after a random time, and mostly again and again after that: an
interrupt also meets what an earlier one has made the worker clear up.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from samebit.rollout.control.shelter import Hold
from samebit.rollout.sampling_params import SamplingParams

from ...patience import HANG
from ..inside import engine_of

MakeWorker = Callable[..., tuple[Any, Any]]
Oracle = Callable[..., list[int]]
FEW = SamplingParams(max_tokens=3)
TEST_TOOLS = ("_pytest", "hypothesis")
"""Names tools that hook into the collector and into errors that nobody catches; what is raised in there reaches no
caller.
"""
CASES = 10 * int(os.environ.get("SAMEBIT_SOAK_CASES", "30"))


def called(act: Callable[[], object]) -> None:
    """Call what alone is interrupted, and not what clears up behind the test."""
    act()


class Interrupts:
    """Raises in the main thread after so many seconds, and then `count` times in all at a distance of `again`."""

    def __init__(self, seconds: float, again: float, count: int) -> None:
        self._seconds = seconds
        self._again = again
        self._left = count

    def reach(self, act: Callable[[], object]) -> bool:
        """Run `act`; return whether an interrupt came out of it.

        One inside of the exit of `torch.no_grad` leaves the thread without gradients, which torch does not undo.
        """
        before, gradients = signal.signal(signal.SIGALRM, self._interrupt), torch.is_grad_enabled()
        try:
            signal.setitimer(signal.ITIMER_REAL, self._seconds)
            called(act)
        except KeyboardInterrupt:
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            torch.set_grad_enabled(gradients)
        return False

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        in_tools = False
        while frame is not None and frame.f_code is not called.__code__:
            in_tools |= frame.f_globals["__name__"].split(".")[0] in TEST_TOOLS
            frame = frame.f_back
        if frame is None:
            return
        if not in_tools:
            self._left -= 1
        if self._left:
            signal.setitimer(signal.ITIMER_REAL, self._again)
        if not in_tools:
            raise KeyboardInterrupt


def update_in_place(worker: Any, **options: object) -> None:
    with worker.weight_update(**options), torch.no_grad():
        worker.module.proj.weight.add_(0)


def acts_of(worker: Any) -> list[Callable[[], object]]:
    """Return every call of a worker; those that need their like come in pairs."""
    weights = {name: tensor.clone() for name, tensor in worker.module.state_dict().items()}
    return [
        lambda: worker.generate([[1, 2, 3], [4]], FEW),
        lambda: worker.submit([5, 6], FEW).result(),
        lambda: list(worker.submit([7, 8, 9], FEW)),
        lambda: worker.abort([handle.request_id for handle in worker.submit_all([[3], [4]])]),
        lambda: (worker.pause(), worker.resume()),
        lambda: (worker.sleep("kv_cache"), worker.wake_up()),
        lambda: worker.reset_prefix_cache(),
        lambda: worker.receive_weights(weights),
        lambda: worker.receive_weights(weights, in_flight="wait"),
        lambda: worker.receive_weights(in_flight="wait"),
        lambda: worker.receive_weights(in_flight="recompute"),
        lambda: update_in_place(worker),
        lambda: update_in_place(worker, in_flight="wait"),
        lambda: worker.stats(),
        lambda: worker.trouble(),
    ]


def assert_whole(worker: Any, oracle: Oracle) -> None:
    """Check that every command works, and requests of this thread and of another one."""
    worker.wake_up()
    worker.resume()
    if worker.trouble() is not None:
        assert "interrupted" in worker.trouble() or "KeyboardInterrupt" in worker.trouble()
        worker.receive_weights()
    assert worker.submit([5, 6], FEW).result(HANG).samples[0].token_ids == oracle([5, 6], 0, 3)
    other = threading.Thread(target=worker.receive_weights, kwargs={"in_flight": "wait"})
    other.start()
    other.join(HANG)
    assert not other.is_alive()
    assert worker.submit([1, 2], FEW).result(HANG).samples[0].token_ids == oracle([1, 2], 0, 3)
    assert engine_of(worker).scheduler.admission_open


@pytest.mark.soak
def test_an_interrupt_at_any_time_leaves_a_worker_that_works(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, _ = make_worker(shared=True)
    rng = random.Random(0)
    acts = acts_of(worker)
    came = 0
    for number in itertools.count():
        act = acts[number % len(acts)]
        if Interrupts(rng.uniform(1e-6, 1.5e-3), rng.choice((1e-5, 1e-4)), rng.randint(1, 3)).reach(act):
            came += 1
            assert_whole(worker, oracle)
        if came == CASES:
            break


def test_an_interrupt_before_the_first_line_of_the_end_of_a_block_is_noticed(
    make_worker: MakeWorker, oracle: Oracle
) -> None:
    """An interrupt before the first line of the end of a block is noticed. A tracer raises where only luck puts a
    signal: on entry to what ends the block. The exception lives on.
    """
    worker, _ = make_worker(shared=True)

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is Hold.leave.__code__:
            raise KeyboardInterrupt

    before = sys.gettrace()
    with pytest.raises(KeyboardInterrupt) as kept, worker.weight_update():
        sys.settrace(trace)
    sys.settrace(before)
    other = threading.Thread(target=worker.receive_weights, kwargs={"in_flight": "wait"})
    other.start()
    other.join(HANG)
    assert not other.is_alive()
    assert_whole(worker, oracle)
    assert kept.value is not None


def in_a_fork(call: Callable[[], object]) -> str:
    """Return what a call raises in a forked child; "" where it returns."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            said = ""
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_a_forked_child_is_told_at_once(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(shared=True)
    worker.pause()
    handle = worker.submit([1], FEW)
    calls: list[Callable[[], object]] = [
        lambda: worker.generate([[1]], FEW),
        lambda: worker.submit([1], FEW),
        lambda: handle.result(),
        lambda: next(iter(handle)),
        lambda: handle.cancel(),
        lambda: worker.abort("x"),
        lambda: worker.resume(),
        lambda: worker.receive_weights(),
        lambda: worker.weight_update().__enter__(),
        lambda: worker.submit_all([[1]], FEW),
        lambda: asyncio.run(handle.result_async()),
        lambda: worker.pause("wait"),
        lambda: worker.sleep("kv_cache"),
        lambda: worker.wake_up(),
        lambda: worker.reset_prefix_cache(),
        lambda: worker.load_state_dict(worker.module.state_dict()),
        lambda: worker.load_adapter("x", {}),
        lambda: worker.drop_adapter("x"),
        lambda: worker.close(),
    ]
    for call in calls:
        assert "a fork of it without the generation thread" in in_a_fork(call)
    worker.resume()
    assert handle.result(HANG).samples[0].finish_reason == "length"
