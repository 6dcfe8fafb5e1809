"""Replicas of a fleet that are started again come back in the state of the fleet, or not at all."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from typing import Any

import pytest
import torch

from samebit.rollout import NoReplicaError, SamplingParams, WorkerLostError, WorkerStateError
from samebit.rollout.fleet.background import Doing
from samebit.rollout.fleet.crew import Member
from samebit.rollout.fleet.options import FleetOptions
from samebit.rollout.fleet.port import Feed
from samebit.rollout.fleet.tries import Tries

from ...patience import HANG, wait_until
from ..conftest import TinyModule
from ..inside import num_waiting
from .local_fleet import LocalFleet, LocalPort
from .test_fleet import PARAMS, PROMPTS, gated


def came_back(local: LocalFleet) -> None:
    """Return once replica 0 was started again as the fleet is, or was given up."""
    member, closed = local.fleet._crew.members["0"], local.fleet._crew.router.closed
    wait_until(lambda: local.started.count("0") > 1 and not member.starting)
    wait_until(lambda: not member.starting and (member.alive or "used up" in closed()["0"]))


def test_a_replica_comes_back_while_the_cache_sleeps_and_the_weights_were_discarded() -> None:
    """A replica comes back as the others are, also between the steps of a trainer on the same GPU: the cache sleeps,
    the weights were discarded and are awake, to be written.
    """
    with LocalFleet(replicas=2) as local:
        local.fleet.receive_weights(TinyModule())
        local.fleet.sleep(level=2)
        local.fleet.wake_up("weights")
        local.kill("0")
        came_back(local)
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
        came_back(local)
        assert local.ports["0"].side.rollout.sleeping == ("weights", "kv_cache")
        local.fleet.wake_up()
        with pytest.raises(NoReplicaError, match="0: weights incomplete: they were discarded"):
            local.fleet.submit([1], PARAMS)


def test_a_replica_that_can_not_be_brought_to_the_state_of_the_fleet_is_stopped() -> None:
    """A replica that can not be brought to the state of the fleet is stopped, as it may have reserved the cores that
    the next one needs.
    """
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


def test_restarts_of_a_replica_that_has_run_well_do_not_add_up() -> None:
    with LocalFleet(replicas=2, max_restarts=1, well_seconds=1e-9) as local:
        for starts in range(2, 6):
            local.kill("0")
            wait_until(lambda: local.started.count("0") == starts and all(local.fleet.replicas.values()))  # noqa: B023
        assert local.fleet.stats()["replica_restarts"] == 4
        local.refuse = ValueError("no memory")
        local.kill("0")
        wait_until(lambda: "max_restarts=1 is used up" in local.fleet._crew.router.closed().get("0", ""))
        assert local.started.count("0") == 6


def test_tries_in_a_row_are_counted_with_longer_and_longer_pauses_until_a_replica_runs_well() -> None:
    now = [0.0]
    tries = Tries(FleetOptions(max_restarts=9, restart_seconds=1, well_seconds=300), lambda: now[0])
    assert [tries.take() for _ in range(4)] == [0, 1, 2, 4]
    tries.note_start()
    now[0] = 299
    tries.note_loss()
    assert [tries.take() for _ in range(4)] == [8, 16, 32, 60]
    assert not tries.used_up
    assert tries.take() == 60
    assert tries.used_up
    tries.note_start()
    now[0] += 300
    tries.note_loss()
    assert not tries.used_up
    assert [tries.take() for _ in range(2)] == [0, 1]


def test_no_replica_is_started_again_where_none_shall_be() -> None:
    tries = Tries(FleetOptions(max_restarts=0))
    assert tries.used_up
    assert Tries(FleetOptions(max_restarts=10**9)).take() == 0


def refuse(port: LocalPort, command: str) -> None:
    async def refused(*_: object) -> None:
        raise RuntimeError("not now")

    setattr(port.side, command, refused)


def interrupted(call: Callable[[], None], once: Callable[[], bool]) -> None:
    """Interrupt a call, as Ctrl-C does, once something has happened."""
    returned = threading.Event()

    def interrupt() -> None:
        try:
            wait_until(lambda: returned.is_set() or once())
        finally:
            if not returned.is_set():  # whatever happened here: nothing else ends that wait
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    try:
        with ThreadPoolExecutor(1) as other:
            interrupting = other.submit(interrupt)
            try:
                with pytest.raises(KeyboardInterrupt):
                    call()
            finally:
                returned.set()
            interrupting.result(HANG)
    finally:
        signal.signal(signal.SIGINT, before)


def break_worker(port: LocalPort) -> None:
    """Let a step raise: nothing is computed there any more, and all calls raise, while the process lives."""
    port.runner.fail_with = RuntimeError("boom")
    with pytest.raises(WorkerStateError, match="boom"):
        port.side.rollout.generate([[1]], PARAMS)


def muted(port: LocalPort) -> None:
    port.mute = asyncio.Event()


def test_a_broken_replica_is_started_again() -> None:
    with LocalFleet(replicas=2) as local:
        new = TinyModule()
        local.fleet.receive_weights(new)
        break_worker(local.ports["0"])
        wait_until(lambda: local.started.count("0") == 2 and all(local.fleet.replicas.values()))
        assert torch.equal(local.ports["0"].side.rollout.module.proj.weight, new.proj.weight)
        assert local.fleet.receive_weights(TinyModule()).version == 2
        assert len(local.fleet.generate(PROMPTS, PARAMS)) == len(PROMPTS)


def test_what_a_broken_replica_still_tells_leaves_nothing_in_use() -> None:
    """A broken replica's feed that comes after it was found broken leaves nothing in use."""

    def tell_at_the_end(port: LocalPort) -> None:
        muted(port)
        feed, stop, told = port.feed, port.stop, asyncio.Event()

        async def noted() -> Feed:
            try:
                return await feed()
            finally:
                told.set()

        async def stop_later() -> None:
            port.mute.set()
            await told.wait()
            await stop()

        port.feed, port.stop = noted, stop_later

    with LocalFleet(replicas=2, prepare=tell_at_the_end, silent_seconds=HANG, max_restarts=0) as local:
        local.ports["0"].side.rollout.generate(PROMPTS, PARAMS)
        break_worker(local.ports["0"])
        local.fleet.stats()
        wait_until(lambda: "used up" in local.fleet._crew.router.closed().get("0", ""))
        dead = local.fleet.replica_stats()["0"]
        assert dead["blocks_cached"] == 0
        assert dead["blocks_free"] == dead["blocks_total"]


