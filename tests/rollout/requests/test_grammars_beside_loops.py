"""Grammars are compiled beside event loops, and only a few are kept, however long they are."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from samebit.rollout import RequestError, RolloutConfig, RolloutWorker, SamplingParams, StructuredOutputsParams
from samebit.rollout.async_worker import AsyncWorker
from samebit.rollout.fleet.replica import ReplicaSide
from samebit.rollout.structured_outputs import grammars
from samebit.weight_sync.transports.addresses import Sources

from ...patience import HANG
from ..held_steps import held_steps
from ..http.served import byte_tokenizer
from ..noted_compiling import note_compiling
from ..tiny_llama import smallest

TOKENIZER = byte_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
PROMPT = [1, 2, 3]
Call = Callable[[RolloutWorker, SamplingParams], Coroutine[Any, Any, None]]
_fresh = count()


@pytest.fixture(scope="module")
def worker() -> Iterator[RolloutWorker]:
    policy = smallest(3, vocab_size=len(TOKENIZER), max_position_embeddings=512, eos_token_id=END)
    with RolloutWorker(policy, tokenizer=TOKENIZER, config=RolloutConfig(num_blocks=64, block_size=16)) as one:
        yield one


def constrained(regex: str) -> SamplingParams:
    return SamplingParams(max_tokens=20, seed=1, structured_outputs=StructuredOutputsParams(regex=regex))


def fresh() -> SamplingParams:
    """Return parameters whose grammar no test has asked for."""
    return constrained(f"[ab]{{3}}{next(_fresh)}")


async def run(worker: RolloutWorker, params: SamplingParams) -> None:
    await AsyncWorker(Sources(), worker).run(PROMPT, params, "one")


async def generate(worker: RolloutWorker, params: SamplingParams) -> None:
    await AsyncWorker(Sources(), worker).generate([PROMPT, PROMPT], [SamplingParams(max_tokens=1), params])


async def run_followed(worker: RolloutWorker, params: SamplingParams) -> None:
    side = ReplicaSide(Sources(), worker)
    await side.begin(0)
    await side.run_followed(PROMPT, params, "one", 1, 1)


@pytest.mark.parametrize("call", [run, generate, run_followed])
def test_a_grammar_is_compiled_beside_the_event_loop(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """A grammar is compiled in no event loop, whose other calls would stand still meanwhile."""
    in_loops = note_compiling(monkeypatch)
    asyncio.run(call(worker, fresh()))
    assert in_loops == [False]


@pytest.mark.parametrize("asked_before", [(), (0,), (0, 4)])
def test_each_grammar_of_a_call_is_compiled_once_though_they_are_more_than_are_kept(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch, asked_before: tuple[int, ...]
) -> None:
    """Grammars of a call are compiled beside the event loop, however many; one that was there may make room before."""
    monkeypatch.setattr(grammars, "MOST_KEPT", 2)
    each = [fresh() for _ in range(5)]
    for place in asked_before:
        worker.generate([PROMPT], each[place])
    in_loops = note_compiling(monkeypatch)
    asyncio.run(generate_each(worker, each))
    assert in_loops[: 5 - len(asked_before)] == [False] * (5 - len(asked_before))
    assert len(in_loops) <= 5
    assert not any(in_loops)


async def generate_each(worker: RolloutWorker, each: list[SamplingParams]) -> None:
    outputs = await AsyncWorker(Sources(), worker).generate([PROMPT] * len(each), each)
    for out, params in zip(outputs, each, strict=True):
        asked = params.structured_outputs
        assert asked is not None
        assert re.fullmatch(str(asked.regex), TOKENIZER.decode(out.samples[0].token_ids[:-1]))


def test_the_grammar_of_a_request_that_runs_is_not_compiled_again(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MOST_KEPT", 1)
    first, second = fresh(), fresh()
    with held_steps(worker):
        running = worker.submit(PROMPT, first)
        other = worker.submit(PROMPT, second)
        assert worker.preparation(first) is None
    assert running.result(HANG)
    assert other.result(HANG)


def test_what_is_compiled_waits_for_no_other(worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose grammar is there is queued while another one's is compiled; equal ones are compiled once."""
    known, slow = fresh(), fresh()
    worker.generate([PROMPT], known)
    compiled, begun, go_on, times = grammars._compiled, threading.Event(), threading.Event(), []

    def held(*given: Any) -> Any:
        times.append(given)
        begun.set()
        assert go_on.wait(HANG)
        return compiled(*given)

    monkeypatch.setattr(grammars, "_compiled", held)
    with ThreadPoolExecutor() as pool:
        try:
            waiting = [pool.submit(worker.generate, [PROMPT], slow) for _ in range(2)]
            assert begun.wait(HANG)
            assert pool.submit(worker.generate, [PROMPT], known).result(HANG)
            assert not any(one.done() for one in waiting)
        finally:
            go_on.set()
        assert all(one.result() for one in waiting)
    assert len(times) == 1


