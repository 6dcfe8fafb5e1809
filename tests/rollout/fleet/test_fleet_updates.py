"""Updates of a fleet's weights that not all replicas take alike: nobody serves a mixture, and the next update works."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from samebit.rollout import NoReplicaError, WorkerStateError
from samebit.weight_sync import BroadcastSender, SendReport

from ...noted_stream import noted_stream
from ...patience import HANG, wait_until
from ..conftest import TinyModule
from .local_fleet import LocalFleet
from .test_fleet import PARAMS, gated

BIAS = {"proj.bias": torch.full((5,), 9.0)}


def test_a_part_of_the_weights_is_not_given_to_a_replica_that_lacks_the_rest() -> None:
    """The only one was started again, with the folder's weights."""
    with LocalFleet(replicas=1) as local:
        local.fleet.receive_weights(TinyModule())
        local.kill("0")
        wait_until(lambda: str(local.fleet.trouble()).endswith("now: 0: its weights are of version 0, not 1"))
        with pytest.raises(NoReplicaError, match=r"no living replica has the weights of version 1, which .* send all"):
            local.fleet.receive_weights(BIAS, partial=True)
        assert local.fleet.weight_version == 1
        assert not local.fleet.replicas["0"]
        local.fleet.receive_weights(TinyModule())
        assert local.fleet.replicas["0"]


def test_a_part_of_weights_that_sleep_is_refused_as_one_worker_refuses_it() -> None:
    with LocalFleet(replicas=2) as local:
        local.fleet.sleep("weights")
        for rollout in (local.fleet, local.ports["0"].side.rollout):
            with pytest.raises(WorkerStateError, match=r"the weights are asleep; call wake_up\(.weights.\)") as kept:
                rollout.receive_weights(BIAS, partial=True)
            assert kept.type is WorkerStateError
        local.fleet.wake_up("weights")
        assert local.fleet.receive_weights(BIAS, partial=True).version == 1


def test_a_replica_that_lacks_the_rest_of_a_partial_update_gets_all_weights_from_another() -> None:
    with LocalFleet(replicas=2) as local:
        new, giver = TinyModule(), local.ports["1"].side
        local.fleet.receive_weights(new)
        offer = giver.offer_weights

        async def refuse(timeout: float) -> None:
            raise WorkerStateError("not now")

        giver.offer_weights = refuse
        local.kill("0")
        wait_until(lambda: local.fleet._crew.router.closed().get("0") == "its weights are of version 0, not 1")
        giver.offer_weights = offer
        assert local.fleet.receive_weights(BIAS, partial=True).version == 2
        wait_until(lambda: all(local.fleet.replicas.values()))
        for port in local.ports.values():
            assert port.side.rollout.weight_version == 2
            assert torch.equal(port.side.rollout.module.proj.weight, new.proj.weight)
            assert torch.equal(port.side.rollout.module.proj.bias, BIAS["proj.bias"])


def test_an_update_that_all_have_taken_counts_though_its_sender_has_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for requests, for longer than the sender waits."""
    gave_up = threading.Event()

    class Sender(BroadcastSender):
        def send(self, *args: object, **options: object) -> SendReport:
            try:
                return super().send(*args, **options)
            finally:
                gave_up.set()

    monkeypatch.setattr("samebit.rollout.fleet.weights.BroadcastSender", Sender)
    with LocalFleet(replicas=2, prepare=gated, sync_timeout=3.0) as local, ThreadPoolExecutor(1) as other:
        handles = [local.fleet.submit([number] * 9, PARAMS) for number in range(2)]
        gates = [port.runner.gate for port in local.ports.values()]
        for gate in gates:
            gate.wait_for_a_step()
        updating = other.submit(local.fleet.receive_weights, TinyModule(), in_flight="wait")
        assert gave_up.wait(HANG)
        for gate in gates:
            gate.release(1000)
        assert updating.result(HANG).version == local.fleet.weight_version == 1
        assert all(handle.result(HANG) for handle in handles)
        assert all(local.fleet.replicas.values())
        local.fleet._weights._timeout = HANG
        assert local.fleet.receive_weights(TinyModule()).version == 2


def test_a_stream_is_gone_through_whatever_ends_its_update() -> None:
    """The trainer's other ranks gather it too, and would wait."""

    async def refuse(source: object, **options: object) -> None:
        raise RuntimeError("not now")

    weights = dict(TinyModule().named_parameters())
    with LocalFleet(replicas=1) as local:
        fleet = local.fleet
        fleet.receive_weights(TinyModule())
        fleet._weights._timeout = 0.5  # for updates that fail
        local.ports["0"].side.receive_weights = refuse
        for error, said, options in (
            (RuntimeError, "not now", {}),
            (TypeError, "an update has no option colour", {"colour": "red"}),
            (ValueError, "version must be above the current one", {"version": 1}),
        ):
            gathered: list[str] = []
            with pytest.raises(error, match=said):
                fleet.receive_weights(noted_stream(weights, gathered), **options)
            assert gathered == [*weights], said
    gathered = []
    with pytest.raises(WorkerStateError, match="closed"):
        fleet.receive_weights(noted_stream(weights, gathered))
    assert gathered == [*weights]
