"""A fleet over replicas in this process is one worker to its callers, whatever happens to its replicas."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file

from samebit.rollout import (
    NoReplicaError,
    RequestError,
    RequestIdInUseError,
    RolloutConfig,
    SamplingParams,
    WorkerLostError,
    WorkerStateError,
)
from samebit.rollout.fleet.fleet import Fleet
from samebit.rollout.fleet.handle import FleetHandle
from samebit.rollout.fleet.options import FleetOptions
from samebit.rollout.fleet.port import Command
from samebit.rollout.fleet.replica import ReplicaSide
from samebit.rollout.keys.digest_key import DigestKey
from samebit.weight_sync import WeightMismatchError, gloo_group
from samebit.weight_sync.transports.addresses import SharedMemoryAt

from ...patience import HANG, wait_until
from ..conftest import TinyModule, fake_continuation
from ..step_gate import StepGate
from .local_fleet import BLOCK, LocalFleet, LocalPort

PARAMS = SamplingParams(max_tokens=7)
PROMPTS = [[1], [2, 3, 4], list(range(5, 22)), [7] * 9]


def gated(port: LocalPort) -> None:
    port.runner.gate = StepGate()


def as_of_feeds(fleet: Fleet, name: str) -> float:
    """Add up one of the replicas' numbers, as the last feeds told it."""
    return sum(stats[name] for stats in fleet.replica_stats().values())


def note_seeds(port: LocalPort, given: list[int | None]) -> None:
    run = port.side.run_followed

    async def noted(prompt: list[int], params: SamplingParams, request_id: str, *numbers: int) -> Any:
        given.append(params.seed)
        return await run(prompt, params, request_id, *numbers)

    port.side.run_followed = noted


def test_it_generates_like_one_worker() -> None:
    with LocalFleet() as local:
        outputs = local.fleet.generate(PROMPTS, SamplingParams(n=2, max_tokens=7))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.prompt_token_ids == prompt
            assert [s.token_ids for s in output.samples] == [fake_continuation(prompt, i, 7) for i in range(2)]
        assert len(asyncio.run(local.fleet.generate_async(PROMPTS, PARAMS))) == len(PROMPTS)
        assert [handle.result(HANG).request_id for handle in local.fleet.submit_all(PROMPTS, PARAMS)]
        assert local.fleet.stats()["router_requests"] == 3 * len(PROMPTS)
        wait_until(lambda: not local.busy())


def test_what_is_cached_somewhere_is_found_there() -> None:
    with LocalFleet() as local:
        first = local.fleet.submit([9] * 21, PARAMS).result(HANG)
        tokens = first.prompt_token_ids + first.samples[0].token_ids
        for _ in range(3):
            again = local.fleet.submit([*tokens, 1], PARAMS).result(HANG)
            assert again.num_cached_tokens >= (len(tokens) - 1) // BLOCK * BLOCK
            tokens = [*tokens, 1]
        assert local.fleet.stats()["prefill_tokens_computed"] <= 21 + 3 * 2 * BLOCK


def test_streams_give_every_token_once() -> None:
    with LocalFleet() as local:
        for params in (SamplingParams(n=2, max_tokens=30), SamplingParams(max_tokens=1)):
            handle = local.fleet.submit([3, 4], params, "mine")
            tokens: dict[int, list[int]] = {index: [] for index in range(params.n)}
            ends = []
            for chunk in handle:
                tokens[chunk.sample] += chunk.token_ids
                ends += [chunk.finish_reason] * chunk.finished
            assert list(tokens.values()) == [sample.token_ids for sample in handle.result().samples]
            assert ends == ["length"] * params.n
        late = local.fleet.submit([3, 4], PARAMS)
        output = late.result(HANG)
        assert [token for chunk in late for token in chunk.token_ids] == output.samples[0].token_ids


def test_tokens_stream_while_the_request_runs() -> None:
    with LocalFleet(replicas=1, prepare=gated) as local:
        handle = local.fleet.submit([3, 4], PARAMS)
        reader = handle.reader()
        gate = local.ports["0"].runner.gate
        gate.release(2)
        wait_until(lambda: reader.ready)
        assert not handle.done
        assert reader.read()[0].token_ids
        gate.release(100)
        assert len(handle.result(HANG).samples[0].token_ids) == 7


