"""An update that not all replicas of a fleet take alike leaves nobody serving a mixture, and the next one works."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from samebit.rollout import NoReplicaError, WorkerStateError
from samebit.rollout.outputs import SampleOutput
from samebit.weight_sync import BroadcastSender, SendReport, SyncReport
from samebit.weight_sync.wire.link import Outcome

from ...noted_stream import noted_stream
from ...patience import HANG, wait_until
from ..conftest import TinyModule
from ..inside import num_waiting
from .local_fleet import LocalFleet, LocalPort
from .test_fleet import PARAMS, gated
from .test_fleet_restarts import interrupted

BIAS = {"proj.bias": torch.full((5,), 9.0)}


def test_a_part_of_the_weights_is_not_given_to_a_replica_that_lacks_the_rest() -> None:
    """A part of the weights is not given to the only replica, which was started again with the folder's weights and
    lacks the rest.
    """
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


def saved(module: TinyModule, folder: Path) -> Path:
    """Save the weights where replicas find them."""
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in module.state_dict().items()}, folder / "model.safetensors")
    return folder


def refuse_once(port: LocalPort, error: Exception) -> list[dict[str, Any]]:
    """Let the first update fail before anything is read; return the options of those that come."""
    given: list[dict[str, Any]] = []
    receive = port.side.receive_weights

    async def received(source: object, **options: Any) -> SyncReport:
        given.append(options)
        if len(given) == 1:
            raise error
        return await receive(source, **options)

    port.side.receive_weights = received
    return given


def versions(sample: SampleOutput) -> set[int]:
    """Return the versions of the weights under which the tokens were sampled."""
    return {version for _, _, version in sample.weight_versions}


@pytest.mark.parametrize("in_flight", ["recompute", "wait", "abort"])
def test_a_replica_that_gets_the_weights_later_deals_with_its_requests_as_the_update_was_asked_to(
    in_flight: str, tmp_path: Path
) -> None:
    """A replica that gets the weights later deals with its requests as the update was asked to: one that goes on with
    what it has would be a mixture, which its caller has ruled out.
    """
    with LocalFleet(replicas=2, prepare=gated) as local:
        fleet = local.fleet
        handle = fleet.submit([1] * 9, PARAMS)
        port = local.ports[local.busy()[0]]
        port.runner.gate.wait_for_a_step()
        given = refuse_once(port, FileNotFoundError("not there yet"))
        fleet.receive_weights(saved(TinyModule(), tmp_path / "1"), in_flight=in_flight, verify=True)
        wait_until(lambda: num_waiting(port.side.rollout))
        port.runner.gate.release(1000)
        sample = handle.result(HANG).samples[0]
        assert sample.finish_reason == ("abort" if in_flight == "abort" else "length")
        assert sample.context_versions == sample.weight_versions
        assert versions(sample) == ({0, 1} if in_flight == "recompute" else {0})
        wait_until(lambda: all(fleet.replicas.values()))
        assert [options["verify"] for options in given] == [True, True]


def test_a_replica_whose_requests_had_to_finish_first_gets_the_weights_once_a_pause_has_ended(tmp_path: Path) -> None:
    with LocalFleet(replicas=2, prepare=gated) as local:
        fleet = local.fleet
        handle = fleet.submit([1] * 9, PARAMS)
        [name] = local.busy()
        port, gate = local.ports[name], local.ports[name].runner.gate
        gate.wait_for_a_step()
        with ThreadPoolExecutor(1) as other:
            pausing = other.submit(fleet.pause)
            wait_until(lambda: num_waiting(port.side.rollout))
            gate.release()
            pausing.result(HANG)
        fleet.receive_weights(saved(TinyModule(), tmp_path / "1"), in_flight="wait")
        wait_until(lambda: port.commands.count("receive_weights") == 2 and not fleet._weights._turn.locked())
        assert not fleet.replicas[name]
        gate.release(1000)
        fleet.resume()
        assert versions(handle.result(HANG).samples[0]) == {0}
        wait_until(lambda: all(fleet.replicas.values()))
        assert port.side.rollout.weight_version == 1


def test_an_update_that_all_have_taken_counts_though_its_sender_has_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that all have taken counts, though its sender has given up: it waited for requests, for longer than the
    sender waits.
    """
    gave_up = threading.Event()

    class Sender(BroadcastSender):
        """Waits long for everything but the first update's answers."""

        def send(self, *args: object, **options: object) -> SendReport:
            if not gave_up.is_set():
                self.link.outcomes = self._outcomes_soon
            try:
                return super().send(*args, **options)
            finally:
                gave_up.set()

        def _outcomes_soon(self) -> list[Outcome]:
            patience = self.link._group.patience
            patience.seconds = 0.3
            patience.begin()
            return type(self.link).outcomes(self.link)

    monkeypatch.setattr("samebit.rollout.fleet.weights.BroadcastSender", Sender)
    with LocalFleet(replicas=2, prepare=gated, sync_timeout=HANG) as local, ThreadPoolExecutor(1) as other:
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
        assert local.fleet.receive_weights(TinyModule()).version == 2


