"""Replicas of a fleet that are started again: they come back in the state of the fleet, or not at all."""

from __future__ import annotations

import pytest
import torch

from samebit.rollout import NoReplicaError, WorkerStateError

from ...patience import wait_until
from ..conftest import TinyModule
from .local_fleet import LocalFleet, LocalPort
from .test_fleet import PARAMS, PROMPTS


def came_back(local: LocalFleet, name: str) -> None:
    """Return once a replica was started again as the fleet is, or was given up."""
    member, closed = local.fleet._crew.members[name], local.fleet._crew.router.closed
    wait_until(lambda: local.started.count(name) > 1 and not member.starting)
    wait_until(lambda: not member.starting and (member.alive or "used up" in closed()[name]))


def test_a_replica_comes_back_while_the_cache_sleeps_and_the_weights_were_discarded() -> None:
    """As between the steps of a trainer on the same GPU: the weights are awake, to be written."""
    with LocalFleet(replicas=2) as local:
        local.fleet.receive_weights(TinyModule())
        local.fleet.sleep(level=2)
        local.fleet.wake_up("weights")
        local.kill("0")
        came_back(local, "0")
        assert local.started.count("0") == 2
        assert local.ports["0"].side.rollout.sleeping == local.fleet.sleeping == ("kv_cache",)
        new = TinyModule()
        local.fleet.receive_weights(new)
        local.fleet.wake_up("kv_cache")
        assert all(local.fleet.replicas.values())
        assert torch.equal(local.ports["0"].side.rollout.module.proj.weight, new.proj.weight)
        assert len(local.fleet.generate(PROMPTS, PARAMS)) == len(PROMPTS)


def test_discarded_weights_stay_discarded_in_a_replica_that_comes_back() -> None:
    with LocalFleet(replicas=2) as local:
        local.fleet.sleep(level=2)
        local.kill("0")
        came_back(local, "0")
        assert local.ports["0"].side.rollout.sleeping == ("weights", "kv_cache")
        local.fleet.wake_up()
        with pytest.raises(NoReplicaError, match="0: weights incomplete: they were discarded"):
            local.fleet.submit([1], PARAMS)


def test_a_replica_that_can_not_be_brought_to_the_state_of_the_fleet_is_stopped() -> None:
    """It may have reserved the cores that the next one needs."""
    ports: list[LocalPort] = []

    def refuse_to_pause(port: LocalPort) -> None:
        async def refuse(mode: str) -> None:
            raise RuntimeError("not now")

        port.side.pause = refuse
        ports.append(port)

    with LocalFleet(replicas=2, max_restarts=2) as local:
        local.fleet.pause()
        local._prepare = refuse_to_pause
        local.kill("0")
        wait_until(lambda: "max_restarts=2 is used up" in local.fleet._crew.router.closed().get("0", ""))
        assert len(ports) == 2
        for port in ports:
            with pytest.raises(WorkerStateError, match="the worker is closed"):
                port.side.rollout.check_usable()