@pytest.mark.parametrize("command", ["receive_weights", "pause", "sleep", "stats"])
def test_a_call_to_all_is_not_stopped_by_a_broken_replica(command: str) -> None:
    """A call to all is not stopped by a broken replica of which no feed has told yet. An update waits for the broken
    one, and is made again.
    """
    with LocalFleet(replicas=2, prepare=muted, silent_seconds=HANG, sync_timeout=HANG) as local:
        weights, timeouts = local.fleet._weights, chain([0.2], repeat(HANG))
        takers = weights._takers

        def takers_of_a_try(*, partial: bool) -> list[Member]:
            weights._timeout = next(timeouts)
            return takers(partial=partial)

        weights._takers = takers_of_a_try
        break_worker(local.ports["0"])
        getattr(local.fleet, command)(*[TinyModule()] * (command == "receive_weights"))
        came_back(local)
        state = [
            (side.rollout.weight_version, side.rollout.paused, side.rollout.sleeping)
            for side in (port.side for port in local.ports.values())
        ]
        assert state[0] == state[1]


def test_a_fleet_of_broken_replicas_is_not_usable() -> None:
    with LocalFleet(replicas=2, max_restarts=0) as local:
        for port in local.ports.values():
            break_worker(port)
        wait_until(lambda: str(local.fleet.trouble()).count("used up") == 2)
        with pytest.raises(WorkerLostError, match="no replica is alive"):
            local.fleet.check_usable()
        reason = "0: the worker is broken: RuntimeError in the generation thread: boom, and max_restarts=0 is used up"
        with pytest.raises(NoReplicaError, match=reason):
            local.fleet.submit([1], PARAMS)