def test_a_request_keeps_its_tokens_wherever_it_runs() -> None:
    """A request keeps its tokens wherever it runs, as each request without a seed gets its own."""
    seeds = []
    for replicas in (1, 3):
        with LocalFleet(replicas=replicas) as local:
            given: list[int | None] = []
            for port in local.ports.values():
                note_seeds(port, given)
            for prompt, params in zip(PROMPTS, [PARAMS] * 3 + [SamplingParams(seed=4, max_tokens=2)], strict=True):
                local.fleet.generate([prompt], params)
            seeds.append(given)
    assert seeds[0] == seeds[1]
    assert seeds[0][3] == 4
    assert len(set(seeds[0])) == 4


def test_a_request_without_an_id_gets_one_that_no_caller_has_given() -> None:
    with LocalFleet(replicas=1, prepare=gated) as local:
        given = [local.fleet.submit([3], PARAMS, f"request-{number}") for number in (0, 1, 3)]
        own = [local.fleet.submit([3], PARAMS) for _ in range(2)]
        own += local.fleet.submit_all([[3], [4]], PARAMS)
        assert len({handle.request_id for handle in [*given, *own]}) == 7
        local.ports["0"].runner.gate.release(1000)
        assert all(len(handle.result(HANG).samples[0].token_ids) == 7 for handle in [*given, *own])


def interrupted_at(number: int, wait: Callable[[], object]) -> bool:
    """Run `wait` and raise at the step of this number on its way through what waits; return whether there was one.

    A tracer raises where only luck puts a signal: also right after a lock was taken."""
    steps = itertools.count(1)

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        where, what = Path(frame.f_code.co_filename).name, frame.f_code.co_name
        if where not in ("threading.py", "_base.py", "handle.py", "ending.py") or what == "__init__":
            return None
        if next(steps) == number:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        wait()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("way", ["result", "stream", "command"])
def test_an_interrupt_of_a_wait_leaves_a_fleet_that_works(way: str) -> None:
    with LocalFleet(replicas=1) as local:
        for number in itertools.count(1):
            handle = local.fleet.submit([3, 4], PARAMS)
            if way == "stream":
                handle.reader()  # it is followed from here on
            waits = {"result": handle.result, "stream": partial(list, handle), "command": local.fleet.stats}
            came = interrupted_at(number, waits[way])
            assert len(handle.result(HANG).samples[0].token_ids) == 7
            if not came:
                break
        assert number > 10


def test_cancelled_requests_end_with_what_they_have() -> None:
    with LocalFleet(prepare=gated) as local:
        handle = local.fleet.submit([1, 2], PARAMS, "mine")
        handle.cancel()
        for port in local.ports.values():
            port.runner.gate.release(100)
        assert handle.result(HANG).samples[0].finish_reason in ("abort", "length")
        local.fleet.abort("unknown")
        with pytest.raises(RequestError, match="request ids are strings"):
            local.fleet.abort([3])


def test_cancelling_a_finished_request_leaves_the_next_one_of_its_name_alone() -> None:
    with LocalFleet(replicas=1) as local:
        first = local.fleet.submit([1, 2], PARAMS, "mine")
        first.result(HANG)
        gated(local.ports["0"])
        second = local.fleet.submit([1, 3], PARAMS, "mine")
        first.cancel()
        local.fleet.stats()  # comes after what the cancel has set going
        local.ports["0"].runner.gate.release(100)
        assert second.result(HANG).samples[0].finish_reason == "length"