def test_what_a_replica_takes_of_an_interrupted_update_is_the_fleets(tmp_path: Path) -> None:
    """What a replica takes of an interrupted update becomes the fleet's: one reads the folder when the caller has gone,
    the other can not, and no two weights are ever of one version.
    """
    new, began, may_read = TinyModule(), threading.Event(), threading.Event()
    with LocalFleet(replicas=2) as local:
        fleet, side = local.fleet, local.ports["0"].side
        receive = side.receive_weights

        async def read_late(source: object, **options: Any) -> SyncReport:
            began.set()
            await asyncio.to_thread(may_read.wait, HANG)
            return await receive(source, **options)

        side.receive_weights = read_late
        refuse_once(local.ports["1"], FileNotFoundError("not there yet"))
        folder = saved(TinyModule(), tmp_path / "1")
        interrupted(lambda: fleet.receive_weights(folder), once=began.is_set)
        assert fleet.weight_version == 0
        may_read.set()
        assert fleet.receive_weights(saved(new, tmp_path / "2")).version == fleet.weight_version == 2
        wait_until(lambda: all(fleet.replicas.values()))
        for port in local.ports.values():
            assert port.side.rollout.weight_version == 2
            assert torch.equal(port.side.rollout.module.proj.weight, new.proj.weight)


def test_an_interrupt_after_the_last_weight_leaves_the_fleet_at_the_version_of_its_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Sender(BroadcastSender):
        def send(self, *args: object, **options: object) -> SendReport:
            super().send(*args, **options)
            raise KeyboardInterrupt

    with LocalFleet(replicas=2) as local:
        fleet = local.fleet
        with monkeypatch.context() as patched:
            patched.setattr("samebit.rollout.fleet.weights.BroadcastSender", Sender)
            with pytest.raises(KeyboardInterrupt):
                fleet.receive_weights(TinyModule())
        fleet.sleep("kv_cache")
        fleet.wake_up()
        assert fleet.receive_weights(TinyModule()).version == fleet.weight_version == 2
        assert all(fleet.replicas.values())


def hang(local: LocalFleet, name: str, command: str) -> None:
    """Let a replica never answer this command nor say how it is, as one that was stopped. What follows has time."""

    async def never(*_: object, **__: object) -> None:
        local.fleet._weights._timeout = HANG
        await asyncio.Event().wait()

    for one in (command, "state"):
        setattr(local.ports[name].side, one, never)


def test_an_update_reaches_the_others_where_a_replica_hangs(tmp_path: Path) -> None:
    new = TinyModule()
    with LocalFleet(replicas=2, sync_timeout=1.0, silent_seconds=2.0) as local:
        hang(local, "1", "receive_weights")
        assert local.fleet.receive_weights(saved(new, tmp_path / "1")).version == 1
        wait_until(lambda: local.started.count("1") == 2 and all(local.fleet.replicas.values()))
        for port in local.ports.values():
            assert torch.equal(port.side.rollout.module.proj.weight, new.proj.weight)


def test_a_replica_gets_the_weights_where_the_first_that_has_them_hangs() -> None:
    new = TinyModule()
    with LocalFleet(replicas=3, silent_seconds=2.0) as local:
        local.fleet.receive_weights(new)
        hang(local, "0", "offer_weights")
        local.fleet._weights._timeout = 1.0
        local.kill("1")
        wait_until(lambda: sorted(local.started) == ["0", "0", "1", "1", "2"] and all(local.fleet.replicas.values()))
        for port in local.ports.values():
            assert torch.equal(port.side.rollout.module.proj.weight, new.proj.weight)


def test_a_stream_is_gone_through_whatever_ends_its_update() -> None:
    """A stream is read to its end whatever ends its update: the trainer's other ranks gather it too, and would wait."""

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