def test_a_request_that_breaks_a_replica_is_not_sent_to_the_next() -> None:
    with LocalFleet(replicas=2, resubmit=True) as local:
        for port in local.ports.values():
            port.runner.fail_with = RuntimeError("boom")
        with pytest.raises(WorkerStateError, match="the worker is broken: RuntimeError in the generation thread: boom"):
            local.fleet.submit([1], PARAMS).result(HANG)
        wait_until(lambda: len(local.started) == 3 and all(local.fleet.replicas.values()))
        stats = local.fleet.stats()
        assert (stats["replica_restarts"], stats["requests_resubmitted"]) == (1, 0)


def test_one_request_that_fails_tells_that_a_replica_is_broken() -> None:
    """A replica that fails one request counts as broken: it has nothing to do from then on, and would be given those
    that follow until its next feed.
    """
    failed = 0
    with LocalFleet(replicas=2, prepare=muted, silent_seconds=HANG) as local:
        local.ports["0"].runner.fail_with = RuntimeError("boom")
        for number in range(8):
            try:
                local.fleet.submit([number], PARAMS).result(HANG)
            except WorkerStateError:
                failed += 1
        assert failed == 1
        came_back(local)
        assert all(local.fleet.replicas.values())


def test_a_request_of_a_broken_replica_is_not_sent_again_where_its_error_is_lost() -> None:
    """A request of a broken replica is not sent again where its error is lost, as when the process is ended before the
    answer has left it.
    """
    taken: list[LocalPort] = []

    def lose_the_first_answer(port: LocalPort) -> None:
        muted(port)
        run = port.side.run_followed

        async def answered(prompt: list[int], params: SamplingParams, request_id: str, *numbers: int) -> object:
            taken.append(port)
            if len(taken) == 1:
                await asyncio.Event().wait()
            return await run(prompt, params, request_id, *numbers)

        port.side.run_followed = answered

    with LocalFleet(replicas=2, prepare=lose_the_first_answer, silent_seconds=HANG, resubmit=True) as local:
        handle = local.fleet.submit([1], PARAMS)
        wait_until(lambda: taken)
        break_worker(taken[0])
        local.fleet.stats()
        with pytest.raises(WorkerLostError):
            handle.result(HANG)
        assert local.fleet.stats()["requests_resubmitted"] == 0


def test_a_replica_that_comes_back_while_a_pause_waits_stands_still() -> None:
    with LocalFleet(replicas=2, prepare=gated) as local, ThreadPoolExecutor(1) as other:
        for number in range(2):
            local.fleet.submit([number] * 9, PARAMS)
        for port in local.ports.values():
            port.runner.gate.wait_for_a_step()
        pausing = other.submit(local.fleet.pause, "wait")
        wait_until(lambda: all("pause" in port.commands for port in local.ports.values()))
        local._prepare = None
        local.kill("0")
        wait_until(lambda: local.started.count("0") == 2 and local.fleet.replicas["0"])
        assert local.ports["0"].side.rollout.paused
        assert not pausing.done()
        local.ports["1"].runner.gate.release(1000)
        pausing.result(HANG)
        assert local.fleet.paused
        local.fleet.resume()
        assert not any(port.side.rollout.paused for port in local.ports.values())


def test_a_pause_that_fails_is_none() -> None:
    with LocalFleet(replicas=2) as local:

        async def refuse(mode: str) -> None:
            raise RuntimeError("not now")

        local.ports["0"].side.pause = refuse
        with pytest.raises(RuntimeError, match="not now"):
            local.fleet.pause()
        assert not local.fleet.paused


