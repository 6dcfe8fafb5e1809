"""Streams of a fleet whose feeds lose tokens."""

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
        wait_until(lambda: "abort" in port.commands)
        gate.release(100)
        wait_until(lambda: not local.busy())


def test_a_large_request_streams_too() -> None:
    """Ray lets a small call overtake one with large arguments: the replica hears of the reader first."""

    def prepare(port: LocalPort) -> None:
        gated(port)
        run, follow, followed = port.side.run_followed, port.side.follow, asyncio.Event()

        async def follow_first(request_id: str, number: int) -> None:
            await follow(request_id, number)
            followed.set()

        async def run_second(prompt: list[int], params: SamplingParams, request_id: str) -> RequestOutput:
            await followed.wait()
            return await run(prompt, params, request_id)

        port.side.follow, port.side.run_followed = follow_first, run_second  # type: ignore[method-assign]

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