def test_a_cancel_that_comes_late_ends_no_later_request_of_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel that comes late ends no later request of the id: the request ends, and another takes its id, before the
    replica is told.
    """
    with LocalFleet(replicas=1, prepare=gated) as local:
        background, port = local.fleet._crew.background, local.ports["0"]
        first = local.fleet.submit([1, 2], PARAMS, "mine")
        late: list[Coroutine[Any, Any, None]] = []
        with monkeypatch.context() as patch:
            patch.setattr(background, "spawn", late.append)
            first.cancel()
        port.runner.gate.release(100)
        first.result(HANG)
        gated(port)
        second = local.fleet.submit([1, 3], PARAMS, "mine")
        for telling in late:
            background.wait(telling)
        port.runner.gate.release(100)
        assert (len(late), second.result(HANG).samples[0].finish_reason) == (1, "length")


def test_bad_requests_raise_before_anything_is_sent() -> None:
    with LocalFleet(prepare=gated) as local:
        fleet = local.fleet
        with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
            fleet.generate([[1], []], PARAMS)
        with pytest.raises(RequestError, match="outside the vocabulary"):
            fleet.submit([1000])
        with pytest.raises(RequestError, match="2 prompts, but 1 params"):
            fleet.submit_all([[1], [2]], [PARAMS])
        with pytest.raises(RequestError, match="adapter='x' is not known; there are __base__"):
            fleet.submit([1], SamplingParams(adapter="x", max_tokens=2))
        with pytest.raises(RequestError, match="session must be a non-empty string"):
            fleet.submit([1], PARAMS, session="")
        assert local.busy() == []
        fleet.submit([1], PARAMS, "mine")
        with pytest.raises(RequestIdInUseError, match="a request with the id 'mine' is running"):
            fleet.submit([1], PARAMS, "mine")


def test_a_bad_fleet_is_named() -> None:
    with pytest.raises(ValueError, match="replicas must be an int of at least 1, got 0"):
        LocalFleet(replicas=0)
    with pytest.raises(ValueError, match="leave digest_key=None"):
        Fleet(lambda name, config: pytest.fail("started"), 2, config=RolloutConfig(digest_key=DigestKey()))
    local = LocalFleet(replicas=1)
    local.fleet.close()
    local.fleet.close()
    with pytest.raises(WorkerStateError, match="the fleet is closed"):
        local.fleet.submit([1], PARAMS)
    with pytest.raises(WorkerStateError, match="the fleet is closed"):
        local.fleet.check_usable()
    assert local.fleet.trouble() == "the fleet is closed"


def test_a_replica_that_can_not_be_built_fails_the_fleet() -> None:
    class Broken(LocalFleet):
        def _start(self, name: str, config: RolloutConfig) -> LocalPort:
            self.refuse = ValueError("no such model") if name == "2" else None
            return super()._start(name, config)

    with pytest.raises(ValueError, match="no such model"):
        Broken()


def test_the_requests_of_a_dead_replica_end_with_an_error_by_name_and_it_comes_back() -> None:
    with LocalFleet(prepare=gated) as local:
        handles = [local.fleet.submit([number] * 9, PARAMS) for number in range(6)]
        wait_until(lambda: len(local.busy()) == 3)
        local._prepare = None
        local.kill("1")
        for name in ("0", "2"):
            local.ports[name].runner.gate.release(1000)
        lost = 0
        for handle in handles:
            try:
                handle.result(HANG)
            except WorkerLostError:
                lost += 1
        assert lost == 2
        wait_until(lambda: all(local.fleet.replicas.values()))
        assert local.started.count("1") == 2
        stats = local.fleet.stats()
        assert (stats["replica_restarts"], stats["requests_lost"]) == (1, 2)
        assert len(local.fleet.generate(PROMPTS * 4, PARAMS)) == 16


def test_requests_are_sent_again_if_asked() -> None:
    with LocalFleet(prepare=gated, resubmit=True) as local:
        handles = [local.fleet.submit([number] * 9, PARAMS) for number in range(6)]
        streamed = next(h for h in handles if local.fleet._carrier._running[h.request_id].member.name == "1")
        reader = streamed.reader()
        local.ports["1"].runner.gate.release(3)
        wait_until(lambda: reader.ready)
        local._prepare = None
        local.kill("1")
        for name in ("0", "2"):
            local.ports[name].runner.gate.release(1000)
        for number, handle in enumerate(handles):
            if handle is streamed:
                with pytest.raises(WorkerLostError):
                    handle.result(HANG)
            else:
                expected = fake_continuation([number] * 9, 0, 7)
                assert handle.result(HANG).samples[0].token_ids == expected
        assert local.fleet.stats()["requests_resubmitted"] == 1


def test_a_replica_is_given_up_at_last() -> None:
    with LocalFleet(replicas=2, max_restarts=2) as local:
        local.refuse = ValueError("no memory")
        local.kill("0")
        wait_until(lambda: "max_restarts=2 is used up" in local.fleet._crew.router.closed().get("0", ""))
        assert local.started.count("0") == 3
        assert len(local.fleet.generate(PROMPTS, PARAMS)) == 4
        local.fleet.check_usable()
        local.kill("1")
        wait_until(lambda: local.fleet.trouble() is not None and "used up" in local.fleet.trouble().split(";")[1])
        with pytest.raises(NoReplicaError, match="no replica takes requests now: 0: its process has died"):
            local.fleet.submit([1], PARAMS)
        with pytest.raises(WorkerLostError, match="no replica is alive"):
            local.fleet.check_usable()
        with pytest.raises(NoReplicaError, match="no replica is alive to take weights"):
            local.fleet.load_state_dict(TinyModule().state_dict())


def test_a_dead_replica_has_what_it_has_counted_and_nothing_in_use() -> None:
    with LocalFleet(replicas=2, prepare=gated, max_restarts=0) as local:
        handles = [local.fleet.submit([number] * 9, PARAMS) for number in range(4)]
        for port in local.ports.values():
            port.runner.gate.release(3)
        wait_until(lambda: local.fleet.replica_stats()["1"]["output_tokens"])
        alive = local.fleet.replica_stats()["1"]
        assert alive["running"] > 0
        local.kill("1")
        wait_until(lambda: "used up" in local.fleet._crew.router.closed().get("1", ""))
        dead = local.fleet.replica_stats()["1"]
        for name in ("running", "waiting", "blocks_cached", "blocks_evictable", "states_used"):
            assert dead[name] == 0
        assert dead["blocks_free"] == dead["blocks_total"] == 64
        for name in ("output_tokens", "prefill_tokens_computed"):
            assert dead[name] >= alive[name] > 0
        local.ports["0"].runner.gate.release(1000)
        wait_until(lambda: all(handle.done for handle in handles))


def test_a_silent_replica_takes_no_requests_until_it_speaks() -> None:
    with LocalFleet(replicas=2, silent_seconds=2.0) as local:
        port = local.ports["0"]
        port.mute = asyncio.Event()
        wait_until(lambda: not local.fleet.replicas["0"])
        assert "it has said nothing for 2 s" in local.fleet._crew.router.closed()["0"]
        wait_until(lambda: local.fleet.replicas["1"])  # a fleet that stood still has not heard of it either
        local.fleet.generate(PROMPTS, PARAMS)
        mute, port.mute = port.mute, None
        local.fleet._crew.background.loop.call_soon_threadsafe(mute.set)
        wait_until(lambda: local.fleet.replicas["0"])


def test_weights_reach_all_replicas_at_one_version() -> None:
    with LocalFleet() as local:
        new = TinyModule()
        report = local.fleet.receive_weights(new)
        assert report.version == local.fleet.weight_version == 1
        local.fleet.load_state_dict({name: tensor + 1 for name, tensor in new.state_dict().items()})
        assert local.fleet.weight_version == 2
        for port in local.ports.values():
            assert port.side.rollout.weight_version == 2
            assert torch.equal(port.side.rollout.module.proj.weight, new.proj.weight + 1)
        assert all(local.fleet.replicas.values())


def test_bad_updates_change_nothing_and_are_named() -> None:
    with LocalFleet(replicas=2) as local:
        fleet = local.fleet
        with pytest.raises(WeightMismatchError):
            fleet.load_state_dict({"nothing": torch.ones(3)})
        with pytest.raises(TypeError, match=r"a fleet takes weights from a module, a dict .*SharedMemoryAt"):
            fleet.receive_weights(SharedMemoryAt("x"))
        with pytest.raises(TypeError, match="not from NoneType"):
            fleet.receive_weights()
        with pytest.raises(TypeError, match="load_state_dict takes a dict of tensors, got str"):
            fleet.load_state_dict("folder")
        with pytest.raises(TypeError, match="an update has no option colour"):
            fleet.receive_weights(TinyModule(), colour="red")
        fleet.receive_weights(TinyModule(), version=5)
        with pytest.raises(ValueError, match=r"version must be above the current one \(5\), got 5"):
            fleet.receive_weights(TinyModule(), version=5)
        assert fleet.weight_version == 5
        assert all(fleet.replicas.values())


def test_a_replica_that_comes_back_has_the_weights_and_the_state_of_the_fleet() -> None:
    with LocalFleet(replicas=2) as local:
        new = TinyModule()
        local.fleet.receive_weights(new)
        local.fleet.pause()
        local.fleet.sleep("kv_cache")
        local.kill("0")
        wait_until(lambda: local.started.count("0") == 2 and local.fleet._crew.members["0"].alive)
        side = local.ports["0"].side
        wait_until(lambda: side.rollout.sleeping == ("kv_cache",))
        assert side.rollout.paused
        assert side.rollout.weight_version == 1
        assert torch.equal(side.rollout.module.proj.weight, new.proj.weight)
        local.fleet.wake_up()
        local.fleet.resume()
        wait_until(lambda: all(local.fleet.replicas.values()))
        assert len(local.fleet.generate(PROMPTS, PARAMS)) == 4


def test_a_replica_without_the_weights_takes_no_requests() -> None:
    """A replica without the weights takes no requests while the others sleep, and can not give them; once they are
    awake, they do.
    """
    with LocalFleet(replicas=2) as local:
        local.fleet.receive_weights(TinyModule())
        local.fleet.sleep("weights")
        local.kill("0")
        wait_until(lambda: "version 0, not 1" in local.fleet._crew.router.closed().get("0", ""))
        wait_until(lambda: local.ports["0"].side.rollout.sleeping == ("weights",))
        wait_until(lambda: not local.fleet._crew.members["0"].starting)
        local.fleet.wake_up()
        wait_until(lambda: all(local.fleet.replicas.values()))
        assert local.ports["0"].side.rollout.weight_version == 1


def test_an_update_during_which_a_replica_dies_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update reaches the others when a replica dies with the update in its hands."""
    with LocalFleet(replicas=3, sync_timeout=0.3, max_restarts=1) as local:

        def join(*place: Any, timeout: float) -> Any:
            """Join a group; only the first one, which not all of them join, is not waited for."""
            try:
                return gloo_group(*place, timeout=timeout)
            finally:
                local.fleet._weights._timeout = HANG

        monkeypatch.setattr("samebit.rollout.fleet.weights.gloo_group", join)
        new = TinyModule()
        port = local.ports["1"]
        receive = port.side.receive_weights

        async def die(source: object, **options: object) -> object:
            port.kill(local.fleet._crew.background.loop)
            return await receive(source, **options)

        port.side.receive_weights = die
        local.fleet.receive_weights(new)
        assert local.fleet.weight_version == 1
        wait_until(lambda: all(local.fleet.replicas.values()))
        for one in local.ports.values():
            assert one.side.rollout.weight_version == 1
            assert torch.equal(one.side.rollout.module.proj.weight, new.proj.weight)