def test_a_pause_that_one_replica_refuses_is_none() -> None:
    """A pause that one replica refuses is none for the others: the one that refuses sleeps over a request that has
    begun, and can not finish it; the other has paused meanwhile, and goes on.
    """
    with LocalFleet(replicas=2, prepare=gated) as local, ThreadPoolExecutor(1) as other:
        fleet, handle = local.fleet, local.fleet.submit([1] * 9, PARAMS)
        busy = local.ports[local.busy()[0]]
        gate = busy.runner.gate
        gate.wait_for_a_step()
        sleeping = other.submit(fleet.sleep, "kv_cache")
        wait_until(lambda: num_waiting(busy.side.rollout))
        gate.release()
        sleeping.result(HANG)
        with pytest.raises(WorkerStateError, match=r"waiting for requests .* needs a worker that generates"):
            fleet.pause("wait")
        assert not fleet.paused
        assert not any(port.side.rollout.paused for port in local.ports.values())
        assert all(port.side.rollout.sleeping == ("kv_cache",) for port in local.ports.values())
        fleet.wake_up()
        for port in local.ports.values():
            port.runner.gate.release(1000)
        assert handle.result(HANG)
        assert len(fleet.generate(PROMPTS, PARAMS)) == len(PROMPTS)


def test_a_pause_of_a_paused_fleet_that_is_refused_leaves_it_paused() -> None:
    with LocalFleet(replicas=2) as local:
        local.fleet.pause()
        refuse(local.ports["0"], "pause")
        with pytest.raises(RuntimeError, match="not now"):
            local.fleet.pause("abort")
        assert local.fleet.paused
        assert all(port.side.rollout.paused for port in local.ports.values())


def test_a_sleep_that_one_replica_refuses_is_none() -> None:
    """A sleep that one replica refuses is none: what slept before sleeps on, and nothing else."""
    with LocalFleet(replicas=2) as local:
        local.fleet.sleep("kv_cache")
        refuse(local.ports["0"], "sleep")
        with pytest.raises(RuntimeError, match="not now"):
            local.fleet.sleep()
        assert (
            {port.side.rollout.sleeping for port in local.ports.values()} == {local.fleet.sleeping} == {("kv_cache",)}
        )
        local.fleet.wake_up()
        assert len(local.fleet.generate(PROMPTS, PARAMS)) == len(PROMPTS)


def test_an_interrupted_pause_is_none_once_the_replicas_are_done_with_it() -> None:
    """An interrupted pause is none once the replicas are done with it; its caller does not wait for the requests that
    the pause waited for.
    """
    with LocalFleet(replicas=2, prepare=gated) as local:
        fleet, ports = local.fleet, list(local.ports.values())
        handles = [fleet.submit([number] * 9, PARAMS) for number in range(2)]
        for port in ports:
            port.runner.gate.wait_for_a_step()
        interrupted(lambda: fleet.pause("wait"), once=lambda: all("pause" in port.commands for port in ports))
        assert not fleet.paused
        assert not any(handle.done for handle in handles)
        for port in ports:
            port.runner.gate.release(1000)
        assert all(handle.result(HANG) for handle in handles)
        wait_until(lambda: all("resume" in port.commands and not port.side.rollout.paused for port in ports))
        assert len(fleet.generate(PROMPTS, PARAMS)) == len(PROMPTS)


def test_a_pause_after_an_interrupted_one_stays() -> None:
    with LocalFleet(replicas=2, prepare=gated) as local:
        fleet, ports = local.fleet, list(local.ports.values())
        handles = [fleet.submit([number] * 9, PARAMS) for number in range(2)]
        for port in ports:
            port.runner.gate.wait_for_a_step()
        interrupted(lambda: fleet.pause("wait"), once=lambda: all("pause" in port.commands for port in ports))
        for port in ports:
            port.runner.gate.release(1000)
        fleet.pause()
        wait_until(lambda: all("wake_up" in port.commands for port in ports))  # it has been undone
        assert fleet.paused
        assert all(port.side.rollout.paused for port in ports)
        fleet.resume()
        assert all(handle.result(HANG) for handle in handles)


