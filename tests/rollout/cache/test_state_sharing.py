"""Sequences take checkpoints of recurrent states for each other, and go on from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samebit.rollout.engine.engine import Engine
from samebit.rollout.requests.request import Request

from .engine_runs import run

Make = Callable[..., Engine]
MakeRequest = Callable[..., Request]
Oracle = Callable[..., list[int]]
STEM = list(range(40))


@pytest.fixture
def make(make_engine: Make) -> Make:
    def build(**options: int) -> Engine:
        return make_engine(recurrent=True, **{"num_checkpoints": 32, **options})

    return build


def first_starts(engine: Engine) -> dict[str, int]:
    """Return where each request's first chunk began."""
    return {name: start for plan in reversed(engine.runner.plans) for name, _, start, _ in plan}


def own_ends(count: int, shared: int, make_request: MakeRequest) -> list[Request]:
    return [make_request(str(i), [*STEM[:shared], 60 + i, 70], max_tokens=2) for i in range(count)]


@pytest.mark.parametrize("budget", [8, 32])
def test_of_several_whose_prefix_has_no_state_one_computes_it(
    make: Make, make_request: MakeRequest, oracle: Oracle, budget: int
) -> None:
    """One of several requests whose prefix is cached without a state computes it again; the others wait for it."""
    engine = make(max_num_batched_tokens=budget)
    run(engine, make_request("cold", STEM, max_tokens=1))
    before = engine.counters.prefill_tokens_computed
    requests = own_ends(6, 24, make_request)
    run(engine, *requests)
    assert engine.counters.prefill_tokens_computed - before == 24 + 6 * 2
    assert engine.cache.checkpoints.counters.replayed_tokens == 24
    for request in requests:
        assert request.sequences[0].output_ids.tolist() == oracle(request.prompt.tolist(), 0, 2)


def test_one_that_shares_less_of_what_is_computed_again_waits_for_less(make: Make, make_request: MakeRequest) -> None:
    engine = make(max_num_batched_tokens=8)
    run(engine, make_request("cold", STEM, max_tokens=1))
    run(engine, *(make_request(str(shared), [*STEM[:shared], 90], max_tokens=1) for shared in (24, 16, 9)))
    assert {name: first_starts(engine)[name] for name in ("24", "16", "9")} == {"24": 0, "16": 16, "9": 8}


@pytest.mark.parametrize("abort", [True, False])
def test_who_waits_for_a_state_is_handed_over(
    make: Make, make_request: MakeRequest, oracle: Oracle, abort: bool
) -> None:
    """Who waits for a state stands in the queue again when the one that computes it is aborted, or weights change."""
    engine = make(max_num_batched_tokens=8)
    run(engine, make_request("cold", STEM, max_tokens=1))
    requests = own_ends(3, 24, make_request)
    for request in requests:
        engine.add(request)
    engine.step()
    leader, follower = requests[0].sequences[0], requests[1].sequences[0]
    assert engine.cache.find_awaited(follower) == 6, "as when it is looked at in this step"
    engine.scheduler.waiting.discard(follower)
    assert engine.cache.follow(follower)
    assert engine.cache.entries[leader].checkpoints_due >= {24}
    if abort:
        engine.abort(["0"])
    else:
        engine.weights_changed(1)
    assert follower in engine.scheduler.waiting
    run(engine)
    for request in requests[abort:]:
        assert request.sequences[0].output_ids.tolist() == oracle(request.prompt.tolist(), 0, 2)


def test_a_failed_pass_leaves_no_state(make: Make, make_request: MakeRequest) -> None:
    """A pass that fails leaves no state, though it computes again what others have published."""
    engine = make()
    run(engine, make_request("cold", STEM, max_tokens=1))
    kept = len(engine.cache.checkpoints)
    engine.runner.nan_ids = {"bad"}
    run(engine, make_request("bad", [*STEM[:24], 90], max_tokens=3))
    assert len(engine.cache.checkpoints) == kept


