"""A step computes what it should, in the right order, at the cost that it should have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samebit.rollout.engine.engine import Engine
from samebit.rollout.engine.step_plan import most_scored
from samebit.rollout.outputs import request_output
from samebit.rollout.requests.request import Request

from ..cache.cache_integrity import check_cache


def test_decodes_come_first_then_running_prefills_then_newcomers(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(make_request("a", [1] * 3, max_tokens=8))
    engine.step()
    engine.add(make_request("b", [2] * 12, max_tokens=8))
    engine.add(make_request("c", [3] * 2, max_tokens=8))
    for _ in range(3):
        engine.step()
    assert engine.runner.plans == [
        [("a", 0, 0, 3)],
        [("a", 0, 3, 1), ("b", 0, 0, 7)],
        [("a", 0, 4, 1), ("b", 0, 7, 5), ("c", 0, 0, 2)],
        [("a", 0, 5, 1), ("b", 0, 12, 1), ("c", 0, 2, 1)],
    ]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_sampled_once(
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    oracle: Callable[..., list[int]],
) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    prompt = list(range(21))
    request = make_request("a", prompt, max_tokens=1)
    engine.add(request)
    assert [engine.step() for _ in range(3)] == [[], [], [request]]
    assert [plan[0][2:] for plan in engine.runner.plans] == [(0, 8), (8, 8), (16, 5)]
    assert request.sequences[0].output_ids.tolist() == oracle(prompt, 0, 1)


def test_a_step_scores_no_more_prompt_tokens_than_it_may_and_other_prompts_pass_by(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    engine = make_engine()
    engine.scheduler.max_scored = 5
    scored = [list(range(12)), [20, 21, 22, 23]]
    for name, prompt in zip("ab", scored, strict=True):
        engine.add(make_request(name, prompt, max_tokens=1, prompt_logprobs=0))
    engine.add(make_request("c", [3] * 7, max_tokens=2))
    ended: list[Request] = []
    while engine.has_work:
        ended += engine.step()
    assert engine.runner.plans == [
        [("a", 0, 0, 5), ("b", 0, 0, 1), ("c", 0, 0, 7)],
        [("c", 0, 7, 1), ("a", 0, 5, 5)],
        [("a", 0, 10, 2), ("b", 0, 1, 3)],
    ]
    found = {request.request_id: request_output(request, None).prompt_logprobs for request in ended}
    assert [found["a"], found["b"]] == [[None, *(-float(token) for token in prompt[1:])] for prompt in scored]


def test_a_scored_prompt_that_finds_no_room_is_of_the_weights_that_its_cached_tokens_are_of(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    engine = make_engine()
    engine.scheduler.max_scored = 5
    cached = list(range(20, 32))
    engine.add(make_request("warm", cached, max_tokens=1))
    while engine.has_work:
        engine.step()
    engine.add(make_request("first", list(range(12)), max_tokens=1, prompt_logprobs=0))
    second = make_request("second", cached, max_tokens=3, prompt_logprobs=0)
    engine.add(second)
    engine.step()
    assert second.sequences[0].kv.version == 0
    engine.weights_changed(1)
    while engine.has_work:
        engine.step()
    assert second.sequences[0].context_spans == [(0, 3, 0)]


def test_a_prompt_that_is_not_scored_waits_for_none_that_is(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    engine = make_engine()
    engine.scheduler.max_scored = 1
    prompt = list(range(17))
    engine.add(make_request("scored", prompt, max_tokens=1, prompt_logprobs=0))
    engine.add(make_request("plain", prompt, max_tokens=1))
    assert "plain" in [request.request_id for _ in range(2) for request in engine.step()]


@pytest.mark.parametrize(("vocab_size", "count"), [(151_936, 220), (1 << 30, 1)])
def test_the_logits_of_the_prompt_tokens_of_a_step_have_a_limit(vocab_size: int, count: int) -> None:
    assert most_scored(vocab_size) == count


def test_the_last_admitted_is_preempted_and_goes_to_the_head_of_the_queue(
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    oracle: Callable[..., list[int]],
) -> None:
    engine = make_engine(num_blocks=6, block_size=4)
    requests = {name: make_request(name, [index] * 7, max_tokens=10) for index, name in enumerate("abc")}
    for request in requests.values():
        engine.add(request)
    finished: list[str] = []
    preempted_while_waiting: list[str] = []
    while engine.has_work:
        before = engine.scheduler.preemptions
        finished += [request.request_id for request in engine.step()]
        if engine.scheduler.preemptions > before:
            head = engine.scheduler.waiting.head(admission_open=True)
            assert head is not None
            preempted_while_waiting.append(head.shared.request_id)
    assert preempted_while_waiting
    assert preempted_while_waiting[0] == "b", "a and b run; b came last; c has not started"
    assert finished == ["a", "b", "c"]
    for index, request in enumerate(requests.values()):
        assert request.sequences[0].output_ids.tolist() == oracle([index] * 7, 0, 10)
    assert "preempted" in [event.name for event in requests["b"].shared.events]
    assert "preempted" not in [event.name for event in requests["a"].shared.events]
    check_cache(engine.cache)
    assert engine.cache.pool.num_free == 6


@pytest.mark.parametrize("waiting", [100, 20_000])
def test_a_step_looks_at_no_more_of_a_longer_queue(
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    monkeypatch: pytest.MonkeyPatch,
    waiting: int,
) -> None:
    engine = make_engine(num_blocks=128, block_size=16, max_num_seqs=80, max_num_batched_tokens=512)
    for index in range(64 + waiting):
        engine.add(make_request(str(index), [1, 2], max_tokens=30))
    while len(engine.scheduler.running) < 64:
        engine.step()
    looked_at: list[object] = []
    follow = engine.cache.follow
    monkeypatch.setattr(engine.cache, "follow", lambda sequence: looked_at.append(sequence) or follow(sequence))
    for _ in range(10):
        engine.step()
    assert len(engine.scheduler.waiting) == waiting
    assert 0 < len(looked_at) <= 10, "at most the head of the queue, once a step"


def test_aborting_waiting_and_running_requests_frees_what_they_own(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    engine = make_engine(max_num_seqs=2)
    requests = [make_request(str(index), [1, 2, 3], max_tokens=5) for index in range(4)]
    for request in requests:
        engine.add(request)
    engine.step()
    aborted = engine.abort(["0", "3", "unknown"])
    assert aborted == [requests[0], requests[3]]
    assert [request.sequences[0].ending.reason for request in aborted] == ["abort", "abort"]
    assert len(aborted[0].sequences[0].output_ids) == 1
    assert len(aborted[1].sequences[0].output_ids) == 0
    check_cache(engine.cache)
    done: list[str] = []
    while engine.has_work:
        done += [request.request_id for request in engine.step()]
    assert done == ["1", "2"]
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


@pytest.mark.parametrize(("prefix_caching", "slots"), [(False, 2), (True, 1)])
def test_closed_admission_lets_started_requests_finish_and_no_other_begin(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request], prefix_caching: bool, slots: int
) -> None:
    engine = make_engine(max_num_seqs=slots, prefix_caching=prefix_caching)
    group = make_request("group", [1, 2], n=3, max_tokens=4)
    later = make_request("later", [5], max_tokens=2)
    engine.add(group)
    engine.add(later)
    engine.step()
    engine.scheduler.admission_open = False
    engine.preempt_all()
    assert not engine.drained
    finished: list[Request] = []
    while engine.has_work:
        finished += engine.step()
    assert finished == [group], "its third sample had not begun, but the request had"
    assert engine.drained
    assert engine.step() == []
    engine.scheduler.admission_open = True
    while engine.has_work:
        finished += engine.step()
    assert finished == [group, later]
