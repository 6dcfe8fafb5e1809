"""Weights of a shared module may change without a word to a worker, and several workers may share one module."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from samebit.rollout.errors import WorkerStateError
from samebit.rollout.sampling_params import SamplingParams

from ...patience import HANG, wait_until
from ..inside import engine_of, num_waiting
from ..step_gate import StepGate

MakeWorker = Callable[..., tuple[Any, Any]]
Oracle = Callable[..., list[int]]
PROMPT = list(range(1, 11))
FEW = SamplingParams(max_tokens=5)
KINDS = [{}, {"run_ahead": True}, {"recurrent": True, "num_checkpoints": 8, "num_held": 2}, {"prefix_caching": False}]


def move(worker: Any, runner: Any, salt: int) -> None:
    """Write other weights: the fake model's are its salt, and torch counts the writes to those of the module."""
    runner.salt = salt
    with torch.no_grad():
        worker.module.proj.bias.add_(1)


def test_a_change_between_two_calls_clears_the_index(
    make_worker: MakeWorker, oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    worker, runner = make_worker(shared=True)
    worker.generate([PROMPT], FEW)
    for salt in (1, 2):
        move(worker, runner, salt)
        output = worker.generate([PROMPT], FEW)[0]
        assert output.samples[0].token_ids == oracle(PROMPT, 0, 5, salt)
        assert (output.samples[0].weight_versions, output.num_cached_tokens) == ([(0, 5, salt)], 0)
        assert worker.generate([PROMPT], FEW)[0].num_cached_tokens == 8, "what is known of these weights is hit"
        assert (worker.weight_version, worker.stats()["untold_updates"]) == (salt, salt)
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "with worker.weight_update()" in said[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [0, 1, 2, 4])
def test_a_step_over_a_change_is_computed_again(
    make_worker: MakeWorker, oracle: Oracle, kind: dict[str, Any], step: int
) -> None:
    """A step over a change of weights is computed again, be it the one in which three samples take their first token
    from one prompt, or a later one.
    """
    worker, runner = make_worker(shared=True, **kind)
    steps = itertools.count()

    def meanwhile() -> None:
        if next(steps) == step:
            move(worker, runner, 1)
        runner.meanwhile = meanwhile

    runner.meanwhile = meanwhile
    worker.pause()
    handles = [
        worker.submit(PROMPT, SamplingParams(max_tokens=6, n=3)),
        worker.submit([7], SamplingParams(max_tokens=6)),
    ]
    worker.resume()
    for handle in handles:
        output = handle.result(HANG)
        for index, sample in enumerate(output.samples):
            known = output.prompt_token_ids + sample.token_ids
            assert len(sample.token_ids) == 6
            for start, end, version in sample.weight_versions:
                for place in range(len(output.prompt_token_ids) + start, len(output.prompt_token_ids) + end):
                    assert oracle(known[:place], index, 1, version) == known[place : place + 1]
            assert sample.context_versions == sample.weight_versions
            assert sample.weight_versions[-1][1:] == (6, 1)
    assert worker.stats()["untold_updates"] == worker.weight_version == 1
    assert worker.stats()["void_tokens"] > 0


@pytest.mark.parametrize("in_a_step", [False, True])
def test_a_write_that_was_launched_is_waited_for(make_worker: MakeWorker, oracle: Oracle, in_a_step: bool) -> None:
    """A GPU writes later than torch counts: the weights are there when the wait is over, and not before. What is
    launched during the wait is a change of its own."""
    worker, runner = make_worker(shared=True)
    worker.generate([PROMPT], FEW)

    def write() -> None:
        runner.salt = 1
        runner.writing = partial(setattr, runner, "salt", 2)
        worker.module.proj.bias.detach().add_(1)

    def launch() -> None:
        runner.writing = write
        worker.module.proj.bias.detach().add_(1)

    if in_a_step:
        runner.meanwhile = launch
    else:
        launch()
    sample = worker.generate([PROMPT], FEW)[0].samples[0]
    assert (sample.token_ids, sample.weight_versions) == (oracle(PROMPT, 0, 5, 2), [(0, 5, 2)])
    assert worker.stats()["untold_updates"] == 2


def test_what_writes_in_every_step_ends_its_requests(make_worker: MakeWorker, oracle: Oracle) -> None:
    """What writes in every step, as a hook that counts in a persistent buffer, ends its requests: they would be
    computed again for ever.
    """
    worker, runner = make_worker(shared=True)

    def meanwhile() -> None:
        worker.module.proj.bias.detach().add_(0)
        runner.meanwhile = meanwhile

    runner.meanwhile = meanwhile
    with pytest.raises(WorkerStateError, match=r"written during 100 steps in a row.*a hook that writes to a parameter"):
        worker.submit(PROMPT, SamplingParams(max_tokens=6, n=3)).result(HANG)
    runner.meanwhile = None
    assert worker.generate([[7]], FEW)[0].samples[0].token_ids == oracle([7], 0, 5)
    counters = worker.stats()
    assert (counters["requests_failed"], counters["untold_updates"]) == (1, 100)
    assert counters["blocks_free"] == counters["blocks_total"]


def test_a_change_while_a_command_commits_the_step_in_flight(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker(shared=True, run_ahead=True)
    runner.gate = StepGate(3)
    handle = worker.submit(PROMPT, SamplingParams(max_tokens=9))
    for chunk in handle:
        if len(chunk.token_ids) and worker.stats()["steps"] >= 3:
            break
    move(worker, runner, 1)
    runner.gate.release(1000)
    worker.reset_prefix_cache()
    sample = handle.result(HANG).samples[0]
    count = sample.weight_versions[0][1]
    assert sample.weight_versions == [(0, count, 0), (count, 9, 1)]
    before = oracle(PROMPT, 0, count, 0)
    assert sample.token_ids == before + oracle(PROMPT + before, 0, 9 - count, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.load_state_dict({n: t + 1 for n, t in module.state_dict().items()}, assign=True),
        lambda module: setattr(module.proj, "bias", nn.Parameter(torch.ones(5))),
        lambda module: nn.init.ones_(module.embed.weight),
        lambda module: torch._foreach_add_([p.detach() for p in module.parameters()], 1.0),
    ],
    ids=["assigned", "another parameter", "written", "foreach"],
)
def test_what_is_noticed(make_worker: MakeWorker, change: Callable[[nn.Module], object]) -> None:
    worker, _ = make_worker(shared=True)
    worker.generate([PROMPT], FEW)
    change(worker.module)
    assert worker.generate([PROMPT], FEW)[0].samples[0].weight_versions == [(0, 5, 1)]


def test_what_was_told_is_not_noticed_again(make_worker: MakeWorker, caplog: pytest.LogCaptureFixture) -> None:
    worker, runner = make_worker(shared=True)
    module = worker.module
    with worker.weight_update():
        move(worker, runner, 1)
    move(worker, runner, 2)
    worker.receive_weights()
    worker.receive_weights({name: tensor + 1 for name, tensor in module.state_dict().items()})
    worker.receive_weights({"proj.bias": torch.ones(5)}, partial=True)
    assert worker.generate([PROMPT], FEW)[0].samples[0].weight_versions == [(0, 5, 4)]
    module.train()
    module.requires_grad_(False)
    module.zero_grad()
    assert worker.generate([PROMPT], FEW)[0].num_cached_tokens == 8
    assert worker.stats()["untold_updates"] == 0
    assert not caplog.records


def test_parameters_that_torch_does_not_count(make_worker: MakeWorker) -> None:
    with torch.inference_mode():
        worker, _ = make_worker(shared=True)
    assert worker.module.proj.bias.is_inference()
    assert worker.generate([PROMPT], FEW)[0].samples[0].weight_versions == [(0, 5, 0)]
    with worker.weight_update() as update, torch.inference_mode():
        worker.module.proj.bias.add_(1)
    assert update.report.changed == ("proj.bias",)


# -- several workers on one module -----------------------------------------------------------------


def two_workers(make_worker: MakeWorker, **options: Any) -> list[Any]:
    first, _ = make_worker(shared=True, **options)
    return [first, make_worker(shared=True, beside=first, **options)[0]]


@pytest.mark.parametrize("turn", [1, -1])
def test_an_update_through_one_worker_is_one_of_all(
    make_worker: MakeWorker, turn: int, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = two_workers(make_worker)[::turn]
    for worker in (one, other):
        worker.generate([PROMPT], FEW)
    with one.weight_update(version=7) as update, torch.no_grad():
        one.module.proj.bias.add_(1)
    assert update.report.changed == ("proj.bias",)
    assert (one.weight_version, other.weight_version) == (7, 1)
    for worker in (one, other):
        assert worker.stats()["blocks_cached"] == 0
        assert worker.generate([PROMPT], FEW)[0].num_cached_tokens == 0
    other.receive_weights({name: tensor + 1 for name, tensor in one.module.state_dict().items()})
    assert (one.weight_version, other.weight_version) == (8, 2)
    assert one.generate([PROMPT], FEW)[0].num_cached_tokens == 0
    assert one.receive_weights().changed is None, "what the other one wrote has been reported"
    assert one.stats()["untold_updates"] == other.stats()["untold_updates"] == 0
    assert not caplog.records


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "wait", "abort"])
def test_requests_in_flight_of_the_other_worker(make_worker: MakeWorker, in_flight: str) -> None:
    """The other worker stands still while the first one writes, and does with its requests in flight what the update
    says.
    """
    one, other = two_workers(make_worker)
    runner = engine_of(other).runner
    runner.gate = StepGate()
    handle = other.submit(PROMPT, SamplingParams(max_tokens=6))
    assert runner.entered.wait(HANG)

    def let_the_update_in() -> None:
        """End the step that runs when the update stands in line: the next turn is the update's."""
        wait_until(lambda: in_flight == "wait" or num_waiting(other) == 1)
        runner.gate.release(1000 if in_flight == "wait" else 1)

    threading.Thread(target=let_the_update_in).start()
    with one.weight_update(in_flight=in_flight):
        runner.gate.release(1000)
        steps = other.stats()["steps"]
        with pytest.raises(WorkerStateError, match="inside weight_update"):
            other.generate([PROMPT], FEW)
        assert other.stats()["steps"] == steps
    sample = handle.result(HANG).samples[0]
    if in_flight == "wait":
        assert sample.weight_versions == [(0, 6, 0)]
    elif in_flight == "abort":
        assert sample.finish_reason == "abort"
    else:
        count = sample.weight_versions[0][1]
        assert sample.weight_versions[1:] == [(count, 6, 1)]
        assert (sample.context_versions == sample.weight_versions) == (in_flight == "recompute")


