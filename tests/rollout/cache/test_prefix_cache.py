"""The prefix cache keeps its promises: hits, publication, eviction, invalidation, numbers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from samebit.rollout.cache import NoPrefixCache, PrefixCache
from samebit.rollout.cache.prefix_tree import CachedBlock
from samebit.rollout.engine.engine import Engine
from samebit.rollout.errors import NonFiniteLogitsError
from samebit.rollout.requests.block_digests import ChainHasher, TokenChain
from samebit.rollout.requests.request import Request, Sequence
from samebit.rollout.sampling_params import SamplingParams
from samebit.weight_sync import WeightMismatchError
from samebit.weight_sync.in_place.watch import WeightWatch

from ...patience import HANG
from ..conftest import TinyModule, tracked
from .cache_integrity import check_cache, num_unswept, owned_blocks
from .engine_runs import run

Make = Callable[..., Engine]
MakeRequest = Callable[..., Request]
MakeWorker = Callable[..., tuple[Any, Any]]
Oracle = Callable[..., list[int]]
PROMPT = list(range(40))


def cached(request: Request) -> int | None:
    return request.sequences[0].kv.num_cached_tokens


def output(request: Request) -> list[int]:
    return request.sequences[0].output_ids.tolist()


def computed(cache: PrefixCache, sequence: Sequence) -> Sequence:
    """Admit a sequence and compute all that it knows."""
    assert cache.admit(sequence)
    sequence.mark_computed(sequence.num_computed, sequence.num_tokens - sequence.num_computed, 0)
    cache.publish_blocks(sequence)
    return sequence


# -- hits ------------------------------------------------------------------------------------------


def test_a_cached_prefix_is_skipped_at_once_whatever_the_budget(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    run(engine, make_request("cold", PROMPT, max_tokens=1))
    assert len(engine.runner.plans) == 5
    warm = make_request("warm", [*PROMPT, 70, 71], max_tokens=2)
    run(engine, warm)
    assert engine.runner.plans[5:] == [[("warm", 0, 40, 2)], [("warm", 0, 42, 1)]]
    assert (cached(warm), output(warm)) == (40, oracle([*PROMPT, 70, 71], 0, 2))


def test_only_what_is_computed_counts_against_the_budget(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    run(engine, make_request("cold", PROMPT, max_tokens=1))
    for last in range(5):
        engine.add(make_request(str(last), [*PROMPT, 70 + last, 1], max_tokens=1))
    engine.step()
    assert [item[2:] for item in engine.runner.plans[-1]] == [(40, 2)] * 4


@pytest.mark.parametrize(("length", "starts_at"), [(3, 0), (4, 3), (5, 4), (7, 4), (8, 7), (9, 8)])
def test_the_last_token_is_computed_and_shared_blocks_are_not_written(
    make_engine: Make, make_request: MakeRequest, length: int, starts_at: int
) -> None:
    engine = make_engine()
    first = make_request("first", PROMPT[:length], max_tokens=9)
    engine.add(first)
    engine.step()
    second = make_request("second", PROMPT[:length], max_tokens=9)
    engine.add(second)
    engine.step()
    assert ("second", 0, starts_at, length - starts_at) in engine.runner.plans[-1]
    full = length // 4
    one, two = (owned_blocks(engine.cache, request.sequences[0]) for request in (first, second))
    assert one[:full] == two[:full]
    assert not set(one[full:]) & set(two[full:])
    assert second.sequences[0].kv.write_from == 4 * full
    run(engine)


def test_hits_on_free_blocks_take_capacity_and_a_refusal_changes_nothing(make_request: MakeRequest) -> None:
    cache = PrefixCache(num_blocks=5, block_size=4, max_num_seqs=3, max_model_len=64)
    for number, start in enumerate((0, 20)):
        cache.take_back(computed(cache, tracked(cache, make_request(str(number), PROMPT[start : start + 8]))))
    computed(cache, tracked(cache, make_request("running", [90])))
    order = list(cache.pool._kept)
    assert len(order) == 4
    wanted = tracked(cache, make_request("wanted", [*PROMPT[:8], *PROMPT[10:20]]))
    before = (cache.counters.queries, cache.counters.evictions, cache.tables.rows.copy())
    for _ in range(2):
        assert not cache.admit(wanted), "two hits and three new blocks do not fit in four"
        assert (wanted.slot, wanted.kv.num_cached_tokens, wanted.num_computed) == (-1, None, 0)
    assert list(cache.pool._kept) == order
    assert before[:2] == (cache.counters.queries, cache.counters.evictions)
    assert np.array_equal(before[2], cache.tables.rows)
    check_cache(cache)


def test_its_own_hits_are_not_evicted_for_its_new_blocks(make_request: MakeRequest) -> None:
    cache = PrefixCache(num_blocks=4, block_size=4, max_num_seqs=3, max_model_len=64)
    for number, start in enumerate((0, 20)):
        cache.take_back(computed(cache, tracked(cache, make_request(str(number), PROMPT[start : start + 8]))))
    wanted = tracked(cache, make_request("wanted", [*PROMPT[:8], *PROMPT[10:18]]))
    assert cache.admit(wanted)
    assert (wanted.num_computed, cache.counters.evictions, len(set(owned_blocks(cache, wanted)))) == (8, 2, 4)
    check_cache(cache)


def test_a_digest_that_agrees_with_other_tokens_is_no_hit_and_no_duplicate(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChainHasher, "extend", lambda self, parent, tokens: [b"same"] * (len(tokens) // 4))
    engine = make_engine()
    requests = [make_request(str(i), [i] * 6, max_tokens=6) for i in range(4)]
    run(engine, *requests[:2])
    run(engine, *requests[2:])
    for i, request in enumerate(requests):
        assert output(request) == oracle([i] * 6, 0, 6)
        assert cached(request) == 0


def test_salts_never_share(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine()
    salts = [None, "a", "b", "\ud800", "a"]
    requests = [make_request(str(i), PROMPT, max_tokens=2, cache_salt=salt) for i, salt in enumerate(salts)]
    for request in requests:
        run(engine, request)
    assert [cached(request) for request in requests] == [0, 0, 0, 0, 39]


# -- publication -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("new", "hit"), [(1, 4), (2, 4), (3, 8), (6, 8), (7, 12)])
def test_a_second_turn_hits_what_decode_computed(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle, new: int, hit: int
) -> None:
    """A second turn hits what decode computed, but for the last sampled token, which has no KV: of 6 + `new` tokens one
    less was computed.
    """
    engine = make_engine()
    first = make_request("first", PROMPT[:6], max_tokens=new)
    run(engine, first)
    turn = [*PROMPT[:6], *output(first), 70, 71, 72, 73]
    second = make_request("second", turn, max_tokens=3)
    run(engine, second)
    assert (cached(second), output(second)) == (hit, oracle(turn, 0, 3))


def test_chunks_are_published_as_they_are_computed(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(make_request("long", PROMPT, max_tokens=1))
    sizes = []
    while engine.has_work:
        engine.step()
        sizes.append(len(engine.cache.index))
    assert sizes == [2, 4, 6, 8, 10]


def test_a_second_copy_is_dropped_and_the_first_ones_entry_stays(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    """A second copy of a block is dropped, and the first one's entry stays: two prompts whose every token is scored are
    both computed whole.
    """
    engine = make_engine()
    first, second = (make_request(name, PROMPT[:9], max_tokens=5, prompt_logprobs=0) for name in "ab")
    engine.add(first)
    engine.add(second)
    engine.step()
    assert [item[3] for item in engine.runner.plans[0]] == [9, 9]
    one, two = (owned_blocks(engine.cache, request.sequences[0]) for request in (first, second))
    assert (one[:2], len(engine.cache.index)) == (two[:2], 2)
    assert engine.cache.pool.num_free == 64 - 4
    engine.abort(["a"])
    check_cache(engine.cache)
    assert len(engine.cache.index) == 2
    run(engine)
    assert output(second) == oracle(PROMPT[:9], 0, 5)


def test_a_copy_that_others_read_is_kept(make_request: MakeRequest) -> None:
    cache = PrefixCache(num_blocks=8, block_size=4, max_num_seqs=3, max_model_len=64)
    leader, sample = (cache.track(group := make_request("group", PROMPT[:6], n=2)), group.sequences)[1]
    assert cache.admit(leader)
    leader.mark_computed(0, 6, 0)
    cache.publish_blocks(leader)
    cache.hold_prompt(leader, [sample])
    for token in (6, 7, 8):
        leader.append(token, 0.0, 0.0)
    computed(cache, tracked(cache, make_request("same", PROMPT[:8])))
    own = owned_blocks(cache, leader)
    assert cache.reserve(leader, 3)
    leader.mark_computed(6, 2, 0)
    cache.publish_blocks(leader)
    assert owned_blocks(cache, leader)[:2] == own, "the other sample is going to copy this block"
    assert not cache.may_publish(leader)
    check_cache(cache)


def test_a_pass_that_fails_publishes_nothing(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine()
    engine.runner.nan_ids = {"bad"}
    run(engine, make_request("bad", PROMPT[:20], max_tokens=3))
    assert (len(engine.cache.index), engine.cache.pool.num_kept) == (0, 0)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("decoded", [0, 6])
def test_what_stays_of_a_request_whose_later_pass_fails(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle, decoded: int, recurrent: bool
) -> None:
    """What earlier passes of a request computed stays when a later one fails, right for whoever hits it; of the pass
    that failed nothing does.
    """
    options = {"recurrent": True, "num_checkpoints": 16} if recurrent else {}
    engine = make_engine(max_num_batched_tokens=8, **options)
    bad = make_request("bad", PROMPT[:20], max_tokens=20)
    engine.add(bad)
    for _ in range(2 + (1 + decoded if decoded else 0)):
        engine.step()
    engine.runner.nan_ids = {"bad"}
    known = [*PROMPT[:20], *output(bad)]
    run(engine)
    assert isinstance(bad.error, NonFiniteLogitsError)
    stays = 16 if decoded == 0 else 24
    assert len(engine.cache.index) == engine.cache.pool.num_kept == stays // 4
    good = make_request("good", [*known, 90], max_tokens=3)
    run(engine, good)
    assert output(good) == oracle(good.prompt.tolist(), 0, 3)
    assert cached(good) == (stays if not recurrent else 20 if decoded else 16), "the state at the prompt's last block"


def test_what_attends_to_old_keys_is_not_published(make_engine: Make, make_request: MakeRequest) -> None:
    """A request that began before an update publishes no block behind it, as its tokens attend to old keys: nobody hits
    them, until it starts anew.
    """
    engine = make_engine()
    old = make_request("old", PROMPT[:6], max_tokens=20)
    engine.add(old)
    engine.step()
    engine.weights_changed(1)
    for _ in range(12):
        engine.step()
    assert (len(engine.cache.index), old.sequences[0].num_computed) == (0, 18)
    same = make_request("same", old.sequences[0].token_ids[:17].tolist(), max_tokens=1)
    engine.add(same)
    engine.step()
    assert cached(same) == 0
    engine.preempt_all()
    run(engine)
    assert old.sequences[0].kv_spans == [(0, 25, 1)]
    assert len(engine.cache.index) == 6


def test_keys_that_were_shared_before_an_update_keep_its_version(make_engine: Make, make_request: MakeRequest) -> None:
    """Keys that were shared before an update keep its version: a prompt that is computed again for its scores writes no
    shared block.
    """
    engine = make_engine(max_num_batched_tokens=6)
    run(engine, make_request("a", PROMPT[:16], max_tokens=1))
    scored = make_request("b", [*PROMPT[:16], 7], max_tokens=8, prompt_logprobs=0)
    engine.add(scored)
    engine.step()
    assert (scored.sequences[0].num_computed, scored.sequences[0].kv.write_from) == (6, 16)
    engine.weights_changed(1)
    run(engine)
    assert scored.sequences[0].kv_spans == [(0, 16, 0), (16, 24, 1)]
    assert scored.sequences[0].context_spans == [(0, 8, 0)]


# -- eviction --------------------------------------------------------------------------------------


def test_leaves_go_before_their_parents(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine(num_blocks=12)
    run(engine, make_request("a", PROMPT[:32], max_tokens=1))
    hits = []
    for number in range(3):
        run(engine, make_request(str(number), [60 + number] * 16, max_tokens=1))
        probe = make_request(f"probe {number}", [*PROMPT[:32], 99], max_tokens=1)
        engine.cache.track(probe)
        hits.append(len(engine.cache._match(engine.cache.entries[probe.sequences[0]])))
    assert hits == [8, 4, 0]
    assert engine.cache.counters.evictions == 8
    lost = make_request("lost", [*PROMPT[:32], 99], max_tokens=1)
    run(engine, lost)
    assert engine.cache.counters.lost_to_eviction == 1


def test_recently_used_prefixes_outlive_others(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine(num_blocks=6)
    for name, prompt in (("a", [1] * 8), ("b", [2] * 8), ("a again", [1] * 9), ("c", [3] * 12)):
        run(engine, make_request(name, prompt, max_tokens=1))
    a, b = make_request("a?", [1] * 9, max_tokens=1), make_request("b?", [2] * 9, max_tokens=1)
    run(engine, a)
    run(engine, b)
    assert (cached(a), cached(b)) == (8, 0)


def test_ref_zero_shares_only_what_somebody_holds(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine(eviction_policy="ref_zero")
    engine.add(make_request("a", PROMPT[:20], max_tokens=9))
    engine.step()
    beside = make_request("beside", PROMPT[:24], max_tokens=2)
    engine.add(beside)
    run(engine)
    assert cached(beside) == 20
    assert (len(engine.cache.index), engine.cache.pool.num_kept) == (0, 0)
    after = make_request("after", PROMPT[:24], max_tokens=2)
    run(engine, after)
    assert cached(after) == 0


# -- invalidation ----------------------------------------------------------------------------------


def refused(worker: Any) -> None:
    with pytest.raises(WeightMismatchError):
        worker.load_state_dict({"unknown": torch.ones(1)})


COMMANDS: dict[str, Callable[[Any], object]] = {
    "receive_weights": lambda worker: worker.receive_weights(dict(worker.module.state_dict())),
    "load_state_dict": lambda worker: worker.load_state_dict(dict(worker.module.state_dict())),
    "sleep weights": lambda worker: (worker.sleep("weights"), worker.wake_up()),
    "sleep kv_cache": lambda worker: (worker.sleep("kv_cache"), worker.wake_up()),
    "reset_prefix_cache": lambda worker: worker.reset_prefix_cache(),
    "pause": lambda worker: (worker.pause(), worker.resume()),
    "a refused update": refused,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_which_commands_empty_the_index(make_worker: MakeWorker, command: str) -> None:
    worker, _ = make_worker()
    few = SamplingParams(max_tokens=2)
    worker.generate([PROMPT], few)
    assert worker.stats()["blocks_cached"] == 10
    COMMANDS[command](worker)
    stays = command in ("pause", "a refused update")
    assert worker.stats()["blocks_cached"] == worker.stats()["blocks_evictable"] == (10 if stays else 0)
    assert worker.generate([PROMPT], few)[0].num_cached_tokens == (39 if stays else 0)
    assert worker.generate([PROMPT], few)[0].num_cached_tokens == 39


@pytest.mark.parametrize("broken", [False, True])
def test_an_update_in_place_empties_the_index(make_worker: MakeWorker, broken: bool) -> None:
    worker, _ = make_worker(shared=True)
    few = SamplingParams(max_tokens=2)
    worker.generate([PROMPT], few)
    try:
        with worker.weight_update():
            if broken:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert worker.stats()["blocks_cached"] == 0
        worker.receive_weights()
    assert worker.stats()["blocks_cached"] == 0
    assert worker.generate([PROMPT], few)[0].num_cached_tokens == 0


def test_running_requests_keep_their_blocks_when_the_index_is_cleared(
    make_engine: Make, make_request: MakeRequest, oracle: Oracle
) -> None:
    engine = make_engine()
    requests = [make_request(str(i), PROMPT[:9], max_tokens=12) for i in range(3)]
    for request in requests:
        engine.add(request)
        engine.step()
    before = [owned_blocks(engine.cache, request.sequences[0]) for request in requests]
    engine.clear_prefix_cache()
    assert before == [owned_blocks(engine.cache, request.sequences[0]) for request in requests]
    run(engine)
    assert [output(request) for request in requests] == [oracle(PROMPT[:9], 0, 12)] * 3
    assert engine.scheduler.preemptions == 0
    assert len(engine.cache.index) == 0


def entries_of(epoch: int) -> int:
    """Count the cached blocks of this epoch in memory, hittable or not."""
    return sum(type(one) is CachedBlock and one.epoch == epoch and one.block > 0 for one in gc.get_objects())


def test_cleared_entries_are_freed_as_fast_as_new_ones_come(make_request: MakeRequest) -> None:
    cache = PrefixCache(num_blocks=500, block_size=1, max_num_seqs=1, max_model_len=1000)
    left = []
    for epoch in range(20):
        cache.take_back(computed(cache, tracked(cache, make_request(str(epoch), [epoch] * 400))))
        cache.clear_index()
        left.append(num_unswept(cache.index))
    assert max(left) == left[0] == 400
    gc.collect()
    gc.disable()  # parents and children hold each other: sweeping has to part them
    try:
        assert entries_of(cache.index.epoch - 1) == 400
        for _ in range(400):
            cache.sweep()
        assert entries_of(cache.index.epoch - 1) == 0
    finally:
        gc.enable()
    assert num_unswept(cache.index) == 0
    check_cache(cache)


def test_later_steps_free_what_was_cleared(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine()
    run(engine, make_request("a", PROMPT, max_tokens=1))
    engine.clear_prefix_cache()
    assert engine.cache.pool.num_kept == 0 < num_unswept(engine.cache.index)
    run(engine, make_request("b", [1, 2], max_tokens=1))
    assert len(engine.cache.pool._forgotten) == num_unswept(engine.cache.index) == 0


def test_what_is_known_of_evictions_does_not_pile_up_either(make_request: MakeRequest) -> None:
    cache = PrefixCache(num_blocks=50, block_size=1, max_num_seqs=1, max_model_len=60)
    left = []
    for number in range(40):
        cache.take_back(computed(cache, tracked(cache, make_request(str(number), [number] * 40))))
        if number % 7 == 6:
            cache.clear_index()
        left.append(num_unswept(cache.index))
    assert cache.counters.evictions > 1000
    assert max(left) <= 50 + 2 * 50  # the cleared entries, and at most twice as many evictions as there are blocks
    cache.clear_index()
    while num_unswept(cache.index):
        before = num_unswept(cache.index)
        cache.index.sweep(10)
        assert num_unswept(cache.index) == max(0, before - 10)


# -- cost, numbers, the off switch -----------------------------------------------------------------


def test_a_blocked_head_is_not_looked_at_again_from_its_start(
    make_engine: Make, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_blocks=20, max_model_len=80)
    run(engine, make_request("cold", PROMPT, max_tokens=1))
    engine.add(make_request("running", [80] * 3, max_tokens=40))
    engine.step()
    engine.add(make_request("blocked", [*PROMPT, *range(35)], max_tokens=3))
    engine.step()
    looked = _count_calls(monkeypatch, TokenChain, "__getitem__")
    hashed = _note_hashed(monkeypatch)
    for _ in range(10):
        engine.step()
    assert len(engine.scheduler.waiting) == 1
    assert len(looked) < 10 * 8, "a handful of looks a step, whatever the length of the match"
    assert len(hashed) <= 3, "only what was decoded"
    run(engine)


def _count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    calls: list[None] = []
    real = getattr(owner, name)

    def counted(*args: object) -> object:
        calls.append(None)
        return real(*args)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_a_prompt_is_hashed_once_and_when_it_is_submitted(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is hashed once, salt and all, in the thread that submits it; the generation thread finds it done."""
    worker, _ = make_worker()
    threads: list[threading.Thread] = []
    for name in ("root", "extend"):
        _note_threads(monkeypatch, ChainHasher, name, threads)
    hashed = _note_hashed(monkeypatch)
    worker.pause()
    handle = worker.submit(PROMPT[:22], SamplingParams(n=3, max_tokens=2, cache_salt="a"))
    assert len(hashed) == 22 // 4
    worker.resume()
    handle.result(HANG)
    assert len(hashed) == 22 // 4
    assert threads == [threading.current_thread()] * 2, "one root, and one go at the prompt"


