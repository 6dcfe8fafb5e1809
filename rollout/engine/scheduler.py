"""Decide what the next step computes.

Invariants
----------
* Cost: a step is O(running) plus the sequences it admits or sends behind a leader; never O(waiting), never
  O(pool), and never the length of what is cached. With recurrent states, a head that can not be admitted is the
  exception: each step walks back over the blocks of its match to the last one that has a checkpoint.
* `running` is in order of admission. Only its last sequence is ever preempted, so the first one always
  advances, and since admission is first come first served, none starves.
* A preempted sequence keeps its tokens, loses its blocks, and waits again in order of arrival.
* Every running sequence that is decoding is in every plan; prefills take what is left of the budget, each as
  much as it can. So at most one of them is unfinished after a step, beside those whose chunk ended at the end of a
  prompt that is held again, and those that wait for their turn to be scored.
* A step scores at most `max_scored` prompt tokens, whose logits have to be in memory, and one of each sequence that it
  admits: what is admitted is computed in part in the same step. First come first served, and prompts that are not
  scored pass by.
* With prefix caching, one sample of a request computes the prompt, and the others wait behind it
  (`siblings`) until they take their first token from the same logits. The prompt is held for those that find no
  seat; it is given up before anybody is preempted, and only if no sample that has it runs.
* A sequence whose next block is being computed by a running one waits for that block, and lets others pass.
* A step that is planned ahead, before the tokens of the one before it are known, is of decodes only. It takes no
  memory from another sequence and admits none, so it is planned only while none waits that might be admitted. What it
  computes of a sequence that turns out to have ended is void.
* Guesses are computed in what a step of few tokens has room for. They take no block that a running sequence needs next,
  and nobody is preempted for them. None of them is the last token of a block of a model with states: what is kept as of
  a block's end is of certain tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from samebit.rollout.cache import Cache
from samebit.rollout.drafts.drafter import Drafter
from samebit.rollout.engine.step_plan import ScheduledSequence, StepPlan
from samebit.rollout.engine.waiting_queue import WaitingQueue
from samebit.rollout.requests.request import Request, Sequence


class Scheduler:
    """Decides which sequences run, and what the next step computes of each."""

    def __init__(
        self, cache: Cache, max_num_batched_tokens: int, max_scored: int, drafter: Drafter | None = None
    ) -> None:
        self.cache = cache
        self.drafter = drafter
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_scored = max_scored
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self.num_unfinished = 0
        self._num_with_images = 0
        self.admission_open = True
        self._may_admit = False
        self.preemptions = 0
        self._arrivals = count()

    @property
    def has_work(self) -> bool:
        """Return whether `schedule()` would find something to compute."""
        return bool(self.running) or self.waiting.head(self.admission_open) is not None

    @property
    def drained(self) -> bool:
        """Return whether no request that has started is unfinished."""
        return not self.running and not self.waiting.any_started

    def add(self, request: Request) -> None:
        """Queue a new request, which the cache knows already."""
        first, *rest = request.sequences
        self._may_admit = True
        for sequence in request.sequences:
            sequence.schedule.arrival = next(self._arrivals)
        self.num_unfinished += len(request.sequences)
        if request.images is not None:
            self._num_with_images += len(request.sequences)
        self.waiting.push(first)
        if self.cache.shares_prompts:
            first.schedule.siblings = rest
        else:
            self._wait(rest)

    def retire(self, sequences: Iterable[Sequence]) -> None:
        """Forget finished or aborted sequences and take back what they own."""
        gone = set(sequences)
        self._may_admit = True
        for sequence in gone:
            if sequence.slot >= 0:
                self._wait(self.cache.take_back(sequence))
        for sequence in gone:
            self.waiting.discard(sequence)
            self.cache.forget(sequence)
            if self.drafter is not None:
                self.drafter.forget(sequence)
            sequence.schedule.siblings = []  # they end with it
        # In this order: another thread that counts those that wait meanwhile finds too many, never fewer than none.
        self.running = [sequence for sequence in self.running if sequence not in gone]
        self.num_unfinished -= len(gone)
        self._num_with_images -= sum(sequence.shared.images is not None for sequence in gone)

    def schedule(self) -> StepPlan:
        """Plan the next step, admitting and preempting as memory allows."""
        plan = StepPlan(has_images=self._num_with_images > 0)
        self.cache.sweep()
        prefills = self._plan_decodes(plan)
        budget = self.max_num_batched_tokens - plan.num_tokens
        for sequence in prefills:
            if budget > 0:
                budget -= self._plan_chunk(plan, sequence, budget)
        self._admit(plan, budget)
        self._may_admit = False
        if self.drafter is not None:
            self._add_drafts(plan, self.drafter)
        plan.copies = self.cache.take_copies()
        if self.cache.keeps_checkpoints and plan.items:
            self._plan_checkpoints(plan)
        return plan

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step behind `plan`, which is computed now: one more token of each of its decodes, whatever they are.

        Return None where it can not be told yet.
        """
        if not self._next_is_known(plan):
            return None
        continuing = [(row, item) for row, item in enumerate(plan.items) if _continues(item.sequence)]
        if len(continuing) < len(plan.items) and self.waiting.head(self.admission_open) is not None:
            return None  # a sequence that waits takes the seat
        if not continuing or not all(self.cache.reserve(item.sequence, 2) for _, item in continuing):
            return None
        ahead = StepPlan(sources=[row for row, _ in continuing], has_images=self._num_with_images > 0)
        self.cache.sweep()
        for _, item in continuing:
            item.sequence.schedule.num_ahead = 1
            ahead.add(item.sequence, item.start + 1, 1, 1)
        if self.cache.keeps_checkpoints:
            self._plan_checkpoints(ahead)
        return ahead

    def take_ahead(self, plan: StepPlan) -> None:
        """Make the step that was launched ahead the current one."""
        for item in plan.items:
            item.sequence.schedule.num_ahead = 0

    def open_admission(self, is_open: bool) -> None:
        """Say whether requests that have not started may start."""
        self.admission_open = is_open
        self._may_admit = True

    def publish_item(self, item: ScheduledSequence) -> None:
        """Let others use what a step has computed for this sequence."""
        woken = self.cache.publish_blocks(item.sequence, item.captures)
        if woken:
            self._wait(woken)

    def drop(self, plan: StepPlan) -> None:
        """Take back what this step computed: its sequences stand where they stood before it."""
        for item in plan.items:
            self.cache.checkpoints.free_captured(item.captures)
            if item.forks:
                item.sequence.schedule.siblings = list(item.forks)

    def fork(self, leader: Sequence, samples: tuple[Sequence, ...]) -> None:
        """Let the samples that took their first token from the leader's logits go on by themselves."""
        continuing = [sample for sample in samples if not sample.finished]
        for _ in range(len(samples) - len(continuing)):
            self.cache.counters.count(leader.num_prompt_tokens)
        self.cache.hold_prompt(leader, continuing)
        self._wait(continuing)

    def preempt_all(self) -> None:
        """Take the blocks of every running sequence; all of them are recomputed later."""
        while self.running:
            self._preempt_last()
        self.cache.held.drop_all()

    def clear_index(self) -> None:
        """Make sure that nothing cached is hit again; running sequences keep what they have."""
        self._wait(self.cache.clear_index())

    def release_drafts(self) -> None:
        """Free the memory that guesses are made in; the next guess takes it again."""
        if self.drafter is not None and self.drafter.model is not None:
            self.drafter.model.release()

    def _wait(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.waiting.push(sequence)
            self._may_admit = True

    def _next_is_known(self, plan: StepPlan) -> bool:
        """Tell whether all that a plan computes are decodes, and nothing but their tokens decides what comes next."""
        if self.cache.depends_on_tokens or (self._may_admit and self.waiting.head(self.admission_open) is not None):
            return False
        return all(item.start >= item.sequence.num_prompt_tokens and _one_token(item) for item in plan.items)

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Plan one token for each running decode, and return the running prefills.

        Sequences are visited in order of admission and victims come from the end, so a victim has not
        been planned yet.
        """
        prefills: list[Sequence] = []
        reserve, add = self.cache.reserve, plan.add
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            index += 1
            start = sequence.num_computed
            todo = sequence.num_tokens - start
            if not reserve(sequence, todo) and not self._make_room(sequence):
                break
            if todo == 1 and not sequence.schedule.siblings:
                add(sequence, start, 1, 1)
            else:
                prefills.append(sequence)
        return prefills

    def _add_drafts(self, plan: StepPlan, drafter: Drafter) -> None:
        """Fill a step of few tokens up with guesses behind its decodes, while blocks are plenty."""
        room = min(drafter.options.step_tokens, self.max_num_batched_tokens) - plan.num_tokens
        if room <= 0 or self.cache.pool.num_free <= len(self.running):
            return
        decodes = [item for item in plan.items if _is_decode(item)]
        guesses = drafter.guesses([item.sequence for item in decodes], room) if decodes else []
        for item, drafts in zip(decodes, guesses, strict=True):
            spare = self.cache.pool.num_free - self.cache.blocks_for(len(drafts))
            if drafts and spare >= len(self.running) and self.cache.reserve(item.sequence, 1 + len(drafts)):
                plan.draft(item, drafts)

    def _make_room(self, sequence: Sequence) -> bool:
        """Give up held prompts one by one, then preempt from the end, until `sequence` has its blocks, or is the one
        preempted."""
        todo = sequence.num_tokens - sequence.num_computed
        while not self.cache.reserve(sequence, todo):
            if not self.cache.held.free_one() and self._preempt_last() is sequence:
                return False
        return True

    def _preempt_last(self) -> Sequence:
        victim = self.running.pop()
        woken = self.cache.take_back(victim, waits_again=True)
        victim.forget_computed()
        victim.shared.record("preempted", victim.sample_index)
        self._wait([victim, *woken])
        self.preemptions += 1
        return victim

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Admit from the head of the queue while slots, blocks and budget last.

        A newcomer leaves one free block for each sequence that runs already: it is not admitted only to be
        preempted before the others have filled a block, and a victim is not taken back in the same step.
        """
        while budget > 0 and self.cache.tables.has_free_slot:
            sequence = self.waiting.head(self.admission_open)
            if sequence is None:
                return
            if self.cache.follow(sequence):
                self.waiting.discard(sequence)
                continue
            if self.cache.admit(sequence, headroom=len(self.running)):
                self._start(sequence)
                budget -= self._plan_chunk(plan, sequence, budget, least_scored=1)
            elif self.running or not self.cache.held.free_one():
                return

    def _plan_checkpoints(self, plan: StepPlan) -> None:
        """Plan which states to move, and which to keep on the way, now that it is known who waits for them."""
        plan.moves = self.cache.checkpoints.take_moves()
        for item in plan.items:
            item.captures = self.cache.take_captures(item.sequence, item.start + item.length)

    def _start(self, sequence: Sequence) -> None:
        self.waiting.discard(sequence)
        self.running.append(sequence)
        request = sequence.shared
        if not request.progress.started:
            request.progress.started = True
            self.waiting.promote(request)
        request.record("scheduled", sequence.sample_index)

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence, budget: int, *, least_scored: int = 0) -> int:
        """Plan as much of a prefill as the budget allows, wherever that ends; return the number of tokens planned."""
        start, total = sequence.num_computed, sequence.num_tokens
        length = self.cache.chunk_end(sequence, min(total, start + budget)) - start
        if sequence.prompt_logprobs_wanted:
            length = self._take_scored(plan, sequence, length, least_scored)
        if not length:
            return 0
        ends = start + length == total
        forks = self._hand_over_siblings(sequence) if ends and sequence.schedule.siblings else ()
        plan.add(sequence, start, length, int(ends), forks)
        return length

    def _take_scored(self, plan: StepPlan, sequence: Sequence, length: int, least: int) -> int:
        """Take of what the step may still score what a chunk of this length needs; return how much of the chunk is
        planned."""
        to_score = sequence.num_prompt_tokens - 1 - sequence.num_computed
        room = max(self.max_scored - plan.num_scored, least)
        length = min(length, room) if room < to_score else length
        plan.num_scored += min(length, to_score)
        return length

    def _hand_over_siblings(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """Let the samples behind this sequence go; return those that take their first token from its prompt's logits.

        None of them does when weights changed while it was computed: the next sample is queued then, to compute it
        again, with the others behind it.
        """
        siblings, sequence.schedule.siblings = sequence.schedule.siblings, []
        if self.cache.may_publish(sequence):
            return tuple(siblings)
        first, *rest = siblings
        first.schedule.siblings = rest
        self.waiting.push(first)
        return ()


def _is_decode(item: ScheduledSequence) -> bool:
    """Tell whether the item computes a sampled token, and draws the next one for itself alone."""
    return item.start >= item.sequence.num_prompt_tokens and item.samples == item.length == 1 and not item.forks


def _one_token(item: ScheduledSequence) -> bool:
    """Tell whether the item computes one token and samples, for itself alone, so that its next token may be launched
    before the host reads this one. (A preempted sequence may compute a single token without sampling: not that.)"""
    return item.samples == item.length == 1 and not item.forks and item.sequence.params.can_run_ahead


def _continues(sequence: Sequence) -> bool:
    """Tell whether it has not ended, and its length allows a token behind the one that is computed now."""
    return not sequence.finished and sequence.num_new_tokens + 1 < sequence.shared.max_new_tokens