def test_a_replica_that_fails_where_others_do_not_gets_the_weights_from_them(tmp_path: Path) -> None:
    new = TinyModule()
    save_file({name: tensor.clone() for name, tensor in new.state_dict().items()}, tmp_path / "model.safetensors")
    with LocalFleet(replicas=2) as local:
        side = local.ports["1"].side
        receive = side.receive_weights
        refused = threading.Event()

        async def refuse_once(source: object, **options: object) -> object:
            if not refused.is_set():
                refused.set()
                raise RuntimeError("not now")
            return await receive(source, **options)

        side.receive_weights = refuse_once
        local.fleet.receive_weights(tmp_path)
        wait_until(lambda: side.rollout.weight_version == 1 and all(local.fleet.replicas.values()))
        assert torch.equal(side.rollout.module.proj.weight, new.proj.weight)


def test_a_replica_has_a_method_for_each_command() -> None:
    assert all(inspect.iscoroutinefunction(getattr(ReplicaSide, name)) for name in get_args(Command))


def test_commands_reach_all() -> None:
    with LocalFleet() as local:
        local.fleet.sleep(level=2)
        assert local.fleet.sleeping == ("weights", "kv_cache")
        with pytest.raises(NoReplicaError, match="asleep"):
            local.fleet.submit([1], PARAMS)
        assert "asleep" in local.fleet.trouble()
        local.fleet.wake_up()
        with pytest.raises(NoReplicaError, match=r"weights incomplete|discarded"):
            local.fleet.submit([1], PARAMS)
        local.fleet.receive_weights(TinyModule())
        local.fleet.pause()
        assert local.fleet.paused
        handle = local.fleet.submit([1], PARAMS)
        local.fleet.resume()
        assert handle.result(HANG)
        local.fleet.reset_prefix_cache(recompute_running=True)
        for name in ("sleep", "wake_up", "pause", "resume", "reset_prefix_cache"):
            assert all(name in port.commands for port in local.ports.values()), name
        with pytest.raises(ValueError, match="tags must be of"):
            local.fleet.sleep("everything")
        with pytest.raises(ValueError, match="level must be"):
            local.fleet.sleep(level=3)
        with pytest.raises(ValueError, match="mode must be one of"):
            local.fleet.pause("never")
        assert not local.fleet.paused


