"""Compute step by step: schedule, run, commit. No threads and no locks: one caller at a time.

Invariants
----------
* Between two steps every known request is either waiting or running; a finished one is returned by the
  call that finished it, exactly once, and forgotten.
* A row whose logits are not finite, or from which nothing can be drawn, an image that can not be computed, and a
  tokenizer that can not decode a sample fail their own request and no other; it publishes nothing.
* An exception from the runner leaves this engine unusable; the caller fails what is in flight.
* With `run_ahead`, a step may be launched before the tokens of the one before it are read, and is then in flight
  between two calls of `step()`. A caller that changes weights or memory commits it first: `settle()`. What it
  computed of a sequence that had ended is dropped.
* A token that was guessed (`drafts`) is kept only where it is the one that is drawn there. As a row's bits depend on no
  other row, and a draw on its position alone, tokens and log-probabilities are those without guesses.
* Which experts compute a token is noted from the first request on that asks for it. Blocks that were computed before
  have no notes: the index is cleared then, once.
* Weights that were written without `weights_changed` (`WeightWatch`) are noticed before a step is launched, and again
  before it is committed. What was computed over such a change is dropped, the weights get a version of their own, and
  whatever runs is computed again: no token and no cached block is of a mixture.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from samebit.rollout.cache import Cache
from samebit.rollout.drafts.drafter import Drafter
from samebit.rollout.engine.counters import EngineCounters
from samebit.rollout.engine.drawn_rows import DrawnRows
from samebit.rollout.engine.failures import UNTOLD, never_settled, not_decoded, not_finite, nothing_drawn
from samebit.rollout.engine.scheduler import Scheduler
from samebit.rollout.engine.step_plan import (
    Runner,
    ScheduledSequence,
    StepInFlight,
    StepPlan,
    StepResult,
    most_scored,
)
from samebit.rollout.errors import TokenizerError
from samebit.rollout.requests.request import Request, Sequence
from samebit.rollout.requests.shared import Shared
from samebit.rollout.requests.stopping import end_of_sample
from samebit.weight_sync.in_place.watch import WeightWatch

logger = logging.getLogger(__name__)

MOST_DROPPED = 100
"""After so many steps in a row that weights moved in, the requests of the last one fail: what writes in every forward
would let none of them end."""


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    computing: StepInFlight


@dataclass(slots=True)
class _Routes:
    """Says whether a request has asked for the experts of each token, and whether they are noted by now."""

    asked: bool = False
    noted: bool = False

    @property
    def due(self) -> bool:
        """Return whether noting has to begin: nothing may be in flight then."""
        return self.asked and not self.noted


class Engine:
    """Computes one step after the other, of the requests that were added."""

    def __init__(
        self,
        runner: Runner,
        cache: Cache,
        max_num_batched_tokens: int,
        *,
        run_ahead: bool = False,
        drafter: Drafter | None = None,
        watch: WeightWatch | None = None,
    ) -> None:
        self.runner = runner
        self.watch = WeightWatch() if watch is None else watch
        self.run_ahead = run_ahead
        self.cache = cache
        self.scheduler = Scheduler(cache, max_num_batched_tokens, most_scored(runner.vocab_size), drafter)
        self.requests: dict[str, Request] = {}
        self.counters = EngineCounters()
        self.weight_version = 0
        self._ahead: _Launched | None = None
        self._routes = _Routes()
        self._lost_in_a_row = 0
        self._failed: dict[Shared, None] = {}
        runner.allocate_cache(cache.pool.num_blocks)

    @property
    def has_work(self) -> bool:
        """Return whether `step()` would find something to do."""
        return self._ahead is not None or self.scheduler.has_work

    @property
    def drained(self) -> bool:
        """Return whether no request that has started is unfinished, and no step is in flight."""
        return self._ahead is None and self.scheduler.drained

    @property
    def in_flight(self) -> bool:
        """Return whether a step was launched that is not committed."""
        return self._ahead is not None

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        self._routes.asked |= request.params.return_routed_experts
        self.cache.track(request)
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End these requests with what they have; ids that are not known are finished already."""
        ended = self._end(i for i in request_ids if i in self.requests)  # one at a time: an id may come twice
        self.counters.requests.aborted += len(ended)
        return ended

    def fail_all(self) -> None:
        """End every request, for a reason that its caller is told of."""
        self.counters.requests.failed += len(self._end(list(self.requests)))

    def _end(self, request_ids: Iterable[str]) -> list[Request]:
        ended = self._forget(request_ids)
        for request in ended:
            self._end_rest(request)
        return ended

    def abort_started(self) -> list[Request]:
        """Abort every request that has begun to compute."""
        return self.abort([i for i, request in self.requests.items() if request.progress.started])

    def preempt_all(self) -> None:
        """Drop the KV of every running sequence; they are recomputed by later steps."""
        self._check_settled()
        self.scheduler.preempt_all()

    def weights_changed(self, version: int) -> None:
        """Clear the prefix cache, whose content is of the old weights, and note the version of the new ones."""
        self.clear_prefix_cache()
        self.weight_version = version
        self.watch.accept()

    def clear_prefix_cache(self) -> None:
        """Make sure that nothing computed so far is hit again; running requests go on with what they have."""
        self._check_settled()
        self.runner.forget_weights()
        self.scheduler.clear_index()

    def step(self) -> list[Request]:
        """Compute one step; return the requests that ended with it."""
        began = time.perf_counter()
        step = self._take_ahead()
        if step is None:
            if self.watch.moved():
                self._start_over()
            if self._routes.due:
                self._note_routes()
            plan = self.scheduler.schedule()
            if not plan.items:
                return []
            step = self._launch(plan)
        if self.run_ahead and not self._routes.due:
            self._ahead = self._launch_behind(step)
        finished = self._conclude(step, self._result(step))
        self.counters.step_seconds += time.perf_counter() - began
        return finished

    def _note_routes(self) -> None:
        self.runner.note_routes()
        self._routes.noted = True
        self.clear_prefix_cache()

    def settle(self) -> list[Request]:
        """Commit the step that is in flight, if one is; return the requests that ended with it.

        Until its outcome is there nothing changes, whatever interrupts the wait.
        """
        step = self._ahead
        if step is None:
            return []
        began = time.perf_counter()
        result = self._result(step)
        self._take_ahead()
        finished = self._conclude(step, result)
        self.counters.step_seconds += time.perf_counter() - began
        return finished

    def _take_ahead(self) -> _Launched | None:
        """Make what was launched ahead the current step."""
        step, self._ahead = self._ahead, None
        if step is not None:
            self.scheduler.take_ahead(step.plan)
        return step

    def _launch(self, plan: StepPlan, before: StepInFlight | None = None) -> _Launched:
        began = time.perf_counter()
        computing = self.runner.launch(plan, self.cache.tables.rows, before)
        self.counters.runner_seconds += time.perf_counter() - began
        self.counters.steps += 1
        return _Launched(plan, computing)

    def _launch_behind(self, step: _Launched) -> _Launched | None:
        """Launch the step after this one, if it can be told by now."""
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

    def _conclude(self, step: _Launched, result: StepResult) -> list[Request]:
        """Commit a step, unless the weights moved meanwhile."""
        if not self.watch.moved():
            self._lost_in_a_row = 0
            return self._commit(step.plan, result)
        ahead = self._take_ahead()
        if ahead is not None:
            self._result(ahead)  # it writes to the same memory
            self._drop(ahead.plan)
        self._drop(step.plan)
        self._start_over()
        self._lost_in_a_row += 1
        if self._lost_in_a_row == MOST_DROPPED:
            self._lost_in_a_row = 0
            for item in step.plan.items:
                self._fail(item.sequence.shared, never_settled(item.sequence, MOST_DROPPED))
        return self._collect([])

    def _drop(self, plan: StepPlan) -> None:
        """Discard what this step computed: it is of no set of weights."""
        self.counters.void_tokens += plan.num_tokens
        self.scheduler.drop(plan)

    def _start_over(self) -> None:
        """Compute what runs again under the weights as they are now, whose change was not announced."""
        if self.counters.untold_updates == 0:
            logger.warning(UNTOLD)
        self.counters.untold_updates += 1
        self.weights_changed(self.weight_version + 1)
        self.runner.wait_for_writes()  # those that are accepted now; what is launched since is noticed later
        self.scheduler.preempt_all()

    def _check_settled(self) -> None:
        if self._ahead is not None:
            raise RuntimeError("a step is in flight, and what it computes with is about to change: settle() first")

    def _commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        for failed, error in result.failed:
            self._fail(failed.shared, error)
        self._keep_prompt_logprobs(result)
        rows = DrawnRows(result)
        version, block_size = self.weight_version, self.cache.block_size
        ended: list[Sequence] = []
        row = decodes = taken = void = 0
        for item in plan.items:
            sequence = item.sequence
            if plan.sources is not None and sequence.finished:  # since the step that this one was launched behind
                self.cache.checkpoints.free_captured(item.captures)
                void += 1
                row += 1
                continue
            is_first = sequence.mark_computed(item.start, item.length - len(item.drafts), version)
            is_decode = item.length == 1 and item.start >= sequence.num_prompt_tokens
            decodes += item.length if item.drafts else is_decode
            if item.drafts:
                taken += self._take_drafted(rows, row, item, ended)
                row += item.samples
            elif item.samples:
                for sample in item.forks:
                    sample.take_prompt_of(sequence, version)
                for sample in (sequence, *item.forks) if item.forks else (sequence,):
                    if self._take_row(rows, row, sample):
                        ended.append(sample)
                        self._keep_routes(sample, sequence.slot, sample.num_tokens - 1)
                    taken += rows.drawn[row]
                    row += 1
            # Any but the first decode since its admission has something new for others only where it fills a block.
            if not is_decode or is_first or not sequence.num_computed % block_size:
                self.scheduler.publish_item(item)
            if item.forks and sequence.shared.error is None:
                self.scheduler.fork(sequence, item.forks)
        self.counters.decode_tokens_computed += decodes
        self.counters.prefill_tokens_computed += plan.num_tokens - decodes - void
        self.counters.output_tokens += taken
        self.counters.void_tokens += void
        return self._collect(ended)

    def _take_drafted(self, rows: DrawnRows, row: int, item: ScheduledSequence, ended: list[Sequence]) -> int:
        """Append the token drawn behind the last known one, and on as long as each was guessed; return how many.

        A row behind a wrong guess was computed for nothing: its KV is written again, by the step that gets there.
        """
        sequence, taken = item.sequence, 0
        for at, guess in zip(range(row, row + item.samples), (*item.drafts, None), strict=True):
            has_ended = self._take_row(rows, at, sequence)
            taken += rows.drawn[at]
            if has_ended:
                ended.append(sequence)
                self._keep_routes(sequence, sequence.slot, sequence.num_tokens - 1)
            if has_ended or sequence.shared.error is not None or rows.tokens[at] != guess:
                break
            sequence.num_computed += 1
        self.counters.drafts.draft_tokens += len(item.drafts)
        self.counters.drafts.draft_tokens_accepted += max(taken - 1, 0)
        return taken

    def _take_row(self, rows: DrawnRows, row: int, sequence: Sequence) -> bool:
        """Append a row's token to its sequence; tell whether that ended it."""
        if not rows.drawn[row]:
            self._fail(sequence.shared, nothing_drawn(sequence) if rows.finite[row] else not_finite(sequence))
        if sequence.shared.error is not None:
            return False
        token = rows.tokens[row]
        if rows.top is not None and sequence.sampled.top_logprobs is not None:
            sequence.sampled.top_logprobs.append(rows.top[row] or {})  # before the token: who sees that sees these
        new = sequence.append(token, rows.logprobs[row], rows.raw_logprobs[row])
        if new == 1:
            self._count_first_token(sequence)
        try:
            return end_of_sample(sequence, token, new)
        except TokenizerError as error:
            self._fail(sequence.shared, not_decoded(sequence, error))
            return False

    def _count_first_token(self, sequence: Sequence) -> None:
        """Count the first token of a request, whichever sample it is of."""
        request = sequence.shared
        now = request.record("first_token", sequence.sample_index)
        if not request.progress.answered:
            request.progress.answered = True
            self.counters.first.first_tokens += 1
            self.counters.first.first_token_seconds += now - request.events[0].time

    def _collect(self, ended: list[Sequence]) -> list[Request]:
        """Retire what ended or failed in this step."""
        if not ended and not self._failed:
            return []
        self.scheduler.retire(ended)
        failed, self._failed = self._failed, {}
        done = {s.shared: None for s in ended if s.shared.finished and s.shared not in failed}
        for shared in failed:
            self._end_rest(self.requests[shared.request_id])
        self.counters.requests.finished += len(done)
        self.counters.requests.failed += len(failed)
        return self._forget(shared.request_id for shared in (*done, *failed))

    def _forget(self, request_ids: Iterable[str]) -> list[Request]:
        """Hold these requests no longer, which have ended; return them."""
        forgotten = [self.requests.pop(request_id) for request_id in request_ids]
        if not self.requests:
            self.runner.forget_sequences()
        return forgotten

    def _keep_routes(self, sequence: Sequence, slot: int, count: int) -> None:
        """Keep which experts computed a sequence that ends, as noted in the blocks of a slot; none without one."""
        if sequence.params.return_routed_experts:
            blocks = self.cache.tables.blocks(slot) if slot >= 0 else []
            sequence.ending.routed_experts = self.runner.routes_of(blocks, count)

    def _end_rest(self, request: Request) -> None:
        rest = [sequence for sequence in request.sequences if not sequence.finished]
        if request.error is None:
            for sequence in rest:
                self._keep_routes(sequence, sequence.slot, sequence.num_computed)
        self.scheduler.retire(rest)
        for sequence in rest:
            sequence.finish("abort", None)

    def _fail(self, request: Shared, error: Exception) -> None:
        """Fail a request with this error, unless an earlier one counts."""
        if request.error is None:
            self._failed[request] = None
            request.error = error

    def _keep_prompt_logprobs(self, result: StepResult) -> None:
        for piece in result.prompt_logprobs:
            sequence = piece.sequence
            if np.isnan(piece.logprobs).any():
                self._fail(sequence.shared, not_finite(sequence))
            if sequence.prompt_scores is not None:
                sequence.prompt_scores.add(piece.start, piece.logprobs, piece.top)
