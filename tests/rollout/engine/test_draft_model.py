"""A draft model's keys and values are of the tokens that they should be of, whatever is asked, and its memory comes
back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from samebit.rollout.cache import Cache, PrefixCache, build_cache
from samebit.rollout.drafts.drafter import Drafter, DraftOptions
from samebit.rollout.engine.draft_model import IDLE_CALLS, DraftModel
from samebit.rollout.engine.engine import Engine
from samebit.rollout.engine.step_plan import StepPlan, StepResult
from samebit.rollout.requests.request import Request, Sequence

from ..cache.cache_integrity import check_cache
from ..conftest import VOCAB, FakeRunner, fake_token
from .test_engine_machine import MAX_LEN, EngineMachine, Watch, run_machine


class DraftRunner(FakeRunner):
    """Runs the draft model: the fake model itself, which guesses right of the first sample of a request. `wrong`: every
    so many tokens it errs. `not_finite`: tokens that are drawn of logits which are not."""

    def __init__(self, block_size: int, wrong: int = 0) -> None:
        super().__init__(block_size)
        self.wrong = wrong
        self.not_finite: list[int] = []

    def _run(
        self, plan: StepPlan, block_tables: npt.NDArray[np.int32], drawn: npt.NDArray[np.int64] | None
    ) -> StepResult:
        assert self.pages is not None, "a step while the memory is given back"
        assert plan.num_tokens == sum(item.length for item in plan.items)
        self.plans.append(
            [(i.sequence.shared.request_id, i.sequence.sample_index, i.start, i.length) for i in plan.items]
        )
        tokens: list[int] = []
        for row, item in enumerate(plan.items):
            own, end = item.sequence, item.start + item.length
            came = own.token_ids[item.start : end].tolist() if drawn is None else [int(drawn[row])]
            begin = max(item.start, own.kv.write_from)
            self._write(block_tables[own.slot], begin, came[begin - item.start :], 0)
            known = self._read(block_tables[own.slot], end, 0)
            certain = min(end, own.num_tokens)
            assert known[:certain] == own.token_ids[:certain].tolist(), "a position is not where its block is"
            assert item.samples == (end >= own.num_tokens)
            if item.samples:
                tokens.append(fake_token(known, 0) if not self.wrong or end % self.wrong else 1)
        ids = np.array(tokens, np.int64)
        zeros = np.zeros(len(ids), np.float32)
        finite = [token not in self.not_finite for token in tokens]
        return StepResult(ids, zeros, zeros, np.array(finite, bool))


def _model(runner: DraftRunner, cache: Cache, max_rows: int = 64, max_len: int = MAX_LEN) -> DraftModel:
    return DraftModel(runner, cache, max_rows=max_rows, num_tokens=3, max_len=max_len)


def _cache(num_blocks: int, block_size: int, slots: int = 5, *, prefix_caching: bool = True) -> Cache:
    return build_cache(num_blocks, block_size, slots, MAX_LEN, prefix_caching=prefix_caching)


def _running(make_request: Callable[..., Request], name: str, prompt: list[int], n: int = 1) -> list[Sequence]:
    """Return samples that decode: they have a token behind their prompt."""
    request = make_request(name, prompt, max_tokens=12, n=n)
    for sequence in request.sequences:
        _go_on(sequence, 1)
    return request.sequences


def _go_on(sequence: Sequence, count: int, token: int | None = None) -> None:
    """Sample tokens: those that the draft model would guess, but for `token`."""
    for _ in range(count):
        known = sequence.token_ids[: sequence.num_tokens].tolist()
        sequence.append(fake_token(known, 0) if token is None else token, 0.0, 0.0)


def test_samples_of_a_prompt_compute_it_once(make_request: Callable[..., Request]) -> None:
    """The others wait until it is there, and are guessed of then; so does a request of the same prompt."""
    runner = DraftRunner(4)
    model = _model(runner, _cache(40, 4), max_rows=6)
    sequences = [*_running(make_request, "a", [5] * 9, n=3), *_running(make_request, "b", [5] * 9)]
    asked = [(sequence, 3) for sequence in sequences]
    assert [len(guess) for guess in model.propose(asked)] == [0, 0, 0, 0], "six of ten tokens are computed"
    assert [len(guess) for guess in model.propose(asked)] == [3, 0, 0, 0]
    assert [len(guess) for guess in model.propose(asked)][1:] == [3, 3, 3]
    computed = [length for plan in runner.plans for name, _, start, length in plan if start < 8]
    assert sum(computed) == 10
    for sequence in sequences:
        model.forget(sequence)
    assert model.num_blocks == (40, 40)


def test_what_was_guessed_wrong_is_computed_again_and_nothing_else(make_request: Callable[..., Request]) -> None:
    runner = DraftRunner(4)
    model = _model(runner, _cache(10, 4))
    [sequence] = _running(make_request, "a", [5] * 6)
    [guess] = model.propose([(sequence, 3)])
    assert model.propose([(sequence, 3)]) == [guess], "nothing has come since"
    assert len(runner.plans) == 3
    _go_on(sequence, 4)
    assert sequence.token_ids[7:10].tolist() == list(guess)
    model.propose([(sequence, 3)])
    assert runner.plans[3] == [("a", 0, 9, 2)], "the last guess was not computed, nor what was drawn behind it"
    _go_on(sequence, 1)
    _go_on(sequence, 1, token=1)
    model.propose([(sequence, 2)])
    assert runner.plans[6] == [("a", 0, 12, 1)]
    before = len(runner.plans)
    _go_on(sequence, 1)
    assert len(model.propose([(sequence, 2)])[0]) == 2, "though all that has come was guessed, and computed"
    assert runner.plans[before] == [("a", 0, 13, 1)]


def test_guesses_end_where_logits_are_not_finite(make_request: Callable[..., Request]) -> None:
    runner = DraftRunner(4)
    model = _model(runner, _cache(10, 4))
    [one], [other] = (_running(make_request, name, [token] * 6) for name, token in (("a", 5), ("b", 6)))
    [whole] = _model(DraftRunner(4), _cache(10, 4)).propose([(one, 3)])
    runner.not_finite = [whole[1]]
    assert model.propose([(one, 3), (other, 3)])[0] == whole[:1]
    runner.not_finite = list(range(VOCAB))
    _go_on(one, 1)
    assert model.propose([(one, 3)]) == [()]
    assert model.propose([(one, 3)]) == [()]
    runner.not_finite = []
    _go_on(one, 1)
    assert len(model.propose([(one, 3)])[0]) > 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_memory_is_taken_from_who_is_not_asked_for(make_request: Callable[..., Request], prefix_caching: bool) -> None:
    """The first to come keep it as long as they are asked for, and who has lost it begins anew."""
    model = _model(DraftRunner(4), _cache(4, 4, prefix_caching=prefix_caching))
    first, second = (_running(make_request, name, [token] * 6)[0] for name, token in (("a", 5), ("b", 6)))
    together = [(first, 3), (second, 3)]
    for _ in range(50):
        assert [len(guess) for guess in model.propose(together)] == [3, 0]
    for one, other in ((second, first), (first, second)):
        found = [len(model.propose([(one, 3)])[0]) for _ in range(IDLE_CALLS + 1)]
        assert found == [0] * (IDLE_CALLS - 1) + [3] * 2
        _go_on(other, 2)
    model.release()
    assert model.num_blocks == (4, 4)
    assert len(model.propose([(first, 3)])[0]) == 3, "the memory is taken again"


class DraftedMachine(EngineMachine):
    """Gives an engine with a draft model requests, steps and commands in any order."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 8]),
        spare=st.integers(0, 12),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 20),
        caching=st.tuples(st.booleans(), st.booleans()),
        own_block_size=st.sampled_from([1, 2, 4]),
        own_blocks=st.integers(1, 60),
        slots=st.integers(1, 5),
        max_rows=st.integers(1, 30),
        wrong=st.integers(0, 9),
        own_len=st.integers(3, MAX_LEN),
    )
    def build(
        self,
        block_size: int,
        spare: int,
        max_num_seqs: int,
        budget: int,
        caching: tuple[bool, bool],
        own_block_size: int,
        own_blocks: int,
        slots: int,
        max_rows: int,
        wrong: int,
        own_len: int,
    ) -> None:
        self.watch = Watch()
        self.drafts = _cache(own_blocks, own_block_size, slots, prefix_caching=caching[1])
        self.runner = DraftRunner(own_block_size, wrong)
        options = DraftOptions(num_tokens=3, gram=3, step_tokens=12, history_tokens=50)
        self.engine = self.make_engine(
            watch=self.watch,
            num_blocks=-(-MAX_LEN // block_size) + spare,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            prefix_caching=caching[0],
            drafter=Drafter(options, _model(self.runner, self.drafts, max_rows, own_len)),
        )
        self.added: dict[str, Request] = {}
        self.ended: list[str] = []
        self.aborted: set[str] = set()

    @rule()
    def release(self) -> None:
        self.engine.scheduler.release_drafts()
        assert self.drafts.pool.num_free == self.drafts.pool.num_blocks
        assert self.runner.pages is None

    @invariant()
    def drafts_are_accounted_for(self) -> None:
        if self.engine is None:
            return
        check_cache(self.drafts)
        if isinstance(self.drafts, PrefixCache) and self.runner.pages is not None:
            for block in self.drafts.index.by_block:
                assert self.runner.pages[block, :, 0].tolist() == self.drafts.index.tokens[block].tolist()

    def teardown(self) -> None:
        super().teardown()
        if self.engine is not None:
            assert self.drafts.pool.num_free == self.drafts.pool.num_blocks, "a request has left something"
            assert not isinstance(self.drafts, PrefixCache) or not self.drafts.entries


@pytest.mark.soak
def test_any_schedule_gives_the_tokens_of_the_oracle_with_a_draft_model(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request], oracle: Callable[..., list[int]]
) -> None:
    run_machine(DraftedMachine, make_engine, make_request, oracle)
