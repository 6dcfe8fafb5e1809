"""All workers have one interface: the options of an update, and the worker behind an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from samebit.rollout import RolloutWorker, SamplingParams, UpdateOptions, WorkerStateError, async_worker
from samebit.rollout.async_worker import AsyncWorker
from samebit.rollout.worker_interface import UpdateKeywords

from ...patience import HANG
from ..conftest import TinyModule

MakeWorker = Callable[..., tuple[RolloutWorker, Any]]
FEW = SamplingParams(max_tokens=3)


def test_the_keywords_of_a_call_are_the_options() -> None:
    assert UpdateKeywords.__annotations__.keys() == {field.name for field in fields(UpdateOptions)}
    assert UpdateOptions.of({}) == UpdateOptions()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"parital": True}, TypeError, "no option parital; there are version, in_flight, partial, cast, verify"),
        ({"verify": "yes"}, ValueError, "verify must be True or False, got 'yes'"),
        ({"partial": 1}, ValueError, "partial must be True or False, got 1"),
        ({"cast": None}, ValueError, "cast must be True or False, got None"),
        ({"version": "3"}, ValueError, "version must be an int"),
        ({"in_flight": "drop"}, ValueError, "in_flight must be one of"),
    ],
)
def test_a_wrong_option_changes_nothing(
    make_worker: MakeWorker, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    worker, _ = make_worker()
    with pytest.raises(error, match=says):
        worker.receive_weights(TinyModule(), **options)
    assert worker.weight_version == 0


def test_the_module_of_a_worker_is_the_one_that_gets_the_weights(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    new = {name: tensor + 1 for name, tensor in worker.module.state_dict().items()}
    worker.receive_weights(new)
    assert all(torch.equal(tensor, new[name]) for name, tensor in worker.module.state_dict().items())


class Sources:
    """Opens a folder's name as a module, and notes what was asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    @contextmanager
    def opened(self, source: object) -> Iterator[object]:
        self.asked.append(source)
        yield TinyModule()

    def forget(self, source: object) -> None:
        self.asked.append(("forgotten", source))

    def close(self) -> None:
        self.asked.append("closed")


def behind_a_loop(worker: RolloutWorker, check: Callable[[AsyncWorker, Sources], Awaitable[None]]) -> None:
    async def main() -> None:
        sources = Sources()
        inside = AsyncWorker(sources)
        with pytest.raises(WorkerStateError, match="no model is loaded yet"):
            await inside.generate([[1]], FEW)
        assert await inside.build(lambda: worker) is worker
        await asyncio.wait_for(check(inside, sources), HANG)

    asyncio.run(main())


def test_every_option_of_an_update_reaches_the_worker_behind_a_loop(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option of an update reaches the worker behind a loop, as nothing between lists them."""
    worker, _ = make_worker()
    seen: list[dict[str, Any]] = []
    receive = worker.receive_weights
    monkeypatch.setattr(
        worker, "receive_weights", lambda source, **given: seen.append(given) or receive(source, **given)
    )
    asked: dict[str, Any] = {"version": 7, "in_flight": "recompute", "partial": False, "cast": True, "verify": True}
    assert asked.keys() == UpdateKeywords.__annotations__.keys()

    async def check(inside: AsyncWorker, sources: Sources) -> None:
        report = await inside.receive_weights(Path("folder"), **asked)
        assert (report.version, report.verified) == (7, True)
        with pytest.raises(TypeError, match="no option parital"):
            await inside.receive_weights(Path("folder"), parital=True)  # type: ignore[call-arg]
        await inside.hang_up(Path("folder"))
        await inside.close()
        assert sources.asked == [Path("folder"), ("forgotten", Path("folder")), "closed"]

    behind_a_loop(worker, check)
    assert seen == [asked]


def test_a_worker_behind_a_loop_answers_like_one_before_it(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    expected = worker.generate([[1, 2], [3]], FEW)

    async def check(inside: AsyncWorker, sources: Sources) -> None:
        outputs = await inside.generate([[1, 2], [3]], FEW)
        assert [out.samples[0].token_ids for out in outputs] == [out.samples[0].token_ids for out in expected]
        assert (await inside.run([3], FEW, "named")).request_id == "named"
        await inside.pause()
        ended = asyncio.create_task(inside.run([4], FEW, "named", "ticket"))
        waiting = asyncio.create_task(inside.generate([[4]], FEW))
        await asyncio.sleep(0)
        await inside.cancel("named")
        assert (await inside.stats())["requests_aborted"] == 0
        await inside.cancel("ticket")
        assert (await ended).samples[0].finish_reason == "abort"
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await inside.resume()
        await inside.sleep("kv_cache")
        await inside.wake_up()
        await inside.reset_prefix_cache()
        with pytest.raises(WorkerStateError, match="has a worker already"):
            await inside.build(lambda: worker)
        assert (await inside.stats())["requests_aborted"] == 2

    behind_a_loop(worker, check)


def test_a_cancel_that_comes_before_its_call_is_not_lost(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel that comes before its call is not lost: Ray lets a later call overtake one with large arguments. Of
    tickets whose call never comes a few are kept.
    """
    worker, _ = make_worker()
    monkeypatch.setattr(async_worker, "MOST_EARLY", 2)

    async def check(inside: AsyncWorker, sources: Sources) -> None:
        for ticket in ("forgotten", "early", "named"):
            await inside.cancel(ticket)
        await inside.pause()
        tickets = ("forgotten", "early", "early", None)
        ended = [asyncio.create_task(inside.run([4], FEW, f"named {n}", one)) for n, one in enumerate(tickets)]
        ended.append(asyncio.create_task(inside.run([4], FEW, "named")))
        await asyncio.sleep(0)
        await inside.resume()
        reasons = [output.samples[0].finish_reason for output in await asyncio.gather(*ended)]
        assert reasons == ["length", "abort", "length", "length", "length"]

    behind_a_loop(worker, check)


def test_a_worker_behind_a_loop_hangs_up_in_a_thread(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker behind a loop hangs up in a thread: it may wait for an update that is opening its link, and `health`
    answers meanwhile.
    """
    worker, _ = make_worker()
    closed_in: list[threading.Thread] = []

    async def check(inside: AsyncWorker, sources: Sources) -> None:
        monkeypatch.setattr(sources, "close", lambda: closed_in.append(threading.current_thread()))
        await inside.close()

    behind_a_loop(worker, check)
    assert len(closed_in) == 1
    assert closed_in != [threading.current_thread()]
