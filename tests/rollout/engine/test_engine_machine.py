"""Random schedules give what an oracle gives that computes each sample alone, with the prefix cache on and off."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from samebit.rollout.cache import PrefixCache
from samebit.rollout.drafts.drafter import Drafter, DraftOptions
from samebit.rollout.engine.engine import Engine
from samebit.rollout.requests.request import Request, Sequence

from ..cache.cache_integrity import check_cache, owned_blocks

MAX_LEN = 24
STEPS = 40
CASES = int(os.environ.get("SAMEBIT_SOAK_CASES", "75"))


class Watch:
    """Stands for weights that somebody may write to without telling the engine."""

    written = False

    def write(self) -> None:
        self.written = True

    def moved(self) -> bool:
        return self.written

    def accept(self) -> None:
        self.written = False


class Guesser(Drafter):
    """Guesses from what the oracle says, of which so many tokens are `right` and the others wrong."""

    def __init__(self, num_tokens: int, right: int, oracle: Callable[..., list[int]], chunk: int | None) -> None:
        super().__init__(DraftOptions(num_tokens, gram=1, step_tokens=12, history_tokens=50, chunk=chunk))
        self.right = right
        self.oracle = oracle

    def guess(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        count = len(super().guess(sequence, most)) or min(most, 2, sequence.shared.max_new_tokens - 1)
        count = min(count, self.most_behind(sequence))
        known = sequence.num_new_tokens
        coming = self.oracle(sequence.shared.prompt.tolist(), sequence.sample_index, known + max(count, 0))[known:]
        return tuple(token if number < self.right else token + 1 for number, token in enumerate(coming))


class EngineMachine(RuleBasedStateMachine):
    """Gives an engine requests, steps and commands in any order, until they have ended; `make_engine`, `make_request`
    and `oracle` are set by the test."""

    make_engine: Callable[..., Engine]
    make_request: Callable[..., Request]
    oracle: Callable[..., list[int]]
    engine: Engine | None = None

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 8]),
        recurrent=st.booleans(),
        checkpoints=st.integers(0, 8),
        held=st.integers(0, 2),
        spare=st.integers(0, 12),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 20),
        max_scored=st.sampled_from([1, 3, 1000]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["lru", "ref_zero"]),
        run_ahead=st.booleans(),
        drafts=st.sampled_from([None, None, 1, 3]),
        right=st.integers(0, 4),
    )
    def build(
        self,
        block_size: int,
        recurrent: bool,
        checkpoints: int,
        held: int,
        spare: int,
        max_num_seqs: int,
        budget: int,
        max_scored: int,
        prefix_caching: bool,
        policy: str,
        run_ahead: bool,
        drafts: int | None,
        right: int,
    ) -> None:
        self.watch = Watch()
        self.engine = self.make_engine(
            watch=self.watch,
            num_blocks=-(-MAX_LEN // block_size) + spare,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            prefix_caching=prefix_caching,
            eviction_policy=policy,
            recurrent=recurrent,
            num_checkpoints=checkpoints,
            num_held=held,
            run_ahead=run_ahead and drafts is None,
            drafter=None if drafts is None else Guesser(drafts, right, self.oracle, block_size if recurrent else None),
        )
        self.engine.scheduler.max_scored = max_scored
        self.added: dict[str, Request] = {}
        self.ended: list[str] = []
        self.aborted: set[str] = set()

    @rule(
        base=st.integers(0, 2),
        shared=st.integers(0, MAX_LEN - 2),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=MAX_LEN - 1),
        new=st.integers(1, MAX_LEN),
        n=st.integers(1, 4),
        eos=st.sets(st.integers(0, 100), max_size=20),
        salt=st.sampled_from([None, None, None, "a"]),
        scored=st.sampled_from([None, None, None, 0]),
    )
    def add(
        self,
        base: int,
        shared: int,
        own: list[int],
        new: int,
        n: int,
        eos: set[int],
        salt: str | None,
        scored: int | None,
    ) -> None:
        prompt = ([base] * shared + own)[: MAX_LEN - 1]
        self._add(prompt, new, n, eos, cache_salt=salt, prompt_logprobs=scored)

    @rule(pick=st.integers(0, 50), sample=st.integers(0, 3), keep=st.integers(1, MAX_LEN), new=st.integers(1, 9))
    def next_turn(self, pick: int, sample: int, keep: int, new: int) -> None:
        """Add a prompt that goes on behind what an earlier request has sampled."""
        if not self.added:
            return
        request = list(self.added.values())[pick % len(self.added)]
        turn = request.sequences[sample % len(request.sequences)]
        self._add([*turn.token_ids[: min(turn.num_tokens, keep, MAX_LEN - 2)].tolist(), 7], new, 1, set())

    def _add(self, prompt: list[int], new: int, n: int, eos: set[int], **params: object) -> None:
        request = self.make_request(
            str(len(self.added)), prompt, max_tokens=min(new, MAX_LEN - len(prompt)), n=n, eos=tuple(eos), **params
        )
        self.added[request.request_id] = request
        self.engine.add(request)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._take(self.engine.step())

    @rule(pick=st.integers(0, 50))
    def abort(self, pick: int) -> None:
        ended = self.engine.abort([str(pick)])
        self.aborted |= {request.request_id for request in ended}
        self._take(ended)

    @rule()
    def preempt(self) -> None:
        self._take(self.engine.settle())
        self.engine.preempt_all()
        assert self.engine.cache.pool.num_free == self.engine.cache.pool.num_blocks

    @rule(recompute=st.booleans())
    def update_weights(self, recompute: bool) -> None:
        """Change the weights; running requests go on with the KV they have, or compute it again."""
        self._take(self.engine.settle())
        if recompute:
            self.engine.preempt_all()
        self.engine.weights_changed(self.engine.weight_version + 1)
        assert self.engine.cache.pool.num_kept == 0

    @rule(during=st.booleans())
    def write_weights_untold(self, during: bool) -> None:
        """Write to the weights; it is noticed before the next step, or when that is to be committed."""
        if during:
            self.engine.runner.meanwhile = self.watch.write
        else:
            self.watch.write()
        version = self.engine.weight_version
        self._take(self.engine.step())
        self.engine.runner.meanwhile = None
        assert not self.watch.written
        assert self.engine.weight_version <= version + 1

    @rule()
    def reset(self) -> None:
        self._take(self.engine.settle())
        self.engine.clear_prefix_cache()

    @rule()
    def flip_admission(self) -> None:
        self.engine.scheduler.open_admission(not self.engine.scheduler.admission_open)

    def _take(self, ended: list[Request]) -> None:
        self.ended += [request.request_id for request in ended]

    @invariant()
    def memory_is_accounted_for(self) -> None:
        if self.engine is None:
            return
        cache, scheduler = self.engine.cache, self.engine.scheduler
        check_cache(cache)
        running = set(scheduler.running)
        for request in self.added.values():
            for sequence in request.sequences:
                self._check_place(request, sequence, sequence in running)
        self._check_entries(scheduler.running)

    def _check_place(self, request: Request, sequence: Sequence, running: bool) -> None:
        """Check that each unfinished sequence runs, waits, follows, or stands behind a sibling: one of these."""
        cache, scheduler = self.engine.cache, self.engine.scheduler
        siblings = [s for other in request.sequences for s in other.schedule.siblings]
        follows = isinstance(cache, PrefixCache) and sequence in cache.leaders
        places = [running, sequence in scheduler.waiting, follows, siblings.count(sequence) == 1]
        assert sum(places) == (not sequence.finished)
        if running:
            assert len(owned_blocks(cache, sequence)) * cache.block_size >= sequence.num_computed
        elif not sequence.finished:
            assert (sequence.slot, sequence.num_computed) == (-1, 0)

    def _check_entries(self, running: list[Sequence]) -> None:
        """Check that what can be hit holds the tokens that the index says; a block has one digest at most."""
        cache = self.engine.cache
        if not isinstance(cache, PrefixCache):
            return
        pages = self.engine.runner.pages
        for block in cache.index.by_block:
            assert pages[block, :, 0].tolist() == cache.index.tokens[block].tolist()
            assert set(pages[block, :, 1].tolist()) == {self.engine.weight_version}, "KV of an old epoch"
        for sequence in running:
            for number, block in enumerate(owned_blocks(cache, sequence)):
                entry = cache.index.by_block.get(block)
                if entry is not None:
                    assert entry.digest == cache.entries[sequence].chain[number]
        self._check_checkpoints(cache)

    def _check_checkpoints(self, cache: PrefixCache) -> None:
        """Check that a checkpoint holds the tokens up to the end of its block."""
        saved = {checkpoint for _, checkpoint in cache.checkpoints.moves.saves}
        for block, checkpoint in cache.checkpoints.by_block.items():
            assert block in cache.index.by_block
            if checkpoint not in saved:
                state = self.engine.runner.checkpoints[checkpoint]
                assert state.tokens[-cache.block_size :] == cache.index.tokens[block].tolist()
                assert state.oldest == self.engine.weight_version

    def teardown(self) -> None:
        if self.engine is None:
            return
        self.engine.scheduler.open_admission(True)
        limit = 20 + 50 * sum(request.params.n for request in self.added.values())
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self._take(self.engine.step())
        assert sorted(self.ended) == sorted(self.added), "each request ends exactly once"
        for request in self.added.values():
            self._check(request)
        assert self.engine.cache.pool.num_free == self.engine.cache.pool.num_blocks
        assert self.engine.scheduler.num_unfinished == 0
        check_cache(self.engine.cache)

    def _check(self, request: Request) -> None:
        for sequence in request.sequences:
            got = sequence.output_ids.tolist()
            alone = self.oracle(request.prompt.tolist(), sequence.sample_index, request.shared.max_new_tokens)
            stops = [index for index, token in enumerate(alone) if token in request.shared.end_ids]
            whole = alone[: stops[0] + 1] if stops else alone
            if request.request_id in self.aborted:
                assert got == whole[: len(got)]
                continue
            assert got == whole
            assert sequence.ending.reason == ("stop" if stops else "length")
            if sequence.prompt_scores is not None:
                assert sequence.prompt_scores.logprobs[1:].tolist() == [-float(t) for t in request.prompt[1:]]


def run_machine(
    kind: type[EngineMachine],
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    oracle: Callable[..., list[int]],
) -> None:
    """Run any schedules of up to `STEPS` operations of a kind of machine."""

    class Machine(kind):  # type: ignore[misc, valid-type]
        pass

    Machine.make_engine = staticmethod(make_engine)
    Machine.make_request = staticmethod(make_request)
    Machine.oracle = staticmethod(oracle)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=CASES, stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.soak
def test_any_schedule_gives_the_tokens_of_the_oracle(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request], oracle: Callable[..., list[int]]
) -> None:
    run_machine(EngineMachine, make_engine, make_request, oracle)