def test_who_gives_up_waiting_leaves_the_turn_to_what_runs(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled goes on alone when its caller has given up, and is there then; one that waited does nothing."""
    compiled, begun, go_on, texts = grammars._compiled, threading.Event(), threading.Event(), []

    def held(*given: Any) -> Any:
        texts.append(given[-1])
        begun.set()
        assert go_on.wait(HANG)
        return compiled(*given)

    monkeypatch.setattr(grammars, "_compiled", held)
    first, second, third = fresh(), fresh(), fresh()

    async def check() -> None:
        inside = AsyncWorker(Sources(), worker)
        one, two = (asyncio.create_task(inside.prepare(params)) for params in (first, second))
        await asyncio.to_thread(begun.wait, HANG)
        for task in (one, two):
            task.cancel()
        await asyncio.wait((one, two))
        assert one.cancelled()
        assert two.cancelled()
        threads = threading.active_count()
        last = asyncio.create_task(inside.prepare(third))
        await asyncio.sleep(0)
        assert threading.active_count() == threads  # a client that comes and goes leaves no thread behind each time
        go_on.set()
        await last

    try:
        asyncio.run(check())
    finally:
        go_on.set()
    assert len(texts) == 2
    assert worker.preparation(first) is None
    assert worker.preparation(second) is not None


def test_what_is_kept_is_bounded_by_its_length(worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go of grammars that are longer together than what is kept; the last stays, whatever its length."""
    monkeypatch.setattr(grammars, "MOST_CHARACTERS", 100)
    first, second, third = (constrained(letter * 40) for letter in "xyz")
    for params in (first, second, third):
        assert worker.preparation(params) is not None
        worker.generate([PROMPT], params)
        assert worker.preparation(params) is None
    assert worker.preparation(first) is not None
    assert worker.preparation(second) is None
    longest = constrained("w" * 200)
    worker.generate([PROMPT], longest)
    assert worker.preparation(longest) is None
    assert worker.preparation(third) is not None
    assert worker.preparation(SamplingParams()) is None


def test_a_stop_token_that_no_tokenizer_has_is_refused_by_the_limits_of_the_model(worker: RolloutWorker) -> None:
    """What checks a request says so, also where its grammar is compiled before."""
    params = replace(fresh(), stop_token_ids=[1 << 40])
    with pytest.raises(RequestError, match=r"stop_token_ids.*1099511627776"):
        asyncio.run(run(worker, params))


def test_a_reason_of_the_library_is_quoted_in_part(worker: RolloutWorker) -> None:
    """A reason that quotes a long text, as that of brackets without an end, does not fill the error."""
    with pytest.raises(RequestError, match="can not be compiled: ") as refused:
        worker.submit(PROMPT, constrained("(" * 100_000))
    assert len(str(refused.value)) < 2000
