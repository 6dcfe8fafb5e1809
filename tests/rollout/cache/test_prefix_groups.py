"""One of the requests that begin alike computes, and the others wait: leaders, followers, groups of samples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from samebit.rollout.cache import PrefixCache
from samebit.rollout.cache.cache_entry import HeldPrompt
from samebit.rollout.cache.checkpoints.pool import CheckpointPool
from samebit.rollout.engine.engine import Engine
from samebit.rollout.errors import NonFiniteLogitsError
from samebit.rollout.requests.request import Request
from samebit.rollout.sampling_params import SamplingParams

from ...campaign import in_pairs
from ...patience import HANG, wait_until
from ..inside import num_waiting
from ..step_gate import StepGate
from .cache_integrity import check_cache, owned_blocks

Make = Callable[..., Engine]
MakeRequest = Callable[..., Request]
MakeWorker = Callable[..., tuple[Any, Any]]
Oracle = Callable[..., list[int]]
PREFIX = list(range(12))


def finish(engine: Engine) -> list[Request]:
    """Step until nothing is left to do."""
    done: list[Request] = []
    for _ in range(500):
        check_cache(engine.cache)
        if not engine.has_work:
            break
        done += engine.step()
    assert engine.scheduler.num_unfinished == 0, "somebody waits for ever"
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks
    return done


def outputs(request: Request) -> list[list[int]]:
    return [sequence.output_ids.tolist() for sequence in request.sequences]


def assert_right(oracle: Oracle, *requests: Request) -> None:
    for request in requests:
        alone = [
            oracle(request.prompt.tolist(), s.sample_index, request.shared.max_new_tokens) for s in request.sequences
        ]
        assert outputs(request) == alone


# -- leaders and followers -------------------------------------------------------------------------


def test_of_two_in_one_step_the_first_computes_what_they_share(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make_engine()
    a, b, other = (make_request(name, prompt, max_tokens=3) for name, prompt in _three())
    for request in (a, b, other):
        engine.add(request)
    engine.step()
    assert engine.runner.plans[0] == [("a", 0, 0, 14), ("other", 0, 0, 5)], "who does not conflict passes"
    follower = b.sequences[0]
    assert (follower.slot, follower.num_computed) == (-1, 0)
    assert engine.cache.pool.num_blocks - engine.cache.pool.num_free == 6, "a follower holds nothing"
    engine.step()
    assert ("b", 0, 12, 1) in engine.runner.plans[1]
    finish(engine)
    assert_right(oracle, a, b, other)
    assert (follower.kv.num_cached_tokens, engine.cache.counters.leader_waits) == (12, 1)


def _three() -> list[tuple[str, list[int]]]:
    return [("a", [*PREFIX, 20, 21]), ("b", [*PREFIX, 30]), ("other", [50, 51, 52, 53, 54])]


def test_a_follower_waits_for_the_block_and_not_for_the_request(make_engine: Make, make_request: MakeRequest) -> None:
    """A follower, which may come later, waits for the last shared block and not for the request that computes it in
    chunks.
    """
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(make_request("a", [*PREFIX, *range(60, 92)], max_tokens=9))
    engine.step()
    engine.add(make_request("b", [*PREFIX, 30], max_tokens=1))
    engine.step()
    assert [item[0] for item in engine.runner.plans[1]] == ["a"]
    assert engine.scheduler.running[0].num_computed == 16
    engine.add(make_request("c", [*PREFIX, 31], max_tokens=1))
    for _ in range(8):
        engine.step()
    first = {name: start for plan in reversed(engine.runner.plans) for name, _, start, _ in plan}
    assert (first["b"], first["c"]) == (12, 12)
    finish(engine)


def test_a_sequence_that_saves_nothing_does_not_wait(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine(block_size=4)
    engine.add(make_request("a", [1, 2, 3], max_tokens=2))
    engine.add(make_request("b", [1, 2, 3], max_tokens=2))
    engine.add(make_request("c", [7], max_tokens=2))
    engine.add(make_request("d", [7], max_tokens=2))
    engine.step()
    assert [item[0] for item in engine.runner.plans[0]] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("chunks", [1, 2])
def test_an_aborted_leader_hands_over(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle, chunks: int
) -> None:
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=4)
    names = ["a", "b", "c"]
    requests = {name: make_request(name, [*PREFIX, *PREFIX, 40 + i], max_tokens=2) for i, name in enumerate(names)}
    for request in requests.values():
        engine.add(request)
    for _ in range(chunks):
        engine.step()
    engine.abort(["a"])
    check_cache(engine.cache)
    engine.step()
    assert engine.runner.plans[-1][0][:3] == ("b", 0, 8 * chunks), "it goes on behind what the leader had published"
    assert [item[0] for item in engine.runner.plans[-1]] == ["b"], "c follows b now"
    finish(engine)
    assert_right(oracle, requests["b"], requests["c"])


def test_nobody_waits_for_a_prompt_that_is_scored_and_that_memory_may_take(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    """Nobody waits for a scored prompt, which may lose its memory: `early`, which waits for some, does not follow
    `late`.
    """
    engine = make_engine(num_blocks=37, block_size=2, max_num_batched_tokens=8)
    stem = [*PREFIX, *range(60, 76)]
    others = [make_request("ends soon", [95] * 12, max_tokens=11)]
    others += [make_request(f"other{i}", [90 + i] * 3, max_tokens=30) for i in range(2)]
    first = make_request("first", [*PREFIX, 20], max_tokens=1)
    early = make_request("early", [*stem, 30], max_tokens=2)
    late = make_request("late", [*stem, 31], max_tokens=2, prompt_logprobs=0)
    for request in others:
        engine.add(request)
    while not all(request.progress.answered for request in others):
        engine.step()
    for request in (first, early):
        engine.add(request)
    engine.step()
    engine.add(late)
    (scored,), (waiting,) = late.sequences, early.sequences
    while scored.num_computed < 22:
        engine.step()
        assert engine.cache.find_awaited(waiting) in (None, len(PREFIX) // 2), "of `first`, not of `late`"
    finish(engine)
    assert_right(oracle, *others, first, early, late)
    assert late.sequences[0].prompt_scores.logprobs[1:].tolist() == [-float(token) for token in late.prompt[1:]]


def test_a_leader_and_its_follower_that_are_preempted_begin_again(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    a, b = (make_request(name, [*PREFIX, *PREFIX, last], max_tokens=2) for name, last in (("a", 1), ("b", 2)))
    engine.add(a)
    engine.add(b)
    engine.step()
    engine.preempt_all()
    assert not engine.scheduler.running
    assert all(request.sequences[0] in engine.scheduler.waiting for request in (a, b))
    finish(engine)
    assert_right(oracle, a, b)


def test_a_follower_can_be_aborted(make_engine: Make, make_request: MakeRequest, oracle: Oracle) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    a, b = (make_request(name, [*PREFIX, last], max_tokens=2, n=2) for name, last in (("a", 1), ("b", 2)))
    engine.add(a)
    engine.add(b)
    engine.step()
    assert engine.abort(["b"]) == [b]
    check_cache(engine.cache)
    assert finish(engine) == [a]
    assert_right(oracle, a)


@pytest.mark.parametrize("recompute", [True, False])
def test_followers_go_on_when_weights_change_under_their_leader(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle, recompute: bool
) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    a, b = (make_request(name, [*PREFIX, last], max_tokens=2, n=2) for name, last in (("a", 1), ("b", 2)))
    engine.add(a)
    engine.add(b)
    engine.step()
    if recompute:
        engine.preempt_all()
    engine.weights_changed(1)
    finish(engine)
    assert_right(oracle, a, b)
    assert [len(s.kv_spans) for s in a.sequences] == ([1, 1] if recompute else [2, 1])
    assert [s.kv_spans for s in b.sequences] == [[(0, 14, 1)]] * 2


def test_closed_admission_keeps_unstarted_followers_and_drains(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    a, b = (make_request(name, [*PREFIX, last], max_tokens=2, n=3) for name, last in (("a", 1), ("b", 2)))
    engine.add(a)
    engine.add(b)
    engine.step()
    engine.scheduler.open_admission(False)
    engine.preempt_all()
    done: list[Request] = []
    while engine.has_work:
        done += engine.step()
    assert done == [a]
    assert engine.drained
    engine.scheduler.admission_open = True
    finish(engine)
    assert_right(oracle, a, b)


def test_an_update_that_waits_is_not_held_up_by_followers(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker(max_num_batched_tokens=8, max_num_seqs=2)
    runner.gate = StepGate(1)
    handles = [worker.submit([*PREFIX, last], SamplingParams(max_tokens=3, n=3)) for last in (1, 2)]
    runner.entered.wait(HANG)
    runner.gate.release(1000)
    worker.receive_weights(dict(worker.module.state_dict()), in_flight="wait")
    for last, handle in zip((1, 2), handles, strict=True):
        got = [sample.token_ids for sample in handle.result(timeout=HANG).samples]
        assert got == [oracle([*PREFIX, last], index, 3) for index in range(3)]


# -- groups of samples -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "ref_zero"])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11, 12])
def test_a_group_computes_its_prompt_once(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle, length: int, max_num_seqs: int, policy: str
) -> None:
    """A group computes its prompt once: the partly filled block is copied, the logits are used for all; also when the
    samples do not fit at once.
    """
    engine = make_engine(max_num_seqs=max_num_seqs, eviction_policy=policy)
    group = make_request("a", PREFIX[:length], n=5, max_tokens=7)
    engine.add(group)
    rows = []
    while engine.has_work:
        engine.step()
        rows.append(len(engine.runner.plans[-1]))
        check_cache(engine.cache)
    assert engine.counters.prefill_tokens_computed == length
    assert engine.counters.decode_tokens_computed == 5 * 6
    assert rows[0] == 1, "one row of prompt logits"
    assert [sequence.kv.num_cached_tokens for sequence in group.sequences] == [0] + [length] * 4
    assert_right(oracle, group)
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


def test_a_group_computes_its_prompt_once_under_chunks_and_beside_others(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=3)
    groups = [make_request(str(i), [*PREFIX, *PREFIX[:i]], n=4, max_tokens=5) for i in range(4)]
    for group in groups:
        engine.add(group)
    finish(engine)
    assert_right(oracle, *groups)
    assert engine.counters.prefill_tokens_computed == 12 + 0 + 1 + 2 + 3, "each token once, over all groups"


@pytest.mark.parametrize("length", [5, 6, 7])
def test_a_leader_that_comes_back_holds_its_prompt_at_once(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle, length: int
) -> None:
    """A leader that comes back holds its prompt at once: all of it but its last token is cached, so its first step is a
    decode, and it ends before it fills a block.
    """
    engine = make_engine(max_num_seqs=1)
    group = make_request("a", PREFIX[:length], n=3, max_tokens=11 - length)
    engine.add(group)
    while group.sequences[0].num_tokens < 9:
        engine.step()
    engine.preempt_all()
    finish(engine)
    assert_right(oracle, group)
    assert prompt_tokens_computed(engine, group) == length, "once, by the leader before it was preempted"


def test_a_held_prompt_goes_before_a_running_request_does(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make_engine(num_blocks=5, max_num_seqs=2)
    long = make_request("long", [90] * 5, max_tokens=12)
    group = make_request("group", PREFIX[:6], n=2, max_tokens=2)
    engine.add(long)
    engine.add(group)
    finish(engine)
    assert_right(oracle, long, group)
    assert engine.scheduler.preemptions == 0
    assert group.sequences[1].kv.num_cached_tokens == 4, (
        "its full block is still there, the partly filled one was given up"
    )
    assert prompt_tokens_computed(engine, long, group) == 5 + 6 + 2, "what the partly filled one held, once"


def prompt_tokens_computed(engine: Engine, *requests: Request) -> int:
    """Return the count of prompt tokens that were computed: all that were, less one for each sampled token but the
    first.
    """
    computed = engine.counters.prefill_tokens_computed + engine.counters.decode_tokens_computed
    return computed - sum(len(tokens) - 1 for request in requests for tokens in outputs(request))


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(("max_num_seqs", "spare"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2), (4, 0), (8, 0)])
def test_a_group_in_tight_memory_computes_its_prompt_once(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle, max_num_seqs: int, spare: int, recurrent: bool
) -> None:
    """A group in tight memory computes its prompt once: the pool holds the samples that run, and no block for the end
    of the prompt beside theirs.
    """
    options = {"recurrent": True, "num_checkpoints": 32, "num_held": 1} if recurrent else {}
    engine = make_engine(
        num_blocks=3 + 4 * max_num_seqs + spare,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=128,
        max_model_len=128,
        **options,
    )
    group = make_request("group", list(range(63)), n=8, max_tokens=48)
    engine.add(group)
    finish(engine)
    assert_right(oracle, group)
    assert engine.scheduler.preemptions == 0
    assert prompt_tokens_computed(engine, group) == 63


@pytest.mark.soak
@pytest.mark.parametrize(
    ("max_num_seqs", "num_blocks", "recurrent"),
    in_pairs([2, 3, 4, 8], [7, 8, 9, 10, 11, 12, 14, 16, 18], [False, True]),
)
def test_what_a_group_computes_again_was_lost_by_those_preempted(
    make_engine: Make,
    make_request: MakeRequest,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    max_num_seqs: int,
    num_blocks: int,
    recurrent: bool,
) -> None:
    """A group computes again only what those preempted have lost behind the full blocks of the prompt, and 15 tokens
    whenever nobody has had its end.
    """
    options = {"recurrent": True, "num_checkpoints": 32, "num_held": 2} if recurrent else {}
    engine = make_engine(
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=128,
        max_model_len=128,
        **options,
    )
    lost: list[int] = []
    give_up, take_back = engine.cache.held._end, engine.cache.take_back

    def count_end(prompt: HeldPrompt) -> None:
        lost.extend([15] if prompt.num_unstarted else [])
        give_up(prompt)

    def count_victim(victim: Any, *, waits_again: bool = False) -> list[Any]:
        lost.extend([victim.num_tokens - 48] if waits_again else [])
        return take_back(victim, waits_again=waits_again)

    monkeypatch.setattr(engine.cache.held, "_end", count_end)
    monkeypatch.setattr(engine.cache, "take_back", count_victim)
    group = make_request("group", list(range(63)), n=8, max_tokens=48)
    engine.add(group)
    finish(engine)
    assert_right(oracle, group)
    assert 63 <= prompt_tokens_computed(engine, group) <= 63 + sum(lost)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
@pytest.mark.parametrize("leader_ends", [False, True])
def test_a_prompt_that_was_given_up_is_computed_again_by_one_sample(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle, leader_ends: bool, max_num_seqs: int, recurrent: bool
) -> None:
    """A prompt that was given up is computed again by one sample, which holds the end again: those that could begin
    with it wait for that, the others find it.
    """
    options = {"recurrent": True, "num_checkpoints": 8, "num_held": 1} if recurrent else {}
    engine = make_engine(max_num_seqs=max_num_seqs, **options)
    ends = tuple(oracle(PREFIX[:7], 0, 1)) if leader_ends else ()
    group = make_request("group", PREFIX[:7], n=6, max_tokens=5, eos=ends)
    engine.add(group)
    engine.step()
    engine.preempt_all()
    starts = len(engine.runner.plans)
    finish(engine)
    assert prompt_tokens_computed(engine, group) == 7 + 3
    assert len(engine.runner.plans[starts]) == 1, "the others wait for it"
    assert sum(start < 7 for plan in engine.runner.plans[starts:] for _, _, start, _ in plan) == 1


def test_a_prefill_waits_while_one_that_ended_at_its_prompt_goes_on(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    """A prefill waits while one that ended at its prompt goes on: to hold a state again, a chunk ends at the end of the
    prompt, so that two prefills are unfinished after that step.
    """
    engine = make_engine(recurrent=True, num_held=1, max_num_seqs=2, max_num_batched_tokens=8, num_blocks=30)
    group = make_request("group", list(range(6)), n=3, max_tokens=20)
    engine.add(group)
    while group.sequences[0].num_tokens < 18:
        engine.step()
    engine.preempt_all()
    other = make_request("other", [9] * 20, max_tokens=3)
    engine.add(other)
    finish(engine)
    assert_right(oracle, group, other)


def test_one_of_several_held_prompts_is_given_up(make_request: MakeRequest) -> None:
    """The one of several held prompts whose samples wait longest is given up, and only until there is room."""
    cache = PrefixCache(7, 4, 4, 32)
    groups = [_tracked(cache, make_request(name, [start] * 6, n=2)) for name, start in (("a", 1), ("b", 2))]
    other = make_request("other", [50] * 4)
    (running,) = _tracked(cache, other)
    for leader, waiting in groups:
        assert cache.admit(leader)
        leader.mark_computed(0, 6, 0)
        cache.publish_blocks(leader)
        waiting.append(7, 0.0, 0.0)
        cache.hold_prompt(leader, [waiting])
    assert cache.admit(running)
    running.mark_computed(0, 4, 0)
    assert not cache.held.free_one(), "what runs shares all of its blocks with what is held"
    for leader, _ in groups:
        cache.take_back(leader)
    assert cache.reserve(running, 8)
    assert not cache.reserve(running, 12)
    assert cache.held.free_one()
    assert cache.reserve(running, 12)
    assert [prompt.leader.shared.request_id for prompt in cache.held._held] == ["a"]
    check_cache(cache)


def test_what_is_held_moves_into_the_block_of_a_sample_that_runs(make_request: MakeRequest) -> None:
    cache = PrefixCache(8, 4, 4, 32)
    leader, second, third = _tracked(cache, make_request("group", PREFIX[:6], n=3))
    assert cache.admit(leader)
    leader.mark_computed(0, 6, 0)
    cache.publish_blocks(leader)
    for sample in (second, third):
        sample.append(6, 0.0, 0.0)
    cache.hold_prompt(leader, [second, third])
    assert cache.admit(second)
    cache.take_back(leader)
    free = cache.pool.num_free
    assert cache.held.free_one()
    assert cache.pool.num_free == free + 1
    assert not cache.held.free_one(), "nothing is owned by the held prompt alone"
    check_cache(cache)
    cache.take_copies()
    assert cache.admit(third)
    assert third.num_computed == 6
    own = [owned_blocks(cache, sample)[1] for sample in (second, third)]
    assert cache.take_copies() == [tuple(own)]
    check_cache(cache)


def test_a_held_prompt_that_leaves_no_room_for_its_own_samples_is_given_up(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make_engine(num_blocks=2, max_num_seqs=1)
    group = make_request("group", PREFIX[:6], n=3, max_tokens=3)
    engine.add(group)
    finish(engine)
    assert_right(oracle, group)


def test_others_do_not_take_the_memory_of_a_prompt_whose_samples_wait(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    """Others do not take the memory of a prompt whose samples wait: the block that the first sample has filled is never
    left without those before it.
    """
    engine = make_engine(num_blocks=9, max_num_seqs=2)
    long = make_request("long", [90] * 5, max_tokens=27)
    group = make_request("group", PREFIX[:6], n=3, max_tokens=6)
    engine.add(long)
    engine.add(group)
    finish(engine)
    assert_right(oracle, long, group)


@pytest.mark.parametrize("policy", ["lru", "ref_zero"])
def test_a_match_made_before_an_eviction_is_not_used_after_it(make_request: MakeRequest, policy: str) -> None:
    """A match that was made before an eviction is not used after it: while a prompt's last block is held, filled and
    published, those before it stay.
    """
    cache = PrefixCache(6, 4, 4, 32, eviction_policy=policy)
    first, second = _tracked(cache, make_request("group", PREFIX[:6], n=2, max_tokens=4))
    (waiting,) = _tracked(cache, make_request("waiting", [*PREFIX[:8], 90], max_tokens=1))
    (other,) = _tracked(cache, make_request("other", [50] * 20, max_tokens=1))
    assert cache.admit(first)
    first.mark_computed(0, 6, 0)
    cache.publish_blocks(first)
    for token in (6, 7):
        first.append(token, 0.0, 0.0)
    second.append(6, 0.0, 0.0)
    cache.hold_prompt(first, [second])
    assert cache.reserve(first, 2)
    first.mark_computed(6, 2, 0)
    cache.publish_blocks(first)
    assert not cache.admit(waiting, headroom=100)
    blocks = owned_blocks(cache, first)
    cache.take_back(first)
    assert not cache.admit(other), "two of six blocks are held for the second sample"
    check_cache(cache)
    assert cache.admit(waiting)
    assert owned_blocks(cache, waiting)[:2] == blocks
    cache.forget(second)
    cache.take_back(waiting)
    check_cache(cache)
    assert cache.pool.num_free == 6


def _tracked(cache: PrefixCache, request: Request) -> list[Any]:
    cache.track(request)
    return request.sequences


@pytest.mark.parametrize("length", [1, 3, 4, 6, 9])
def test_samples_that_end_with_their_first_token_say_what_they_skipped(
    make_worker: MakeWorker, oracle: Oracle, length: int
) -> None:
    prompt = PREFIX[:length]
    worker, _ = make_worker(max_num_seqs=2)
    (group,) = worker.generate([prompt], SamplingParams(n=4, max_tokens=1))
    assert [sample.token_ids for sample in group.samples] == [oracle(prompt, index, 1) for index in range(4)]
    assert [sample.num_cached_tokens for sample in group.samples] == [0, length, length, length]
    assert [sample.kv_versions for sample in group.samples] == [[(0, length, 0)]] * 4
    assert group.num_cached_tokens == 0
    stats = worker.stats()
    assert stats["prefill_tokens_skipped"] == 3 * length
    assert (stats["prefix_queries"], stats["prefix_hits"]) == (4, 3)
    (again,) = worker.generate([prompt], SamplingParams(n=3, max_tokens=1))
    hit = min(length // 4 * 4, length - 1)
    assert [sample.num_cached_tokens for sample in again.samples] == [hit, length, length]
    assert [sample.kv_versions for sample in again.samples] == [[(0, length, 0)]] * 3
    assert worker.stats()["prefill_tokens_skipped"] == 5 * length + hit


def test_in_a_group_those_that_end_and_those_that_go_on_skip_the_same(make_worker: MakeWorker, oracle: Oracle) -> None:
    ends = tuple({oracle(PREFIX[:6], sample, 1)[0] for sample in (1, 2)})
    worker, _ = make_worker(max_num_seqs=2, eos=ends)
    (group,) = worker.generate([PREFIX[:6]], SamplingParams(n=5, max_tokens=3))
    assert [len(sample.token_ids) for sample in group.samples][1:3] == [1, 1]
    assert [sample.num_cached_tokens for sample in group.samples] == [0, 6, 6, 6, 6]
    for sample in group.samples:
        assert sample.kv_versions == [(0, 5 + len(sample.token_ids), 0)]
    assert worker.stats()["prefill_tokens_skipped"] == 4 * 6


def test_samples_that_are_aborted_before_they_run_say_under_which_weights_their_prompt_was_computed(
    make_worker: MakeWorker,
) -> None:
    worker, runner = make_worker(max_num_seqs=1)
    runner.gate = StepGate(1)
    handle = worker.submit(PREFIX[:6], SamplingParams(n=3, max_tokens=9))
    for chunk in handle:
        if chunk.sample == 2:
            break
    handle.cancel()
    runner.gate.release(1)
    samples = handle.result(HANG).samples
    assert [sample.finish_reason for sample in samples] == ["abort"] * 3
    assert [len(sample.token_ids) for sample in samples][1:] == [1, 1]
    assert [sample.num_cached_tokens for sample in samples] == [0, 6, 6]
    assert [sample.kv_versions for sample in samples][1:] == [[(0, 6, 0)]] * 2


def test_a_preempted_sample_that_is_aborted_says_under_which_weights_it_was_computed(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    runner.gate = StepGate(3)
    handle = worker.submit(PREFIX[:6], SamplingParams(max_tokens=9))
    runner.gate.wait_for_a_step()

    def end_the_step() -> None:
        """Let the step that runs end when the command stands in line: the next turn is the command's."""
        wait_until(lambda: num_waiting(worker))
        runner.gate.release(1)

    threading.Thread(target=end_the_step).start()
    worker.sleep("kv_cache")
    computed = 5 + len(worker._engine.requests[handle.request_id].sequences[0].output_ids)
    handle.cancel()
    worker.wake_up("kv_cache")
    assert handle.result(HANG).samples[0].kv_versions == [(0, computed, 0)]


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_samples_that_stop_at_their_first_token(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle, max_tokens: int
) -> None:
    ends = {oracle(PREFIX[:6], sample, 1)[0] for sample in (0, 2)}
    engine = make_engine(max_num_seqs=2)
    group = make_request("a", PREFIX[:6], n=4, max_tokens=max_tokens, eos=tuple(ends))
    engine.add(group)
    finish(engine)
    assert [len(tokens) for tokens in outputs(group)] == [1, max_tokens, 1, max_tokens]
    assert [s.ending.reason for s in group.sequences] == ["stop", "length"] * 2