def test_an_update_that_breaks_off_leaves_all_workers_incomplete(make_worker: MakeWorker) -> None:
    one, other = two_workers(make_worker)
    with pytest.raises(ZeroDivisionError), one.weight_update():
        raise ZeroDivisionError("in the optimizer")
    for worker in (one, other):
        with pytest.raises(WorkerStateError, match=r"weights incomplete.*in the optimizer"):
            worker.generate([PROMPT], FEW)
    other.receive_weights()
    for worker in (one, other):
        assert len(worker.generate([PROMPT], FEW)) == 1


def test_workers_that_are_gone_do_not_matter(make_worker: MakeWorker) -> None:
    one, other = two_workers(make_worker)
    third, runner = make_worker(shared=True, beside=one)
    runner.fail_with = RuntimeError("broken")
    with pytest.raises(WorkerStateError, match="broken"):
        third.generate([PROMPT], FEW)
    one.close()
    with other.weight_update():
        pass
    assert other.weight_version == 1
    with pytest.raises(WorkerStateError, match="closed"), one.weight_update():
        pass


def test_a_worker_can_not_be_built_inside_an_update(make_worker: MakeWorker) -> None:
    one, _ = make_worker(shared=True)
    with one.weight_update(), pytest.raises(WorkerStateError, match="inside weight_update"):
        make_worker(shared=True, beside=one)
    assert len(one.generate([PROMPT], FEW)) == 1


