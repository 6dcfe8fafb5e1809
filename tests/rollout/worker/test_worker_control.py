"""Weights, sleep and pause are commands to a worker, each of which does what it should to the requests in flight."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from samebit.rollout.errors import WorkerStateError
from samebit.rollout.sampling_params import SamplingParams
from samebit.weight_sync import NonFiniteWeightError, WeightMismatchError, apply

from ...patience import HANG, wait_until
from ..conftest import weights_of
from ..inside import num_waiting, spill_file
from ..step_gate import StepGate

MakeWorker = Callable[..., tuple[Any, Any]]
Oracle = Callable[..., list[int]]
FEW = SamplingParams(max_tokens=5)
LONG = SamplingParams(max_tokens=40)


def start_long_request(worker: Any, runner: Any) -> Any:
    """Return a request that has computed three steps and waits in the gate of the next one."""
    runner.gate = StepGate(3)
    handle = worker.submit([1, 2, 3], LONG)
    runner.gate.wait_for_a_step()
    return handle


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run a blocking call; its result or its error is in the list."""
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, outcome


def result_in_background(call: Callable[[], object]) -> object:
    """Run a call in a thread that no signal handler runs in; raise what it raises."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(call).result(HANG)


def open_gate(runner: Any) -> None:
    runner.gate.release(1000)


# -- weights ---------------------------------------------------------------------------------------


def test_an_update_reports_what_changed_and_raises_the_version(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    new = weights_of(worker)
    new["proj.bias"] += 1
    report = worker.receive_weights(new)
    assert (report.version, report.changed, report.changed_tensors) == (1, ("proj.bias",), 1)
    assert torch.equal(worker.module.proj.bias, new["proj.bias"])
    assert worker.load_state_dict(new).changed_tensors == 0
    assert worker.load_state_dict(MappingProxyType(new)).changed_tensors == 0, "any mapping, as receive_weights takes"
    assert worker.receive_weights(new, version=10).version == 10
    assert worker.weight_version == worker.stats()["weight_version"] == 10
    with pytest.raises(ValueError, match="above the current 10, got 10"):
        worker.receive_weights(new, version=10)
    assert worker.weight_version == 10


def test_a_refused_update_changes_nothing_and_generation_goes_on(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    before = weights_of(worker)
    bad = {name: tensor + 1 for name, tensor in before.items()}
    bad["proj.weight"][0, 0] = float("nan")
    with pytest.raises(NonFiniteWeightError, match=r"proj\.weight"):
        worker.receive_weights(bad)
    with pytest.raises(WeightMismatchError, match=r"proj\.weight"):
        worker.receive_weights({"proj.bias": before["proj.bias"]})
    for wrong in ({"version": True}, {"version": "2"}, {"in_flight": "drop"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            worker.receive_weights(before, **wrong)
    with pytest.raises(TypeError, match="dict of tensors"):
        worker.load_state_dict([1])
    with pytest.raises(TypeError, match="not from int"):
        worker.receive_weights(3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(worker).items())
    assert worker.weight_version == 0
    assert worker.generate([[1]], FEW)[0].samples[0].weight_versions == [(0, 5, 0)]


def test_an_own_module_needs_a_source(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(shared=False)
    with pytest.raises(WorkerStateError, match="without a source needs a worker on the trainer's own module"):
        worker.receive_weights()
    with pytest.raises(WorkerStateError, match="weight_update"):
        worker.weight_update()


def test_a_shared_module_reports_what_the_trainer_changed(
    make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker, _ = make_worker(shared=True)
    module = worker.module
    with worker.weight_update() as update, torch.no_grad():
        module.proj.bias.add_(1)
    assert (update.report.version, update.report.changed, update.report.bytes) == (1, ("proj.bias",), 5 * 4)
    assert (update.report.sent_bytes, update.report.dense_bytes) == (0, 4 * (7 * 3 + 5 * 3 + 5 + 2))
    assert not caplog.records
    with worker.weight_update(version=7) as update:
        pass
    assert worker.weight_version == 7
    assert (update.report.changed, update.report.changed_tensors, update.report.bytes) == (None, None, None)
    assert not caplog.records, "that nothing was seen to change does not say that nothing did"
    with torch.no_grad():
        module.embed.weight.mul_(2)
    assert worker.receive_weights().changed == ("embed.weight",)
    assert worker.receive_weights().changed_tensors is None
    with pytest.raises(ValueError, match="partial=True and cast=False need a source"):
        worker.receive_weights(partial=True)


def test_a_shared_module_given_its_own_state_dict_still_reports_the_change(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(shared=True)
    module = worker.module
    with torch.no_grad():
        module.proj.weight.add_(1)
    report = worker.receive_weights(module)
    assert (report.changed, report.bytes) == (("proj.weight",), 5 * 3 * 4)


def test_worker_calls_inside_the_block_raise_instead_of_hanging(make_worker: MakeWorker) -> None:
    worker, runner = make_worker(shared=True)
    handle = start_long_request(worker, runner)
    open_gate(runner)
    with worker.weight_update():
        calls = [
            lambda: worker.generate([[1]], FEW),
            lambda: worker.submit([1], FEW),
            lambda: worker.receive_weights(),
            lambda: worker.receive_weights(in_flight="wait"),
            lambda: worker.sleep("kv_cache"),
            lambda: worker.pause(),
            lambda: worker.close(),
            lambda: worker.weight_update().__enter__(),
        ]
        if not handle.done:
            calls += [lambda: handle.result(), lambda: list(handle)]
        for call in calls:
            with pytest.raises(WorkerStateError, match="inside weight_update"):
                call()
        assert worker.stats()["weight_version"] == 0
    assert worker.weight_version == 1
    assert handle.result(HANG).samples[0].finish_reason == "length"


def test_a_block_can_be_entered_again_once_it_is_over(make_worker: MakeWorker) -> None:
    """A block of an update can be entered again once it is over, in any thread, with requests in flight, with and
    without a `with`; an error is one of its own block only.
    """
    worker, runner = make_worker(shared=True)
    handle = start_long_request(worker, runner)
    open_gate(runner)
    block = worker.weight_update()

    def train() -> int:
        with block as update, torch.no_grad():
            worker.module.proj.bias.add_(1)
            with pytest.raises(WorkerStateError, match="inside weight_update"):
                worker.submit([1], FEW)
        version: int = update.report.version
        return version

    assert [train(), train()] == [1, 2]
    assert result_in_background(train) == 3
    with ExitStack() as stack:
        stack.enter_context(block)
    assert [worker.weight_version, train()] == [4, 5]
    block.__enter__()
    result_in_background(lambda: block.__exit__(None, None, None))
    assert [worker.weight_version, train()] == [6, 7]
    assert handle.result(HANG).samples[0].finish_reason == "length"
    with pytest.raises(ZeroDivisionError), block:
        raise ZeroDivisionError
    worker.load_state_dict(weights_of(worker))
    assert [worker.weight_version, train()] == [8, 9]


@pytest.mark.parametrize("call", [lambda act: act(), result_in_background])
def test_a_block_inside_itself_is_refused_and_the_outer_one_goes_on(
    make_worker: MakeWorker, call: Callable[[Callable[[], None]], None]
) -> None:
    worker, _ = make_worker(shared=True)
    block = worker.weight_update()

    def nest() -> None:
        with block as update:
            with pytest.raises(WorkerStateError, match="inside weight_update"), block:
                pass
            with pytest.raises(WorkerStateError, match="inside weight_update"):
                worker.submit([1], FEW)
        assert update.report.version == 1

    call(nest)
    assert worker.generate([[1]], FEW)[0].samples[0].weight_versions == [(0, 5, 1)]


def test_threads_that_share_a_block_take_turns(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(shared=True)
    block = worker.weight_update()

    def train() -> int:
        with block as update:
            pass
        version: int = update.report.version
        return version

    with block:
        others = [in_background(train) for _ in range(2)]
        wait_until(lambda: num_waiting(worker) == 2)
    for thread, _ in others:
        thread.join(HANG)
    assert sorted(outcome[0] for _, outcome in others) == [2, 3]


def test_an_exception_in_the_block_leaves_the_weights_incomplete(make_worker: MakeWorker) -> None:
    worker, runner = make_worker(shared=True)
    handle = start_long_request(worker, runner)
    pauser, _ = in_background(worker.pause)
    wait_until(lambda: num_waiting(worker))
    open_gate(runner)
    pauser.join(HANG)
    with pytest.raises(ZeroDivisionError), worker.weight_update():
        raise ZeroDivisionError("in the optimizer")
    with pytest.raises(WorkerStateError, match="in the optimizer") as caught:
        handle.result(HANG)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    counts = worker.stats()
    assert (counts["requests_failed"], counts["requests_aborted"]) == (1, 0)
    worker.resume()
    with pytest.raises(WorkerStateError, match="weights incomplete") as caught:
        worker.generate([[1]], FEW)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(WorkerStateError, match="weights incomplete"), worker.weight_update():
        pass
    assert worker.weight_version == 0
    whole = weights_of(worker)
    worker.receive_weights({"proj.bias": whole["proj.bias"]}, partial=True)
    with pytest.raises(WorkerStateError, match="weights incomplete"):
        worker.submit([1], FEW)
    worker.load_state_dict(whole)
    assert worker.generate([[1]], FEW)[0].samples[0].weight_versions == [(0, 5, 2)]


def test_the_trainer_can_declare_its_parameters_whole_again(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(shared=True)
    module = worker.module
    torch.nn.init.constant_(module.proj.bias, float("nan"))
    with pytest.raises(KeyError), worker.weight_update():
        raise KeyError
    with pytest.raises(NonFiniteWeightError, match=r"proj\.bias"):
        worker.receive_weights()
    with pytest.raises(WorkerStateError, match="weights incomplete"):
        worker.submit([1], FEW)
    with torch.no_grad():
        module.proj.bias.zero_()
    worker.receive_weights()
    assert len(worker.generate([[1]], FEW)) == 1


def test_a_copy_that_breaks_off_midway_leaves_the_weights_incomplete(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = make_worker()
    whole = {name: tensor + 1 for name, tensor in weights_of(worker).items() if name != "head.weight"}
    real, calls = apply.copy_scanned, []

    def fails_at_the_second_tensor(source: torch.Tensor, target: torch.Tensor) -> Any:
        calls.append(source)
        if len(calls) == 2:
            raise OSError("the disk went away")
        return real(source, target)

    monkeypatch.setattr(apply, "copy_scanned", fails_at_the_second_tensor)
    with pytest.raises(OSError, match="the disk went away"):
        worker.receive_weights(whole)
    assert torch.equal(worker.module.scale, whole["scale"]), "a mixture by now"
    with pytest.raises(WorkerStateError, match=r"weights incomplete: .*the disk went away"):
        worker.generate([[1]], FEW)
    worker.receive_weights(whole)
    assert worker.generate([[1]], FEW)[0].samples[0].weight_versions == [(0, 5, 1)]


# -- requests in flight ----------------------------------------------------------------------------


def update_in_flight(make_worker: MakeWorker, in_flight: str) -> tuple[Any, Any, Any]:
    """Ask for an update with this mode while a long request is mid-step; then open the gate."""
    worker, runner = make_worker()
    handle = start_long_request(worker, runner)
    new = {name: tensor + 1 for name, tensor in weights_of(worker).items()}
    thread, outcome = in_background(lambda: worker.receive_weights(new, in_flight=in_flight))
    wait_until(lambda: num_waiting(worker) or outcome)
    late = worker.submit([9], FEW)
    open_gate(runner)
    thread.join(HANG)
    assert outcome[0].version == 1
    return worker, handle, late


def test_keep_goes_on_with_the_kv_it_has(make_worker: MakeWorker, oracle: Oracle) -> None:
    _, handle, late = update_in_flight(make_worker, "keep")
    sample = handle.result(HANG).samples[0]
    assert sample.token_ids == oracle([1, 2, 3], 0, 40)
    assert sample.weight_versions == [(0, 4, 0), (4, 40, 1)]
    assert sample.context_versions == [(0, 40, 0)], "the trainer can not compute those after the update"
    assert sample.kv_versions == [(0, 6, 0), (6, 42, 1)]
    assert late.result(HANG).samples[0].finish_reason == "length"


def test_recompute_computes_the_kv_again(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, handle, _ = update_in_flight(make_worker, "recompute")
    output = handle.result(HANG)
    sample = output.samples[0]
    assert sample.token_ids == oracle([1, 2, 3], 0, 40)
    assert sample.weight_versions == [(0, 4, 0), (4, 40, 1)]
    assert sample.context_versions == sample.weight_versions, "the trainer can compute all of them"
    assert sample.kv_versions == [(0, 42, 1)], "computed again under the new weights"
    assert "preempted" in [event.name for event in output.events]
    assert worker.stats()["preemptions"] == 1


def test_a_request_that_resumes_after_an_update_says_under_which_weights(
    make_engine: Callable[..., Any], make_request: Callable[..., Any]
) -> None:
    """A request that resumes after an update, preempted for its memory or by a sleep, says under which weights: what
    was mixed before stays known as mixed.
    """
    engine = make_engine()
    request = make_request("r", [1, 2, 3], max_tokens=12, n=2)
    engine.add(request)
    for version in range(1, 4):
        for _ in range(3):
            engine.step()
        if version == 2:
            engine.preempt_all()
        engine.weights_changed(version)
    while engine.has_work:
        engine.step()
    for sequence in request.sequences:
        assert sequence.weight_spans == [(0, 3, 0), (3, 6, 1), (6, 9, 2), (9, 12, 3)]
        assert sequence.context_spans == [(0, 6, 0), (6, 12, 2)]
        assert sequence.kv_spans == [(0, 11, 2), (11, 14, 3)]


def test_abort_ends_what_has_begun(make_worker: MakeWorker) -> None:
    _, handle, late = update_in_flight(make_worker, "abort")
    sample = handle.result(HANG).samples[0]
    assert sample.finish_reason == "abort"
    assert sample.weight_versions == [(0, 4, 0)]
    assert late.result(HANG).samples[0].finish_reason == "length"


def test_wait_lets_what_has_begun_finish_first(make_worker: MakeWorker) -> None:
    _, handle, late = update_in_flight(make_worker, "wait")
    assert handle.result(HANG).samples[0].weight_versions == [(0, 40, 0)]
    assert late.result(HANG).samples[0].weight_versions == [(0, 5, 1)]


def test_wait_on_a_paused_worker_raises_when_something_is_in_flight(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    new = weights_of(worker)
    worker.pause()
    assert worker.receive_weights(new, in_flight="wait").version == 1, "nothing is in flight"
    worker.resume()
    handle = start_long_request(worker, runner)
    open_gate(runner)
    worker.pause()
    if not handle.done:
        with pytest.raises(WorkerStateError, match='in_flight="wait"'):
            worker.receive_weights(new, in_flight="wait")
    worker.resume()
    assert handle.result(HANG).samples[0].finish_reason == "length"
    assert worker.generate([[1]], FEW)[0].samples[0].finish_reason == "length", "admission is open again"


def test_a_pause_while_somebody_waits_does_not_hang_either(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    handle = start_long_request(worker, runner)
    new = weights_of(worker)
    waiter, waited = in_background(lambda: worker.receive_weights(new, in_flight="wait"))
    wait_until(lambda: num_waiting(worker) == 1)
    pauser, _ = in_background(worker.pause)
    wait_until(lambda: num_waiting(worker) == 2)
    runner.gate.release(2)
    pauser.join(HANG)
    waiter.join(HANG)
    assert isinstance(waited[0], WorkerStateError)
    assert not handle.done
    worker.resume()
    open_gate(runner)
    assert handle.result(HANG).samples[0].finish_reason == "length"
    assert worker.generate([[1]], FEW)[0].samples[0].weight_versions == [(0, 5, 0)]


def test_commands_wait_a_step_at_most_and_do_not_starve_generation(make_worker: MakeWorker) -> None:
    """Commands wait a step at most and do not starve generation: with eight commanders in a loop there is a token from
    each version, while there is something to generate.
    """
    worker, runner = make_worker(max_model_len=64)
    handle = start_long_request(worker, runner)
    rounds = 30
    new = weights_of(worker)
    commanders = [in_background(lambda: [worker.receive_weights(new) for _ in range(rounds)]) for _ in range(8)]
    wait_until(lambda: num_waiting(worker) == 8)
    open_gate(runner)
    for thread, outcome in commanders:
        thread.join(HANG)
        assert len(outcome[0]) == rounds
    assert worker.weight_version == 8 * rounds
    versions = handle.result(HANG).samples[0].weight_versions
    seen = [version for _, _, version in versions]
    assert seen == sorted(seen)
    gaps = [after - before for before, after in itertools.pairwise(seen)]
    assert set(gaps) == {1}, "a step between two commands"


# -- sleep -----------------------------------------------------------------------------------------


def test_sleeping_kv_preempts_and_nothing_is_lost(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker()
    handle = start_long_request(worker, runner)
    thread, _ = in_background(lambda: worker.sleep("kv_cache"))
    wait_until(lambda: num_waiting(worker))
    open_gate(runner)
    thread.join(HANG)
    assert runner.pages is None
    with pytest.raises(WorkerStateError, match=r"asleep \(kv_cache\)"):
        worker.submit([1], FEW)
    assert not handle.done
    worker.sleep("kv_cache")
    worker.wake_up()
    worker.wake_up("kv_cache")
    sample = handle.result(HANG).samples[0]
    assert sample.token_ids == oracle([1, 2, 3], 0, 40)
    assert worker.stats()["preemptions"] == 1


def test_sleeping_weights_frees_them_and_waking_restores_the_bits(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    module = worker.module
    with torch.no_grad():
        module.proj.weight.data = module.proj.weight.t().contiguous().t()
    before = weights_of(worker)
    worker.sleep("weights")
    assert [parameter.numel() for parameter in module.parameters()] == [0, 0, 0]
    assert module.scale.numel() == 0
    assert module.table.numel() == 4, "a derived buffer stays: nothing could restore it"
    copy = os.fstat(spill_file(worker))
    assert (copy.st_mode & 0o077, copy.st_nlink) == (0, 0), "for its owner, and gone with the process"
    with pytest.raises(WorkerStateError, match=r"asleep \(weights\)"):
        worker.generate([[1]], FEW)
    with pytest.raises(WorkerStateError, match=r'wake_up\("weights"\) first'):
        worker.receive_weights(before)
    worker.wake_up("weights")
    after = weights_of(worker)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert module.head.weight is module.embed.weight
    assert module.proj.weight.stride() == (1, 5), "the memory layout is a part of the bits of a GEMM"
    assert len(worker.generate([[1]], FEW)) == 1


@pytest.mark.parametrize("initialized", [False, True])
def test_sleep_returns_what_torch_keeps_of_a_gpu(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, initialized: bool
) -> None:
    returned: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: returned.append(True))
    worker, _ = make_worker()
    worker.sleep()
    assert returned == [True] * initialized, "a process without CUDA does not begin to use it"


def test_level_two_discards_and_needs_a_full_update(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker()
    whole = weights_of(worker)
    handle = start_long_request(worker, runner)
    open_gate(runner)
    worker.sleep(level=2)
    worker.wake_up()
    with pytest.raises(WorkerStateError, match=r"weights incomplete: they were discarded by sleep\(level=2\)"):
        worker.generate([[1]], FEW)
    with pytest.raises(WeightMismatchError):
        worker.receive_weights({"proj.bias": whole["proj.bias"]})
    report = worker.receive_weights(whole)
    assert report.tensors == 4
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights_of(worker).items())
    assert handle.result(HANG).samples[0].token_ids == oracle([1, 2, 3], 0, 40), "it was held, not lost"


def test_level_two_after_level_one_drops_the_copy(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    worker.sleep("weights")
    worker.sleep("weights", level=2)
    worker.wake_up()
    with pytest.raises(WorkerStateError, match="discarded"):
        worker.submit([1], FEW)


@pytest.mark.parametrize("tags", [("weights",), ("kv_cache",), ("weights", "kv_cache")])
@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
@pytest.mark.parametrize("level", [1, 2])
def test_requests_that_come_during_sleep_wait_when_that_is_the_choice(
    make_worker: MakeWorker, oracle: Oracle, tags: tuple[str, ...], order: tuple[str, ...], level: int
) -> None:
    """Requests that come during sleep wait when that is the choice: they run when everything is awake and, after level
    2, when weights have come; waking KV first is allowed.
    """
    if level == 2 and "weights" not in tags:
        level = 1
    worker, runner = make_worker(while_asleep="wait")
    whole = weights_of(worker)
    handle = start_long_request(worker, runner)
    open_gate(runner)
    worker.sleep(tags, level=level)
    late = worker.submit([9, 9], FEW)
    steps = worker.stats()["steps"]
    for tag in order:
        assert not (worker.sleeping and late.done)
        worker.wake_up(tag)
    if level == 2:
        later = worker.submit([8], FEW)
        with pytest.raises(TimeoutError):
            later.result(0.05)
        assert worker.stats()["steps"] == steps, "not a token before the weights"
        worker.receive_weights(whole)
        assert later.result(HANG).samples[0].token_ids == oracle([8], 0, 5)
    assert late.result(HANG).samples[0].token_ids == oracle([9, 9], 0, 5)
    assert handle.result(HANG).samples[0].token_ids == oracle([1, 2, 3], 0, 40)


def test_an_update_that_broke_off_is_no_sleep(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(shared=True, while_asleep="wait")
    with pytest.raises(KeyError), worker.weight_update():
        raise KeyError
    with pytest.raises(WorkerStateError, match="weights incomplete"):
        worker.submit([1], FEW)
    worker.sleep("kv_cache")
    with pytest.raises(WorkerStateError, match="asleep"):
        worker.submit([1], FEW)


def test_sleep_arguments(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    for wrong in ("kv", [], ["weights", "states"], None, 5):
        with pytest.raises(ValueError, match="tags must be of weights, kv_cache"):
            worker.sleep(wrong)
    with pytest.raises(ValueError, match="tags must be of"):
        worker.wake_up("kv")
    with pytest.raises(ValueError, match="tags must be of weights, kv_cache, got 5"):
        worker.wake_up(5)
    for flag in ("no", 0, None):
        with pytest.raises(ValueError, match="recompute_running must be True or False, got"):
            worker.reset_prefix_cache(recompute_running=flag)
    for level in (0, 3, True, "1"):
        with pytest.raises(ValueError, match="level must be 1"):
            worker.sleep(level=level)
    with pytest.raises(ValueError, match="level=2 discards the weights"):
        worker.sleep("kv_cache", level=2)
    assert runner.pages is not None
    assert len(worker.generate([[1]], FEW)) == 1


def test_the_trainers_weights_are_never_put_to_sleep(make_worker: MakeWorker) -> None:
    worker, runner = make_worker(shared=True)
    for tags in ("weights", ("weights", "kv_cache")):
        with pytest.raises(WorkerStateError, match="trainer's own parameters"):
            worker.sleep(tags)
    assert runner.pages is not None, "refused before anything was done"
    worker.sleep("kv_cache")
    worker.wake_up()
    assert len(worker.generate([[1]], FEW)) == 1


def test_sleep_and_wake_many_times_under_load(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, _ = make_worker(num_blocks=24, max_num_seqs=4)
    handles = [worker.submit([index, 5], LONG) for index in range(12)]
    for _ in range(20):
        worker.sleep()
        worker.wake_up("kv_cache")
        worker.wake_up("weights")
    for index, handle in enumerate(handles):
        assert handle.result(HANG).samples[0].token_ids == oracle([index, 5], 0, 40)


@pytest.mark.parametrize(
    ("change", "restore", "named"),
    [
        (
            lambda module: module.proj.to(torch.bfloat16),
            lambda module: module.proj.to(torch.float32),
            r"proj\.weight was \[5, 3\] float32, and is \[5, 3\] bfloat16; proj\.bias was",
        ),
        (
            lambda module: setattr(module.proj, "bias", nn.Parameter(torch.ones(5, device="meta"))),
            lambda module: setattr(module.proj, "bias", nn.Parameter(torch.ones(5))),
            r"proj\.bias is on the device 'meta'\. Restore",
        ),
        (
            lambda module: setattr(module.proj, "weight", nn.Parameter(torch.ones(5, 3).to_sparse())),
            lambda module: setattr(module.proj, "weight", nn.Parameter(torch.ones(5, 3))),
            r"proj\.weight is sparse_coo\. Restore",
        ),
        (
            lambda module: module.proj.weight.untyped_storage().resize_(0),
            lambda module: setattr(module.proj, "weight", nn.Parameter(torch.ones(5, 3))),
            r"proj\.weight has no memory: its storage was freed\. Restore",
        ),
        (
            lambda module: module.register_buffer("scale", torch.ones(3)),
            lambda module: module.register_buffer("scale", torch.ones(2)),
            r"scale was \[2\] float32, and is \[3\] float32",
        ),
    ],
    ids=["dtype", "meta", "sparse", "freed", "shape_of_a_buffer"],
)
def test_a_tensor_that_became_another_kind_is_named_at_the_end_of_the_update(
    make_worker: MakeWorker, change: Callable[[Any], object], restore: Callable[[Any], object], named: str
) -> None:
    worker, _ = make_worker(shared=True)
    with pytest.raises(WorkerStateError, match=named), worker.weight_update():
        change(worker.module)
    with pytest.raises(WorkerStateError, match="weights incomplete"):
        worker.submit([1], FEW)
    with pytest.raises(WorkerStateError, match=named):
        worker.receive_weights()
    restore(worker.module)
    worker.receive_weights()
    assert worker.generate([[1]], FEW)[0].samples[0].finish_reason == "length"


def test_aborts_that_wait_are_not_counted_as_requests_that_wait(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(shared=True)
    with worker.weight_update():
        worker.abort(["gone", "too"])
        assert worker.stats()["waiting"] == 0
