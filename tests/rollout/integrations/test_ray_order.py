"""What one client submits to an actor is queued in that order, though Ray executes the calls of coroutines in any."""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ray = pytest.importorskip("ray")

from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams  # noqa: E402
from samebit.rollout.fleet import arrivals  # noqa: E402
from samebit.rollout.integrations.ray import RayWorker, RolloutActor  # noqa: E402

from ...patience import HANG  # noqa: E402
from ..tiny_llama import tiny  # noqa: E402

CONFIG = RolloutConfig(max_num_seqs=8, num_blocks=200, seed=3)
PARAMS = SamplingParams(max_tokens=3)
order = importlib.import_module("samebit.rollout.integrations.ray.order")


class Handle:
    """Stands for a request that has ended."""

    async def result_async(self) -> str:
        return "done"


class Queue:
    """Stands for a worker: notes what is submitted, and refuses what is empty."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def preparation(self, params: SamplingParams) -> None:
        return None

    def submit(self, prompt: list[int], params: SamplingParams, request_id: str) -> Handle:
        self.seen.append(prompt)
        if not prompt[1:]:
            raise ValueError("refused")
        return Handle()

    def submit_all(self, prompts: list[list[int]], params: SamplingParams) -> list[Handle]:
        return [self.submit(prompt, params, "") for prompt in prompts]


async def actor_of(queue: Queue) -> RolloutActor:
    actor = RolloutActor()
    await actor.build(lambda: queue)  # type: ignore[arg-type,return-value]
    return actor


def submitted(actor: RolloutActor, client: str, number: int) -> asyncio.Task[Any]:
    """Call as Ray does: each third as `generate`, each fifth to be refused."""
    place, prompt = order.Place(client, number), [number] if number % 5 == 4 else [number, 0]
    if number % 3 == 2:
        return asyncio.ensure_future(actor.generate_in_turn(place, [prompt], PARAMS, f"{client}{number}"))
    return asyncio.ensure_future(actor.run_in_turn(place, prompt, PARAMS, "id", f"{client}{number}"))


@given(st.permutations(range(9)), st.sets(st.sampled_from(range(9)), max_size=2))
def test_submissions_that_arrive_in_any_order_are_queued_in_theirs(arrivals: list[int], left: set[int]) -> None:
    """Submissions that arrive in any order are queued in theirs, beside some that are cancelled while they wait and a
    command that waits for all.
    """

    async def main() -> None:
        queue = Queue()
        actor = await actor_of(queue)
        calls = [asyncio.ensure_future(actor.until_queued(order.Place("a", 8)))]
        for number in arrivals:
            calls.append(submitted(actor, "a", number))
            await asyncio.sleep(0)
            if number in left:
                calls[-1].cancel()
        await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), HANG)
        numbers = [prompt[0] for prompt in queue.seen]
        assert numbers == sorted(numbers)
        assert set(range(9)) - left <= set(numbers)

    asyncio.run(main())


def test_nobody_waits_for_another_client() -> None:
    async def main() -> None:
        queue = Queue()
        actor = await actor_of(queue)
        behind = submitted(actor, "a", 1)
        assert await asyncio.wait_for(submitted(actor, "b", 0), HANG) == "done"
        assert queue.seen == [[0, 0]]
        await asyncio.wait_for(asyncio.gather(behind, submitted(actor, "a", 0)), HANG)

    asyncio.run(main())


def test_a_submission_that_never_comes_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A submission that never comes is not waited for without end: Ray loses calls when a connection breaks. It is
    taken where it comes after all.
    """
    monkeypatch.setattr(arrivals, "PATIENCE", 0.001)

    async def main() -> None:
        queue = Queue()
        actor = await actor_of(queue)
        later = [submitted(actor, "a", number) for number in (3, 1)]
        await asyncio.wait_for(asyncio.gather(*later), HANG)
        await asyncio.wait_for(actor.until_queued(order.Place("a", 3)), HANG)
        await asyncio.wait_for(submitted(actor, "a", 0), HANG)
        assert sorted(queue.seen) == [[0, 0], [1, 0], [3, 0]]

    asyncio.run(main())
    assert "calls have not come" in caplog.text


def test_those_behind_a_submission_that_is_being_queued_are_missed_only_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arrivals, "PATIENCE", 0.001)

    async def main() -> None:
        line = arrivals.Arrivals()
        with line.queueing(0):
            behind = [asyncio.ensure_future(line.until_over(number)) for number in (2, 3)]
            with line.queueing(3):
                await asyncio.sleep(0.05)
            assert not caplog.text
        with line.queueing(2):
            pass
        await asyncio.wait_for(asyncio.gather(*behind), HANG)
        assert "1 calls have not come" in caplog.text

    asyncio.run(main())


def test_a_submission_that_was_not_sent_leaves_no_gap() -> None:
    """A submission that was not sent leaves no gap: its number is given to the next one."""
    places: list[Any] = []

    def remote(place: Any, prompt: list[int], *_: object) -> str:
        if prompt == [13]:
            raise TypeError("can not be pickled")
        places.append(place)
        return "reference"

    worker = RayWorker(SimpleNamespace(run_in_turn=SimpleNamespace(remote=remote)))
    worker.submit([1])
    with pytest.raises(TypeError, match="can not be pickled"):
        worker.submit([13])
    worker.submit([2])
    assert [place.number for place in places] == [0, 1]


def test_requests_without_a_seed_draw_as_those_of_a_local_worker(cluster: None, tmp_path: Path) -> None:
    """Requests without a seed draw as those of a local worker: their random numbers follow from the order in which they
    were submitted. Commands find queued what was submitted before them.
    """
    tiny(0).save_pretrained(tmp_path)
    prompts = [[number + 1] for number in range(60)]

    def drawn(worker: RolloutWorker | RayWorker) -> list[tuple[list[int], list[float]]]:
        handles = worker.submit_all(prompts, PARAMS)
        whole = worker.generate(prompts[:2], PARAMS)
        samples = [output.samples[0] for output in [*(handle.result(HANG) for handle in handles), *whole]]
        return [(sample.token_ids, sample.logprobs) for sample in samples]

    with RolloutWorker(tmp_path, config=CONFIG) as here, RayWorker.start(tmp_path, config=CONFIG) as remote:
        for _ in range(3):
            assert drawn(remote) == drawn(here)
        long = replace(PARAMS, max_tokens=1900, ignore_eos=True)
        for _ in range(20):
            handles = remote.submit_all(prompts[:5], long)
            remote.pause("abort")
            assert {handle.result(HANG).samples[0].finish_reason for handle in handles} == {"abort"}
            remote.resume()
