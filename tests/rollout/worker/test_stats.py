"""A worker tells of itself in the numbers of `stats()` and the line in the log."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from samebit.rollout.engine.engine import Engine
from samebit.rollout.requests.request import Request, Sequence
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.stats import worker_stats

PROMPT = list(range(40))


def test_a_line_is_logged_with_all_of_it(
    make_worker: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line of the log has all of it: what the interval brought, what there is now, and computed and skipped tokens
    since the beginning.
    """
    monkeypatch.setattr("samebit.rollout.stats.LOG_SECONDS", 1e-6)
    worker, _ = make_worker(recurrent=True, num_checkpoints=9, max_num_batched_tokens=64)
    with caplog.at_level("INFO", "samebit.rollout.stats"):
        for _ in range(2):
            worker.generate([PROMPT], SamplingParams(max_tokens=1))
        worker.close()  # and with it the thread that logs
    first, second = (record.message for record in caplog.records)
    for part in (
        "0 running, 0 waiting; ",
        "prompt tokens computed 40, skipped 0 (in all 40, 0); ",
        "prefix hits 0 of 1, lost to eviction 0, waits behind a leader 0; ",
        "blocks free 64 of 64, cached 10, evictable 10; evictions 0, preemptions 0; ",
        "states 2 of 9, restores 0, forks 0, holds 0, tokens replayed 0, missed: evicted 0, diverged 0, none 0",
    ):
        assert part in first
    assert re.search(r"tokens/s out; first tokens after \d+ ms; ", first)
    assert "prompt tokens computed 4, skipped 36 (in all 44, 36); prefix hits 1 of 1" in second
    assert "restores 1" in second


def test_steps_without_work_leave_the_cache_alone(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    engine = make_engine(recurrent=True, num_checkpoints=9)
    for name, prompt in (("a", PROMPT), ("b", PROMPT[20:])):
        engine.add(make_request(name, prompt, max_tokens=1))
    while engine.has_work:
        engine.step()

    def content() -> tuple[list[bytes], list[int], list[tuple[int, int]]]:
        cache = engine.cache
        return (
            [entry.digest for entry in cache.index.by_block.values()],
            list(cache.pool._kept),
            list(cache.checkpoints.by_block.items()),
        )

    before, numbers = content(), worker_stats(engine)
    assert all(before)
    for _ in range(3):
        assert engine.step() == []
    assert (content(), worker_stats(engine)) == (before, numbers)


def test_fewer_than_none_never_wait(make_engine: Callable[..., Engine], make_request: Callable[..., Request]) -> None:
    """Never fewer than none wait, not even while those that ended are taken out of those that run, when another thread
    may ask.
    """
    engine = make_engine()
    counts: list[float] = []

    class Running(list[Sequence]):
        def __iter__(self) -> Iterator[Sequence]:
            counts.append(worker_stats(engine)["waiting"])
            yield from super().__iter__()
            counts.append(worker_stats(engine)["waiting"])

    for name, prompt in (("a", PROMPT[:4]), ("b", PROMPT[4:8])):
        engine.add(make_request(name, prompt, max_tokens=2))
    engine.step()
    engine.scheduler.running = Running(engine.scheduler.running)
    engine.step()
    assert not engine.has_work
    assert counts
    assert min(counts) == 0
    assert worker_stats(engine)["waiting"] == 0
