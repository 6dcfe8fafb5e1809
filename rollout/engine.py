"""schedule -> run -> commit. No threads and no locks: one caller at a time.

Invariants
----------
* Between two steps every known request is either waiting or running; a finished one is returned by the
  call that finished it, exactly once, and forgotten.
* A row whose logits are not finite fails its own request and no other, and publishes nothing.
* An exception from the runner leaves this engine unusable; the caller fails what is in flight.
* With `run_ahead`, a step may be launched before the tokens of the one before it are read, and is then in flight
  between two calls of `step()`. Whoever changes what it computes with (weights, memory) commits it first: `settle()`.
  What it computed of a sequence that had ended is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from samebit.rollout.cache import CacheManager
from samebit.rollout.errors import NonFiniteLogitsError
from samebit.rollout.request import Request, Sequence
from samebit.rollout.scheduler import Scheduler
from samebit.rollout.step import Runner, ScheduledSequence, StepInFlight, StepPlan, StepResult


@dataclass
class EngineCounters:
    """Running totals since the engine was built.

    steps_ahead: those of the steps that were launched before the tokens of the one before were read.
    void_tokens: computed in such a step for a sequence that had ended.
    first_tokens, first_token_seconds: requests that have their first token, and how long they waited for it in all.
    """

    steps: int = 0
    steps_ahead: int = 0
    void_tokens: int = 0
    prefill_tokens_computed: int = 0
    decode_tokens_computed: int = 0
    output_tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    step_seconds: float = 0.0
    runner_seconds: float = 0.0


class _Rows:
    """A step's result as Python lists, which are read one row at a time."""

    __slots__ = ("finite", "logprobs", "raw_logprobs", "tokens", "top")

    def __init__(self, result: StepResult) -> None:
        self.tokens: list[int] = result.token_ids.tolist()
        self.logprobs: list[float] = result.logprobs.tolist()
        self.raw_logprobs: list[float] = result.raw_logprobs.tolist()
        self.finite: list[bool] = result.finite.tolist()
        self.top = result.top_logprobs


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    computing: StepInFlight


