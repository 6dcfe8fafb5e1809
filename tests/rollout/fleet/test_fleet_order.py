"""A command of a fleet finds what was sent before it, though a call may overtake another on its way to a replica."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from samebit.rollout import RequestOutput, SamplingParams
from samebit.rollout.fleet import arrivals
from samebit.rollout.fleet.fleet import Fleet

from ...patience import HANG, wait_until
from ..conftest import TinyModule
from ..inside import num_waiting
from .local_fleet import LocalFleet, LocalPort
from .test_fleet import PARAMS, PROMPTS, gated
from .test_fleet_adapters import ModelFleet, asked, drawn, save_adapter
from .test_fleet_restarts import came_back

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def late(port: LocalPort, command: str) -> None:
    """Let a request come to the replica only when a command has been answered there, or something waits for it."""
    run, tell, due = port.side.run_followed, port.command, asyncio.Event()

    async def told(name: str, *args: Any, **options: Any) -> Any:
        if name == "settle":
            due.set()
        answer = await tell(name, *args, **options)
        if name == command:
            due.set()
        return answer

    async def come(prompt: list[int], params: SamplingParams, request_id: str, *numbers: int) -> RequestOutput:
        await due.wait()
        return await run(prompt, params, request_id, *numbers)

    port.command = told  # type: ignore[method-assign]
    port.side.run_followed = come  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("command", "call"),
    [
        ("pause", lambda fleet: fleet.pause("abort")),
        ("receive_weights", lambda fleet: fleet.receive_weights(TinyModule(), in_flight="abort")),
    ],
)
def test_what_ends_requests_ends_those_that_are_on_their_way(command: str, call: Callable[[Fleet], object]) -> None:
    def prepare(port: LocalPort) -> None:
        gated(port)
        late(port, command)

    with LocalFleet(replicas=1, prepare=prepare) as local, ThreadPoolExecutor(1) as other:
        handle, port = local.fleet.submit([3, 4], LONG), local.ports["0"]
        ending = other.submit(call, local.fleet)
        wait_until(lambda: ending.done() or num_waiting(port.side.rollout))
        port.runner.gate.release(1000)
        ending.result(HANG)
        assert handle.result(HANG).samples[0].finish_reason == "abort"


def test_a_request_that_is_on_its_way_when_the_fleet_falls_asleep_waits() -> None:
    with LocalFleet(replicas=1, prepare=lambda port: late(port, "sleep")) as local:
        handle = local.fleet.submit([3, 4], LONG)
        local.fleet.sleep("kv_cache")
        local.fleet.wake_up()
        assert handle.result(HANG).samples[0].finish_reason == "length"


@pytest.mark.parametrize("renewed", [False, True])
def test_a_request_that_is_on_its_way_keeps_its_adapter(renewed: bool, tmp_path: Path) -> None:
    """A request that is on its way ends under the adapter that it was sent with, when that is dropped or another
    version of it is loaded.
    """
    folder = save_adapter(tmp_path / "a", seed=1)
    local = ModelFleet()
    with local.fleet as fleet:
        fleet.load_adapter("a", folder)
        expected = drawn(fleet.generate(PROMPTS[:1], asked("a")))
        for port in local.ports.values():
            late(port, "forget_adapter")
        handle = fleet.submit(PROMPTS[0], asked("a"))
        if renewed:
            fleet.load_adapter("a", save_adapter(tmp_path / "b", seed=2))
        else:
            fleet.drop_adapter("a")
        assert drawn([handle.result(HANG)]) == expected


def test_a_replica_that_comes_back_while_the_fleet_goes_on_goes_on_too() -> None:
    """A replica that comes back while the fleet goes on goes on too: its pause and the fleet's resume do not change
    places.
    """
    with LocalFleet(replicas=2) as local:
        local.fleet.pause()
        resumed, pausing = asyncio.Event(), threading.Event()

        def slow_to_pause(port: LocalPort) -> None:
            tell = port.command

            async def told(name: str, *args: Any, **options: Any) -> Any:
                if name == "pause":
                    pausing.set()
                    with suppress(asyncio.TimeoutError):  # where both are on their way, this one comes last
                        await asyncio.wait_for(resumed.wait(), 0.5)
                answer = await tell(name, *args, **options)
                if name == "resume":
                    resumed.set()
                return answer

            port.command = told  # type: ignore[method-assign]

        local._prepare = slow_to_pause
        local.kill("0")
        assert pausing.wait(HANG)
        local.fleet.resume()
        came_back(local)
        wait_until(lambda: all(local.fleet.replicas.values()))
        assert not local.ports["0"].side.rollout.paused
        assert len(local.fleet.generate(PROMPTS, PARAMS)) == len(PROMPTS)


def test_a_request_that_could_not_be_sent_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arrivals, "PATIENCE", 0.001)

    def prepare(port: LocalPort) -> None:
        send = port.run

        def full(prompt: list[int], *rest: Any) -> Any:
            if prompt == [13]:
                raise MemoryError("the store is full")
            return send(prompt, *rest)

        port.run = full  # type: ignore[method-assign]

    with LocalFleet(replicas=1, prepare=prepare) as local:
        with pytest.raises(MemoryError, match="the store is full"):
            local.fleet.generate([[13]], PARAMS)
        local.fleet.generate(PROMPTS, PARAMS)
        local.fleet.sleep("kv_cache")
    assert "calls have not come" not in caplog.text