def test_a_sleep_that_is_refused_changes_nothing_for_replicas_that_come_later() -> None:
    with LocalFleet(replicas=2) as local:
        local.fleet.sleep(level=2)
        with pytest.raises(WorkerStateError, match="were discarded before"):
            local.fleet.sleep(level=1)
        local.kill("0")
        member = local.fleet._crew.members["0"]
        wait_until(lambda: local.started.count("0") == 2 and member.alive and not member.starting)
        local.fleet.wake_up()
        assert not local.ports["0"].side.rollout.has_weights


def test_a_part_of_the_weights_is_not_given_to_a_replica_whose_own_are_incomplete() -> None:
    """A part of the weights is not given to a replica whose own are incomplete: it gets all of them from one that has
    the rest.
    """
    with LocalFleet(replicas=2) as local:
        new, broken = TinyModule(), local.ports["0"].side.rollout
        local.fleet.receive_weights(new)
        broken._status.set_incomplete("an update broke off", RuntimeError("an update broke off"))
        wait_until(lambda: not local.fleet._crew.members["0"].state.has_weights)
        local.fleet.receive_weights({"proj.bias": torch.full((5,), 9.0)}, partial=True)
        wait_until(lambda: all(local.fleet.replicas.values()))
        assert torch.equal(broken.module.proj.weight, new.proj.weight)
        assert broken.weight_version == 2


