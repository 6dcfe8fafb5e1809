"""Random schedules against an oracle that computes each sample alone."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from samebit.rollout.engine import Engine
from samebit.rollout.request import Request, SequenceStatus

MAX_LEN = 24


def test_any_schedule_gives_the_tokens_of_the_oracle(
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    oracle: Callable[..., list[int]],
) -> None:
    class Machine(RuleBasedStateMachine):
        @initialize(
            block_size=st.sampled_from([1, 2, 4, 8]),
            spare=st.integers(0, 12),
            max_num_seqs=st.integers(1, 5),
            budget=st.integers(5, 20),
        )
        def build(self, block_size: int, spare: int, max_num_seqs: int, budget: int) -> None:
            self.engine = make_engine(
                num_blocks=-(-MAX_LEN // block_size) + spare,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=MAX_LEN,
            )
            self.added: dict[str, Request] = {}
            self.ended: list[str] = []
            self.aborted: set[str] = set()

        @rule(
            prompt=st.lists(st.integers(0, 9), min_size=1, max_size=MAX_LEN - 1),
            new=st.integers(1, MAX_LEN),
            n=st.integers(1, 3),
            eos=st.sets(st.integers(0, 100), max_size=20),
        )
        def add(self, prompt: list[int], new: int, n: int, eos: set[int]) -> None:
            request = make_request(
                str(len(self.added)), prompt, max_tokens=min(new, MAX_LEN - len(prompt)), n=n, eos=tuple(eos)
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
            self.engine.preempt_all()
            assert self.engine.cache.pool.num_free == self.engine.cache.pool.num_blocks

        @rule()
        def flip_admission(self) -> None:
            self.engine.scheduler.admission_open = not self.engine.scheduler.admission_open

        def _take(self, ended: list[Request]) -> None:
            self.ended += [request.request_id for request in ended]

        @invariant()
        def memory_is_accounted_for(self) -> None:
            if not hasattr(self, "engine"):
                return
            cache, scheduler = self.engine.cache, self.engine.scheduler
            cache.check()
            for sequence in scheduler.running:
                assert sequence.status is SequenceStatus.RUNNING
                assert len(cache.owned_blocks(sequence)) * cache.block_size >= sequence.num_computed
            for sequence in scheduler.waiting:
                assert (sequence.slot, sequence.num_computed) == (-1, 0)
            owned = sum(len(cache.owned_blocks(sequence)) for sequence in scheduler.running)
            assert owned + cache.pool.num_free == cache.pool.num_blocks

        def teardown(self) -> None:
            if not hasattr(self, "engine"):
                return
            self.engine.scheduler.admission_open = True
            limit = 20 + 50 * sum(request.params.n for request in self.added.values())
            for _ in range(limit):
                if not self.engine.has_work:
                    break
                self._take(self.engine.step())
            assert sorted(self.ended) == sorted(self.added), "each request ends exactly once"
            for request in self.added.values():
                self._check(request)
            assert self.engine.cache.pool.num_free == self.engine.cache.pool.num_blocks

        def _check(self, request: Request) -> None:
            for sequence in request.sequences:
                got = sequence.output_ids.tolist()
                alone = oracle(request.prompt.tolist(), sequence.sample_index, request.max_new_tokens)
                stops = [index for index, token in enumerate(alone) if token in request.end_ids]
                whole = alone[: stops[0] + 1] if stops else alone
                if request.request_id in self.aborted:
                    assert got == whole[: len(got)]
                else:
                    assert got == whole
                    assert sequence.finish_reason == ("stop" if stops else "length")

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