def test_a_worker_that_is_built_during_an_update_waits_for_its_end(make_worker: MakeWorker) -> None:
    one, _ = make_worker(shared=True)
    with ThreadPoolExecutor(1) as beside:
        with one.weight_update():
            built = beside.submit(make_worker, shared=True, beside=one)
            wait_until(lambda: num_waiting(one))
            assert not built.done()
            with torch.no_grad():
                one.module.proj.bias.add_(1)
        other, _ = built.result(HANG)
    assert other.generate([PROMPT], FEW)[0].samples[0].weight_versions == [(0, 5, 0)]
    assert other.stats()["untold_updates"] == 0


def test_a_worker_that_is_built_while_an_update_waits_takes_part_in_it(make_worker: MakeWorker) -> None:
    """A worker that is built while an update waits takes part in it: the update holds no lock while it waits for
    requests in flight, and a worker that comes then stands still too.
    """
    one, runner = make_worker(shared=True)
    runner.gate = StepGate()
    handle = one.submit(PROMPT, SamplingParams(max_tokens=40))
    assert runner.entered.wait(HANG)
    inside, end = threading.Event(), threading.Event()

    def update() -> None:
        with one.weight_update(in_flight="wait"), torch.no_grad():
            inside.set()
            assert end.wait(HANG)
            one.module.proj.bias.add_(1)

    def both_wait() -> bool:
        """Tell whether the update waits, for the lock or for the end of a step, and the other worker for the lock."""
        return num_waiting(one) + len(one._thread._draining._waiting) == 2

    with ThreadPoolExecutor(2) as beside:
        updated = beside.submit(update)
        wait_until(lambda: num_waiting(one))
        runner.gate.release()
        wait_until(lambda: not engine_of(one).scheduler.admission_open)
        built = beside.submit(make_worker, shared=True, beside=one)
        while not built.done():
            wait_until(lambda: built.done() or both_wait())  # no step ends for nobody: there are 40
            steps = one.stats()["steps"]
            runner.gate.release()
            wait_until(lambda steps=steps: built.done() or one.stats()["steps"] > steps)
        assert len(one._weights.users.in_order()) == 2
        runner.gate.release(100)
        assert inside.wait(HANG)
        other, _ = built.result(HANG)
        queued = other.submit(PROMPT, FEW)
        end.set()
        updated.result(HANG)
    assert handle.result(HANG).samples[0].weight_versions == [(0, 40, 0)]
    assert queued.result(HANG).samples[0].weight_versions == [(0, 5, 1)]
    assert other.stats()["untold_updates"] == 0


def test_updates_through_both_at_once_do_not_wait_for_each_other(make_worker: MakeWorker) -> None:
    workers = two_workers(make_worker)

    def update(worker: Any) -> None:
        for _ in range(40):
            with worker.weight_update():
                pass
            worker.generate([PROMPT], FEW)

    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(update, worker) for worker in workers * 2]:
            future.result(HANG)
    assert [worker.weight_version for worker in workers] == [160, 160]