class Engine:
    def __init__(
        self, runner: Runner, cache: CacheManager, max_num_batched_tokens: int, *, run_ahead: bool = False
    ) -> None:
        self.runner = runner
        self.run_ahead = run_ahead
        self.cache = cache
        self.scheduler = Scheduler(cache, max_num_batched_tokens)
        self.requests: dict[str, Request] = {}
        self.counters = EngineCounters()
        self.weight_version = 0
        self._ahead: _Launched | None = None
        self._failed: dict[Request, None] = {}
        runner.allocate_cache(cache.pool.num_blocks)

    @property
    def has_work(self) -> bool:
        return self._ahead is not None or self.scheduler.has_work

    @property
    def drained(self) -> bool:
        """Whether no request that has started is unfinished, and no step is in flight."""
        return self._ahead is None and self.scheduler.drained

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched that is not committed."""
        return self._ahead is not None

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.cache.track(request)
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End these requests with what they have; ids that are not known are finished already."""
        known = [self.requests.pop(i) for i in request_ids if i in self.requests]
        for request in known:
            self._end_rest(request)
        self.counters.requests_aborted += len(known)
        return known

    def abort_started(self) -> list[Request]:
        """Abort every request that has begun to compute."""
        return self.abort([i for i, request in self.requests.items() if request.started])

    def preempt_all(self) -> None:
        """Drop the KV of every running sequence; they are recomputed by later steps."""
        self._check_settled()
        self.scheduler.preempt_all()

    def weights_changed(self, version: int) -> None:
        """New weights: what they are called, and nothing that was computed under the old ones is hit again."""
        self.clear_prefix_cache()
        self.weight_version = version

    def clear_prefix_cache(self) -> None:
        """Nothing computed so far is hit again; running requests go on with what they have."""
        self._check_settled()
        self.scheduler.clear_index()

    def step(self) -> list[Request]:
        """Compute one step; the requests that ended with it."""
        began = time.perf_counter()
        step = self._take_ahead()
        if step is None:
            plan = self.scheduler.schedule()
            if not plan.items:
                return []
            step = self._launch(plan)
        if self.run_ahead:
            self._ahead = self._launch_behind(step)
        finished = self._commit(step.plan, self._result(step))
        self.counters.step_seconds += time.perf_counter() - began
        return finished

    def settle(self) -> list[Request]:
        """Commit the step that is in flight, if one is; the requests that ended with it.

        Until its outcome is there nothing changes, whatever interrupts the wait.
        """
        step = self._ahead
        if step is None:
            return []
        began = time.perf_counter()
        result = self._result(step)
        self._take_ahead()
        finished = self._commit(step.plan, result)
        self.counters.step_seconds += time.perf_counter() - began
        return finished

    def _take_ahead(self) -> _Launched | None:
        """What was launched ahead is the current step now."""
        step, self._ahead = self._ahead, None
        if step is not None:
            for item in step.plan.items:
                item.sequence.num_ahead = 0
        return step

    def _launch(self, plan: StepPlan, before: StepInFlight | None = None) -> _Launched:
        began = time.perf_counter()
        computing = self.runner.launch(plan, self.cache.tables.rows, before)
        self.counters.runner_seconds += time.perf_counter() - began
        self.counters.steps += 1
        return _Launched(plan, computing)

    def _launch_behind(self, step: _Launched) -> _Launched | None:
        """The step after this one, if it can be told by now."""
        plan = self.scheduler.schedule_ahead(step.plan)
        if plan is None:
            return None
        self.counters.steps_ahead += 1
        return self._launch(plan, step.computing)

    def _result(self, step: _Launched) -> StepResult:
        began = time.perf_counter()
        result = step.computing.result()
        self.counters.runner_seconds += time.perf_counter() - began
        return result

    def _check_settled(self) -> None:
        if self._ahead is not None:
            raise RuntimeError("a step is in flight, and what it computes with is about to change: settle() first")

    def _commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        self._keep_prompt_logprobs(result)
        rows = _Rows(result)
        version = self.weight_version
        ended: list[Sequence] = []
        row = decodes = taken = void = 0
        for item in plan.items:
            sequence = item.sequence
            if plan.sources is not None and self._is_void(item):
                void += 1
                row += 1
                continue
            sequence.mark_computed(item.start, item.length, version)
            if item.length == 1 and item.start >= sequence.num_prompt_tokens:
                decodes += 1
            if item.samples:
                for sample in (sequence, *item.forks) if item.forks else (sequence,):
                    if self._take_row(rows, row, sample, sequence.oldest_kv):
                        ended.append(sample)
                    taken += rows.finite[row]
                    row += 1
            self.scheduler.publish(item)
            if item.forks and sequence.request.error is None:
                self.scheduler.fork(sequence, item.forks)
        self.counters.decode_tokens_computed += decodes
        self.counters.prefill_tokens_computed += plan.num_tokens - decodes - void
        self.counters.output_tokens += taken
        self.counters.void_tokens += void
        return self._collect(ended)

    def _is_void(self, item: ScheduledSequence) -> bool:
        """Whether the sequence of a step that ran ahead has ended; drops what was kept of it."""
        if item.sequence.finished:
            self.cache.drop_captures(item.sequence, item.captures)
            return True
        return False

    def _take_row(self, rows: _Rows, row: int, sequence: Sequence, context: int) -> bool:
        """Append a row's token to its sequence; whether that ended it. `context`: the oldest weights behind its KV."""
        if not rows.finite[row]:
            self._fail_row(sequence)
        if sequence.request.error is not None:
            return False
        token = rows.tokens[row]
        version = self.weight_version
        sequence.append(token, rows.logprobs[row], rows.raw_logprobs[row], version=version, context=context)
        if rows.top is not None and sequence.top_logprobs is not None:
            sequence.top_logprobs.append(rows.top[row] or {})
        if sequence.num_new_tokens == 1:
            self._count_first_token(sequence)
        return end_of_sample(sequence, token)

    def _count_first_token(self, sequence: Sequence) -> None:
        """Of a request the first one counts, whichever sample it is of."""
        request = sequence.request
        now = request.record("first_token", sequence.sample_index)
        if not request.answered:
            request.answered = True
            self.counters.first_tokens += 1
            self.counters.first_token_seconds += now - request.arrival

    def _collect(self, ended: list[Sequence]) -> list[Request]:
        """Retire what ended or failed in this step."""
        if not ended and not self._failed:
            return []
        self.scheduler.retire(ended)
        failed, self._failed = self._failed, {}
        done = {s.request: None for s in ended if s.request.unfinished == 0}
        finished = [request for request in done if request not in failed]
        for request in failed:
            self._end_rest(request)
        for request in (*finished, *failed):
            del self.requests[request.request_id]
        self.counters.requests_finished += len(finished)
        self.counters.requests_failed += len(failed)
        return [*finished, *failed]

    def _end_rest(self, request: Request) -> None:
        rest = [sequence for sequence in request.sequences if not sequence.finished]
        self.scheduler.retire(rest)
        for sequence in rest:
            sequence.finish("abort", None)

    def _fail_row(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.error is None:
            self._failed[request] = None
            request.error = NonFiniteLogitsError(
                f"request {request.request_id!r}: NaN or infinite logits at position "
                f"{sequence.num_tokens - 1} of sample {sequence.sample_index}; the weights or this input "
                "drive the model out of range"
            )

    def _keep_prompt_logprobs(self, result: StepResult) -> None:
        for piece in result.prompt_logprobs:
            sequence, start = piece.sequence, piece.start
            end = start + len(piece.logprobs)
            if np.isnan(piece.logprobs).any():
                self._fail_row(sequence)
            if sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs[start:end] = piece.logprobs
            if sequence.prompt_top_logprobs is not None and piece.top is not None:
                sequence.prompt_top_logprobs[start:end] = piece.top
            if end == sequence.num_prompt_tokens:
                sequence.prompt_logprobs_wanted = False


def end_of_sample(sequence: Sequence, token: int) -> bool:
    """Apply the stop rules after `token` was appended; finishes the sequence when one applies."""
    request = sequence.request
    new = sequence.num_tokens - sequence.num_prompt_tokens
    free_to_stop = new > sequence.params.min_tokens
    matcher = sequence.matcher
    stop_string = None if matcher is None else matcher.push(token, search=free_to_stop)
    if token in request.end_ids and free_to_stop:
        sequence.finish("stop", token if token in sequence.params.stop_ids else None)
    elif stop_string is not None:
        sequence.finish("stop", stop_string)
    elif new >= request.max_new_tokens:
        sequence.finish("length", None)
    else:
        return False
    if matcher is not None and stop_string is None:
        matcher.flush()
    return True