def _note_hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list that gets the digest of each block that is hashed from now on."""
    digests: list[bytes] = []
    real = ChainHasher.extend

    def noted(hasher: ChainHasher, parent: bytes, tokens: np.ndarray) -> list[bytes]:
        new = real(hasher, parent, tokens)
        digests.extend(new)
        return new

    monkeypatch.setattr(ChainHasher, "extend", noted)
    return digests


def _note_threads(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, threads: list[threading.Thread]) -> None:
    real = getattr(owner, name)

    def noted(*args: object) -> object:
        threads.append(threading.current_thread())
        return real(*args)

    monkeypatch.setattr(owner, name, noted)


def test_each_block_of_tokens_is_hashed_once(
    make_engine: Make, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = _note_hashed(monkeypatch)
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
    group = make_request("a", PROMPT[:22], n=4, max_tokens=11)
    engine.add(group)
    for step in range(200):
        if step % 5 == 4:
            engine.preempt_all()
        engine.step()
    assert group.shared.finished
    own = [(s.num_tokens - 1) // 4 - 22 // 4 for s in group.sequences]
    assert len(hashed) <= 22 // 4 + sum(own) + 4, "a preempted one may hash its last token's block"


def test_the_numbers_add_up(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(num_blocks=24, max_num_seqs=3, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=6, n=2)
    outputs = [out for number in range(6) for out in worker.generate([[*PROMPT[:20], number % 3]] * 2, params)]
    stats = worker.stats()
    samples = [sample for out in outputs for sample in out.samples]
    assert stats["preemptions"] == 0
    assert stats["prefill_tokens_skipped"] == sum(sample.num_cached_tokens for sample in samples)
    assert stats["prefill_tokens_skipped"] + stats["prefill_tokens_computed"] == 21 * len(samples)
    assert stats["prefix_queries"] == len(samples) == 24
    assert stats["prefix_hits"] == sum(sample.num_cached_tokens > 0 for sample in samples) == 23
    assert stats["decode_tokens_computed"] == 5 * len(samples)
    assert (stats["blocks_free"], stats["blocks_total"]) == (24, 24)
    assert stats["blocks_cached"] == stats["blocks_evictable"] <= 24
    assert stats["leader_waits"] > 0
    assert [out.num_cached_tokens for out in outputs] == [out.samples[0].num_cached_tokens for out in outputs]
    assert stats["first_tokens"] == len(outputs) == 12
    assert stats["first_token_seconds"] == pytest.approx(sum(out.time_to_first_token for out in outputs))


def test_events_are_in_order_and_give_the_time_to_the_first_token(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(max_num_seqs=1)
    for out in worker.generate([PROMPT, PROMPT], SamplingParams(max_tokens=3, n=2)):
        times = [event.time for event in out.events]
        assert times == sorted(times)
        names = [event.name for event in out.events]
        assert (names[0], names.count("first_token"), names[-1]) == ("added", 2, "finished")
        first = next(event.time for event in out.events if event.name == "first_token")
        assert out.time_to_first_token == first - times[0] > 0


def test_the_whole_prompt_is_scored_on_a_warm_request(make_engine: Make, make_request: MakeRequest) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    run(engine, make_request("cold", PROMPT, max_tokens=3))
    scored = make_request("scored", PROMPT, max_tokens=3, prompt_logprobs=0)
    run(engine, scored)
    assert scored.sequences[0].prompt_scores.logprobs[1:].tolist() == [-float(token) for token in PROMPT[1:]]
    assert cached(scored) == 0, "none of it was skipped"
    assert len(engine.cache.index) == 10, "and none of it stored twice"


def test_switched_off_there_is_nothing_of_it(make_engine: Make, make_request: MakeRequest, oracle: Oracle) -> None:
    engine = make_engine(prefix_caching=False)
    cache = engine.cache
    assert isinstance(cache, NoPrefixCache)
    requests = [make_request(str(i), PROMPT[:10], max_tokens=4, n=2) for i in range(3)]
    run(engine, *requests)
    for request in requests:
        assert request.prompt_digests is None
        for sequence in request.sequences:
            assert not sequence.kv.num_cached_tokens
            assert sequence.output_ids.tolist() == oracle(PROMPT[:10], sequence.sample_index, 4)
    engine.clear_prefix_cache()
    assert cache.counters.queries == cache.counters.tokens_skipped == cache.pool.num_kept == 0
    assert engine.counters.prefill_tokens_computed == 6 * 10


def test_switched_off_the_numbers_are_there_and_zero(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(prefix_caching=False)
    worker.generate([PROMPT] * 2, SamplingParams(max_tokens=2))
    stats = worker.stats()
    assert {stats[name] for name in stats if name.startswith("prefix_")} == {0}
    assert {stats[name] for name in stats if name.startswith("state")} == {0}
    assert stats["leader_waits"] == stats["blocks_cached"] == stats["prefill_tokens_skipped"] == 0


@pytest.mark.parametrize("warm", [False, True])
def test_what_a_preempted_request_finds_again_is_no_hit_of_its_prompt(
    make_engine: Callable[..., Engine], make_request: MakeRequest, warm: bool
) -> None:
    """What a preempted request finds again is no hit of its prompt: `num_cached_tokens` is what its first admission
    skipped.
    """
    engine = make_engine()
    if warm:
        engine.add(make_request("before", PROMPT[:9], max_tokens=1))
        engine.step()
    request = make_request("a", PROMPT[:14], max_tokens=6)
    engine.add(request)
    engine.step()
    engine.preempt_all()
    skipped = engine.cache.counters.tokens_skipped
    while engine.has_work:
        engine.step()
    assert engine.cache.counters.tokens_skipped > skipped, "it resumed on its own blocks"
    assert request.sequences[0].kv.num_cached_tokens == (8 if warm else 0)


# -- what is reported of a step that is dropped ----------------------------------------------------


class Moving:
    """Holds an engine over weights that are written, without a word, while its next step computes."""

    def __init__(self, make_engine: Make, **options: int) -> None:
        self.module = TinyModule()
        self.engine = make_engine(watch=WeightWatch(self.module), **options)

    def lose_a_step(self) -> None:
        self.engine.runner.meanwhile = self._move
        self.engine.step()
        assert self.engine.counters.untold_updates == 1

    def _move(self) -> None:
        self.engine.runner.salt = 1
        with torch.no_grad():
            self.module.proj.bias.add_(1)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_what_is_found_behind_a_step_that_was_dropped_is_reported(
    make_engine: Make, make_request: MakeRequest, run_ahead: bool
) -> None:
    moving = Moving(make_engine, run_ahead=run_ahead)
    engine, first, second = moving.engine, *(make_request(name, PROMPT[:10], max_tokens=9) for name in "ab")
    engine.add(first)
    engine.step()
    engine.settle()
    engine.add(second)
    moving.lose_a_step()
    run(engine)
    assert [request.sequences[0].reported_cached_tokens for request in (first, second)] == [0, 8]


def test_what_the_first_admission_found_outlives_a_later_one_that_was_dropped(
    make_engine: Make, make_request: MakeRequest
) -> None:
    moving = Moving(make_engine)
    engine, request = moving.engine, make_request("a", PROMPT[:10], max_tokens=9)
    run(engine, make_request("before", PROMPT[:9], max_tokens=1))
    engine.add(request)
    engine.step()
    engine.preempt_all()
    moving.lose_a_step()
    run(engine)
    assert request.sequences[0].reported_cached_tokens == 8


def test_a_sample_that_only_a_dropped_step_admitted_skipped_the_whole_prompt(
    make_engine: Make, make_request: MakeRequest
) -> None:
    moving = Moving(make_engine)
    engine, group = moving.engine, make_request("group", PROMPT[:10], n=2, max_tokens=9)
    engine.add(group)
    engine.step()
    moving.lose_a_step()
    engine.abort(["group"])
    assert [sample.reported_cached_tokens for sample in group.sequences] == [0, 10]