def test_a_state_is_kept_where_one_that_waits_leaves_what_is_decoded(
    make: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make(max_num_seqs=1)
    engine.add(make_request("a", STEM[:6], max_tokens=14))
    engine.step()
    known = [*STEM[:6], *oracle(STEM[:6], 0, 6)]
    turn = make_request("turn", [*known, 90, 91], max_tokens=1)
    run(engine, turn)
    assert turn.sequences[0].kv.num_cached_tokens == len(known) == 12


def test_a_state_is_kept_where_a_preempted_one_leaves(make: Make, make_request: MakeRequest) -> None:
    engine = make(max_num_batched_tokens=8)
    requests = [make_request("a", STEM, max_tokens=3), make_request("b", [*STEM[:10], 90, 91], max_tokens=3)]
    for request in requests:
        engine.add(request)
    while len(engine.scheduler.running) < 2:
        engine.step()
    engine.preempt_all()
    engine.weights_changed(1)
    before = len(engine.runner.plans)
    run(engine)
    starts = {name: start for plan in reversed(engine.runner.plans[before:]) for name, _, start, _ in plan}
    assert starts == {"a": 0, "b": 8}
    assert engine.cache.checkpoints.counters.replayed_tokens == 0


def test_a_preempted_prompt_goes_on_at_the_block_below(make: Make, make_request: MakeRequest) -> None:
    engine = make(max_num_batched_tokens=8)
    engine.add(make_request("a", STEM[:30], max_tokens=3))
    for _ in range(2):
        engine.step()
    engine.preempt_all()
    engine.step()
    assert engine.runner.plans[-1] == [("a", 0, 16, 8)]
    run(engine)


@pytest.mark.parametrize(
    ("length", "checkpoints", "missed"), [(4, 32, 1), (8, 32, 0), (12, 32, 0), (5, 32, 0), (4, 0, 1)]
)
def test_a_hit_that_resumes_at_the_first_token_is_a_counted_miss(
    make: Make, make_request: MakeRequest, length: int, checkpoints: int, missed: int
) -> None:
    """A hit that resumes at the first token is a counted miss: the state behind the last token of a prompt is no use,
    and a prompt of one block has no other.
    """
    engine = make(num_checkpoints=checkpoints)
    for name in ("cold", "warm"):
        request = make_request(name, STEM[:length], max_tokens=1)
        run(engine, request)
    assert request.sequences[0].kv.num_cached_tokens == (0 if missed else (length - 1) // 4 * 4)
    counters = engine.cache.checkpoints.counters
    assert (counters.misses_no_checkpoint, counters.misses_evicted, counters.misses_diverged) == (missed, 0, 0)


@pytest.mark.parametrize(
    ("length", "num_states", "again"),
    [(18, 3, {"prompt_logprobs": 0}), (16, 6, {})],
    ids=["scored", "of whole blocks"],
)
def test_a_state_that_is_there_is_not_taken_again(
    make: Make, make_request: MakeRequest, oracle: Oracle, length: int, num_states: int, again: dict[str, int]
) -> None:
    """A state that is there is not taken again. There are three prompts of two blocks and a budget for their states:
    when one is computed again to be scored, or comes again as whole blocks whose last token has to be computed, the
    states of the two others stay.
    """
    engine = make(num_checkpoints=num_states, block_size=8, max_num_batched_tokens=64)
    first, second, third = ([number, *STEM[: length - 1]] for number in (50, 60, 70))
    for name, prompt in (("a", first), ("b", second), ("c", third)):
        run(engine, make_request(name, prompt, max_tokens=1))
    pool = engine.cache.checkpoints
    kept = set(pool.by_block)
    assert len(kept) == num_states
    run(engine, make_request("again", third, max_tokens=1, **again))
    assert set(pool.by_block) == kept
    for name, prompt in (("a again", first), ("b again", second)):
        request = make_request(name, [*prompt, 90], max_tokens=2)
        run(engine, request)
        assert request.sequences[0].kv.num_cached_tokens == 16
        assert request.sequences[0].output_ids.tolist() == oracle([*prompt, 90], 0, 2)
    assert pool.counters.misses_evicted == 0