class NotedLock:
    """Counts how often a lock was taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.taken = 0

    def acquire(self) -> bool:
        self._lock.acquire()
        self.taken += 1
        return True

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_a_fleet_that_is_closed_while_a_replica_waits_for_its_turn_gives_the_turn_back() -> None:
    """A replica that waits for its turn to come back, during an update, gives the turn back when the fleet is closed
    before the update ends.
    """
    turn = NotedLock()
    with LocalFleet(replicas=2) as local:
        local.fleet._weights._turn = turn
        with turn:
            local.kill("0")
            wait_until(lambda: local.fleet._crew.members["0"].incarnation == 2 and local.fleet._crew.members["0"].alive)
            local.fleet.close()
        wait_until(lambda: turn.taken == 2)
        wait_until(lambda: not turn.locked())
        with pytest.raises(WorkerStateError, match="the fleet is closed"):
            local.fleet.receive_weights(TinyModule())


def test_an_interrupt_after_the_last_answer_lets_the_replicas_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt after the last answer lets the replicas go on: the command has ended by then, and nothing of it is
    left that could see that its caller has gone.
    """

    def interrupted_late(doing: Doing[Any]) -> None:
        doing.wait()
        raise KeyboardInterrupt

    with LocalFleet(replicas=2) as local:
        for command in (local.fleet.pause, local.fleet.sleep):
            with monkeypatch.context() as patched:
                patched.setattr(Doing, "result", interrupted_late)
                with pytest.raises(KeyboardInterrupt):
                    command()
            assert (local.fleet.paused, local.fleet.sleeping) == (False, ())
            sides = [port.side.rollout for port in local.ports.values()]
            wait_until(lambda sides=sides: not any(side.paused or side.sleeping for side in sides))
        wait_until(lambda: all(local.fleet.replicas.values()))  # by what they last told
        assert len(local.fleet.generate(PROMPTS, PARAMS)) == len(PROMPTS)


def test_what_goes_on_after_a_refusal_leaves_a_later_sleep_alone() -> None:
    """What goes on after a refusal leaves a later sleep alone: the caller of the refused command is interrupted while
    replicas go on, and the next command has its turn.
    """
    with LocalFleet(replicas=2) as local:
        fleet, resumed, may_wake = local.fleet, threading.Event(), threading.Event()
        refuse(local.ports["0"], "pause")
        side = local.ports["1"].side
        resume = side.resume

        async def resume_slowly() -> None:
            await resume()
            resumed.set()
            await asyncio.to_thread(may_wake.wait, HANG)

        side.resume = resume_slowly
        interrupted(fleet.pause, once=resumed.is_set)
        with ThreadPoolExecutor(1) as other:
            sleeping = other.submit(fleet.sleep)
            wait_until(lambda: sleeping.done() or fleet._turn.locked())
            may_wake.set()
            sleeping.result(HANG)
        wait_until(lambda: local.ports["1"].commands.count("wake_up") == 1)
        assert [port.side.rollout.sleeping for port in local.ports.values()] == [fleet.sleeping] * 2


def test_a_replica_that_came_back_during_a_sleep_that_is_refused_gets_the_weights() -> None:
    """A replica that came back during a sleep that is refused gets the weights, which nobody could give while the
    others slept.
    """
    came, new = threading.Event(), TinyModule()
    with LocalFleet(replicas=3) as local, ThreadPoolExecutor(1) as other:
        fleet, side = local.fleet, local.ports["2"].side
        sleep = side.sleep

        async def refuse_late(tags: tuple[str, ...], level: int) -> None:
            await sleep(tags, level)
            await asyncio.to_thread(came.wait, HANG)
            raise RuntimeError("not now")

        side.sleep = refuse_late
        fleet.receive_weights(new)
        sleeping = other.submit(fleet.sleep)
        wait_until(lambda: all(port.side.rollout.sleeping for port in local.ports.values()))
        local.kill("0")
        came_back(local)
        assert not fleet.replicas["0"]
        came.set()
        with pytest.raises(RuntimeError, match="not now"):
            sleeping.result(HANG)
        assert all(fleet.replicas.values())
        assert torch.equal(local.ports["0"].side.rollout.module.proj.weight, new.proj.weight)
