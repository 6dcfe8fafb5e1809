"""A fleet's streams are whole though its feeds lose tokens."""

from __future__ import annotations

import asyncio

import pytest

from samebit.rollout import RequestOutput, SamplingParams, StreamGapError

from ...patience import HANG, wait_until
from ..conftest import fake_continuation
from .local_fleet import LocalFleet, LocalPort
from .test_fleet import gated


def test_a_stream_that_lost_tokens_ends_with_an_error() -> None:
    with LocalFleet(replicas=1, prepare=gated) as local:
        port = local.ports["0"]
        handle = local.fleet.submit([3, 4], SamplingParams(max_tokens=30))
        reader, gate = handle.reader(), port.runner.gate
        gate.release(2)
        seen: list[int] = []
        wait_until(lambda: seen.extend(token for chunk in reader.read() for token in chunk.token_ids) or len(seen) == 2)
        port.loses = True
        gate.release(2)
        wait_until(lambda: port.lost > 0)
        port.loses = False
        gate.release(2)
        wait_until(lambda: reader.ready)
        with pytest.raises(
            StreamGapError, match=r"sample 0: tokens from \d+ on have come where those from \d+ on were"
        ):
            reader.read()
        wait_until(lambda: "cancel" in port.commands)
        gate.release(100)
        wait_until(lambda: not local.busy())


def overtaken(port: LocalPort, command: str) -> None:
    """Let the replica hear of the command before the request, as Ray lets a small call overtake a large one."""
    run, told, heard = port.side.run_followed, getattr(port.side, command), asyncio.Event()

    async def first(number: int) -> None:
        await told(number)
        heard.set()

    async def second(prompt: list[int], params: SamplingParams, request_id: str, *numbers: int) -> RequestOutput:
        await heard.wait()
        return await run(prompt, params, request_id, *numbers)

    setattr(port.side, command, first)
    port.side.run_followed = second  # type: ignore[method-assign]


def test_a_large_request_streams_too() -> None:
    def prepare(port: LocalPort) -> None:
        gated(port)
        overtaken(port, "follow")

    with LocalFleet(replicas=1, prepare=prepare) as local:
        fed: list[bool] = []
        take = local.fleet._crew.on_tokens
        local.fleet._crew.on_tokens = lambda tokens: (fed.append(bool(tokens)), take(tokens))[-1]
        handle = local.fleet.submit([3, 4], SamplingParams(max_tokens=20))
        handle.reader()
        runner = local.ports["0"].runner
        runner.gate.release(2)
        wait_until(lambda: len(runner.plans) == 3)
        heard = len(fed)
        wait_until(lambda: any(fed) or len(fed) > heard + 2)
        assert any(fed), "a feed that began after two steps has brought nothing of them"
        runner.gate.release(100)
        assert handle.result(HANG).samples[0].token_ids == fake_continuation([3, 4], 0, 20)


def test_a_request_that_is_followed_twice_streams_once() -> None:
    """A request that is followed twice streams once: when a replica has died while its reader was made, both tell the
    next one.
    """
    with LocalFleet(replicas=1, prepare=gated) as local:
        port, seen = local.ports["0"], list[int]()
        handle = local.fleet.submit([3, 4], SamplingParams(max_tokens=20))
        reader = handle.reader()

        def read() -> bool:
            seen.extend(token for chunk in reader.read() for token in chunk.token_ids)
            return reader.ended

        port.runner.gate.release(2)
        wait_until(lambda: read() or len(seen) == 2)
        (run,) = port.side._handles
        local.fleet._crew.background.wait(port.side.follow(run))
        port.runner.gate.release(100)
        wait_until(read)
        assert seen == handle.result(HANG).samples[0].token_ids == fake_continuation([3, 4], 0, 20)


@pytest.mark.parametrize("by_id", [False, True])
def test_a_large_request_can_be_cancelled_at_once(by_id: bool) -> None:
    with LocalFleet(replicas=1) as local:
        params = SamplingParams(max_tokens=20)
        overtaken(local.ports["0"], "cancel")
        handle = local.fleet.submit([3, 4], params, "mine")
        local.fleet.abort("mine") if by_id else handle.cancel()
        assert handle.result(HANG).samples[0].finish_reason == "abort"
        again = local.fleet.submit([3, 4], params, "mine").result(HANG)
        assert again.samples[0].token_ids == fake_continuation([3, 4], 0, 20)


def test_a_cancel_that_comes_after_the_end_ends_no_later_request_of_the_id() -> None:
    """A cancel that comes after the end ends no later request of the id, though a replica cannot tell it from one that
    comes too early.
    """
    with LocalFleet(replicas=1) as local:
        side, ended, cancelled = local.ports["0"].side, list[str](), asyncio.Event()
        run, cancel = side.run_followed, side.cancel

        async def answered_late(
            prompt: list[int], params: SamplingParams, request_id: str, *numbers: int
        ) -> RequestOutput:
            output = await run(prompt, params, request_id, *numbers)
            ended.append(request_id)
            await cancelled.wait()
            return output

        async def noted(ticket: str | int) -> None:
            await cancel(ticket)
            cancelled.set()

        side.run_followed, side.cancel = answered_late, noted  # type: ignore[method-assign]
        handle = local.fleet.submit([3, 4], SamplingParams(max_tokens=3), "mine")
        wait_until(lambda: ended)
        handle.cancel()
        again = [handle.result(HANG), local.fleet.submit([3, 4], SamplingParams(max_tokens=3), "mine").result(HANG)]
        assert [output.samples[0].finish_reason for output in again] == ["length", "length"]


def test_the_result_brings_what_a_streams_end_has_lost() -> None:
    with LocalFleet(replicas=1) as local:
        local.ports["0"].loses = True
        handle = local.fleet.submit([3, 4], SamplingParams(max_tokens=20))
        streamed = [token for chunk in handle for token in chunk.token_ids]
        assert streamed == handle.result(HANG).samples[0].token_ids == fake_continuation([3, 4], 0, 20)


def test_what_comes_late_of_a_request_is_not_of_the_next_with_its_id() -> None:
    with LocalFleet(replicas=1, prepare=gated) as local:
        feeds, port, params = [], local.ports["0"], SamplingParams(max_tokens=3)
        take = local.fleet._crew.on_tokens
        local.fleet._crew.on_tokens = feeds.append
        gate = port.runner.gate
        first = local.fleet.submit([3, 4], params, "mine")
        first.reader()
        gate.release(2)
        wait_until(lambda: any(feeds))
        gate.release(100)
        first.result(HANG)
        gate.shut()
        second = local.fleet.submit([5, 6], params, "mine")
        reader = second.reader()
        for tokens in feeds:
            local.fleet._crew.background.loop.call_soon_threadsafe(take, tokens)
        local.fleet._crew.on_tokens = take
        gate.release(100)
        assert second.result(HANG).samples[0].token_ids == fake_continuation([5, 6], 0, 3)
        assert [token for chunk in reader.read() for token in chunk.token_ids] == fake_continuation([5, 6], 0, 3)