def test_closing_fails_what_runs() -> None:
    local = LocalFleet(prepare=gated)
    handle = local.fleet.submit([1], PARAMS)
    local.fleet.close()
    with pytest.raises(WorkerStateError, match="the fleet was closed"):
        handle.result(HANG)


def test_closing_fails_what_is_sent_while_it_fails_the_rest() -> None:
    """Closing a fleet also fails what is sent while it fails the rest, as by a trainer's thread that sends on while
    another one closes.
    """
    later: list[FleetHandle] = []
    local = LocalFleet(prepare=gated)
    handle = local.fleet.submit([1], PARAMS)
    handle.when_done(lambda: later.append(local.fleet.submit([2], PARAMS)))
    local.fleet.close()
    assert later[0].done
    with pytest.raises(WorkerStateError, match="the fleet was closed"):
        later[0].result()


def test_stats_of_each_replica_and_of_all() -> None:
    with LocalFleet(replicas=2, router=FleetOptions().router) as local:
        local.fleet.generate(PROMPTS, PARAMS)
        total = local.fleet.stats()
        assert total["prefill_tokens_computed"] > 0
        wait_until(lambda: as_of_feeds(local.fleet, "prefill_tokens_computed") == total["prefill_tokens_computed"])
        assert set(local.fleet.replica_stats()) == {"0", "1"}
        assert total["replicas_open"] == total["replicas"] == 2
