"""A trainer may untie the weights of a shared module, and tie them, after a worker was built on it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from samebit.rollout.errors import WorkerStateError
from samebit.rollout.sampling_params import SamplingParams
from samebit.weight_sync import (
    NonFiniteWeightError,
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncBrokenError,
    WeightMismatchError,
    WeightStream,
)

from ...patience import HANG, wait_until
from ..conftest import weights_of
from ..inside import num_waiting
from ..step_gate import StepGate

MakeWorker = Callable[..., tuple[Any, Any]]
FEW = SamplingParams(max_tokens=5)
BOTH = ("embed.weight", "head.weight")


def others(worker: Any) -> dict[str, torch.Tensor]:
    """Return other weights for a worker, under all names."""
    return {name: tensor + 1 for name, tensor in weights_of(worker).items()}


def untie(worker: Any) -> None:
    """Load a state dict in the way that makes a parameter of each name."""
    worker.module.load_state_dict(weights_of(worker), assign=True)
    assert worker.module.head.weight is not worker.module.embed.weight


def tie(worker: Any) -> None:
    worker.module.head.weight = worker.module.embed.weight


def holds(worker: Any, weights: dict[str, torch.Tensor]) -> bool:
    now = weights_of(worker)
    return all(torch.equal(now[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("source", [dict, WeightStream.of])
def test_every_name_of_weights_that_were_untied_is_written(
    make_worker: MakeWorker, source: Callable[[object], object], verify: bool, told: bool
) -> None:
    worker, _ = make_worker(shared=True)
    new = others(worker)
    if told:
        with worker.weight_update():
            untie(worker)
    else:
        untie(worker)
    report = worker.receive_weights(source(new), verify=verify)
    assert (report.tensors, report.verified) == (5, verify)
    assert holds(worker, new)
    del new["head.weight"]
    with pytest.raises(WeightMismatchError, match=r"1 missing: head\.weight"):
        worker.receive_weights(source(new), verify=verify)


def test_every_name_of_weights_that_were_untied_is_written_from_a_link(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(shared=True)
    trainer, _ = make_worker()
    untie(worker)
    with (
        SharedMemorySender(timeout=HANG) as sender,
        SharedMemoryReceiver(sender.address, timeout=HANG) as end,
        ThreadPoolExecutor() as pool,
    ):
        for _ in range(2):
            with torch.no_grad():
                trainer.module.embed.weight.add_(1)
            sending = pool.submit(sender.send, trainer.module.state_dict())
            assert set(BOTH) <= set(worker.receive_weights(end, verify=True).changed)
            sending.result(HANG)
            assert holds(worker, weights_of(trainer))


def test_weights_that_were_tied_are_refused_with_two_values(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(shared=True)
    untie(worker)
    beside, _ = make_worker(beside=worker, shared=True)
    with worker.weight_update():
        tie(worker)
    before, new = weights_of(worker), others(worker)
    for one in (worker, beside):
        with pytest.raises(WeightMismatchError, match=r"different values, nothing .*: embed\.weight and head\.weight"):
            one.load_state_dict({**new, "head.weight": new["head.weight"] + 1})
        assert holds(one, before)
    assert worker.receive_weights(new, verify=True).tensors == 4
    assert holds(worker, new)


def test_updates_in_place_know_weights_that_were_untied(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(shared=True)
    beside, _ = make_worker(beside=worker, shared=True)
    with worker.weight_update() as update:
        worker.module.head.weight = nn.Parameter(worker.module.embed.weight.detach().clone())
    assert (update.report.changed, update.report.tensors) == (("head.weight",), 5)
    for one in (worker, beside):
        with torch.no_grad():
            one.module.head.weight.add_(1)
        assert one.receive_weights(verify=True).changed == ("head.weight",)
    with torch.no_grad():
        worker.module.head.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteWeightError, match=r"NaN or infinity in head\.weight"):
        beside.receive_weights(verify=True)


@pytest.mark.parametrize("change", [tie, untie])
def test_an_update_that_waits_while_ties_change_is_refused(
    make_worker: MakeWorker, change: Callable[[Any], None]
) -> None:
    worker, runner = make_worker(shared=True)
    if change is tie:
        untie(worker)
    new = others(worker)
    runner.gate = StepGate()
    handle = worker.submit([1, 2, 3], FEW)
    runner.gate.wait_for_a_step()
    with ThreadPoolExecutor() as pool:
        updating = pool.submit(worker.receive_weights, new, in_flight="wait")
        wait_until(lambda: num_waiting(worker) == 1)
        change(worker)
        before = weights_of(worker)
        runner.gate.release(1000)
        with pytest.raises(SyncBrokenError, match=r"tied or untied while .*embed\.weight.*nothing was written"):
            updating.result(HANG)
    assert handle.result(HANG).samples[0].finish_reason == "length"
    assert holds(worker, before)
    assert worker.receive_weights(new).tensors == (4 if change is tie else 5)
    assert holds(worker, new)


def test_ties_of_weights_without_values_are_not_asked_for(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(shared=True)
    new = others(worker)
    worker.module.proj.weight = nn.Parameter(worker.module.proj.weight.detach().to_sparse())
    with pytest.raises(WorkerStateError, match=r"proj\.weight is sparse_coo"):
        worker.receive_weights()
    worker.module.proj.weight = nn.Parameter(torch.empty(5, 3))
    assert worker.receive_weights(new).tensors == 4