def test_nan_in_the_step_that_forks_fails_the_whole_group_and_publishes_nothing(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make_engine()
    bad, good = make_request("bad", PREFIX, n=3, max_tokens=4), make_request("good", PREFIX, n=2, max_tokens=4)
    engine.runner.nan_ids = {"bad"}
    engine.add(bad)
    engine.add(good)
    assert engine.step() == [bad]
    assert isinstance(bad.error, NonFiniteLogitsError)
    assert len(engine.cache.index) == 0
    assert finish(engine) == [good]
    assert_right(oracle, good)


def test_a_runner_that_raises_in_the_step_that_forks_fails_every_waiter(make_worker: MakeWorker) -> None:
    worker, runner = make_worker()
    runner.fail_with = RuntimeError("out of luck")
    worker.pause()
    handles = [worker.submit([*PREFIX, last], SamplingParams(n=3, max_tokens=2)) for last in (1, 2)]
    worker.resume()
    for handle in handles:
        with pytest.raises(Exception, match="out of luck"):
            handle.result(timeout=HANG)


def test_weights_that_change_within_a_prompt_make_the_next_sample_compute_it(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    group = make_request("a", PREFIX, n=3, max_tokens=3)
    engine.add(group)
    engine.step()
    engine.weights_changed(1)
    finish(engine)
    assert_right(oracle, group)
    assert [[span[2] for span in s.kv_spans] for s in group.sequences] == [[0, 1], [1], [1]]


def test_sleep_lets_go_of_held_prompts_and_nothing_is_lost(make_worker: MakeWorker, oracle: Oracle) -> None:
    worker, runner = make_worker(max_num_seqs=1)
    runner.gate = StepGate(3)
    handle = worker.submit(PREFIX[:6], SamplingParams(n=3, max_tokens=8))
    next(iter(handle))
    sleeper = threading.Thread(target=worker.sleep, args=("kv_cache",))
    sleeper.start()
    runner.gate.release(1000)
    sleeper.join(HANG)
    stats = worker.stats()
    assert (stats["blocks_free"], stats["blocks_cached"]) == (stats["blocks_total"], 0)
    worker.wake_up()
    got = [sample.token_ids for sample in handle.result(timeout=HANG).samples]
    assert got == [oracle(PREFIX[:6], index, 8) for index in range(3)]


def test_aborting_a_group_whose_prompt_is_held_frees_it(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine(max_num_seqs=1)
    group = make_request("a", PREFIX[:6], n=3, max_tokens=8)
    engine.add(group)
    for _ in range(4):
        engine.step()
    engine.abort(["a"])
    check_cache(engine.cache)
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks
    assert engine.scheduler.num_unfinished == 0


def test_a_prompt_s_slot_is_free_again_when_what_still_reads_it_is_on_its_way() -> None:
    states = CheckpointPool(0, 4, range(8, 9))
    held = states.hold(0)
    assert held == 8
    states.fork(held, 1)
    states.let_go(held)
    assert states.hold(2) is None, "the fork of the coming step copies it"
    moves = states.take_moves()
    assert (moves.holds, moves.forks) == ([(0, 8)], [(8, 1)])
    assert states.hold(2) == 8
    states.clear()
    assert states.take_moves().holds == [], "the prompt was computed under the weights before"


@pytest.mark.parametrize("held", [0, 1])
def test_one_prompt_after_another_is_held_in_the_same_slot(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle, held: int
) -> None:
    """One prompt after another is held in the same slot. Without a slot, samples that begin when the leader has gone on
    compute the prompt again.
    """
    engine = make_engine(recurrent=True, num_held=held, max_num_seqs=2)
    for ordinal in range(3):
        other = make_request(f"other{ordinal}", [90 + ordinal], ordinal=2 * ordinal, max_tokens=3)  # ends meanwhile
        prompt = list(range(ordinal, ordinal + 9))
        request = make_request(f"r{ordinal}", prompt, ordinal=2 * ordinal + 1, n=5, max_tokens=6)
        engine.add(other)
        engine.add(request)
        finish(engine)
        assert_right(oracle, other, request)
    assert engine.cache.checkpoints.counters.holds == 3 * held
