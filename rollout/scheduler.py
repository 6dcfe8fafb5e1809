"""What the next step computes.

Invariants
----------
* Cost: a step is O(running) plus the sequences it admits; never O(waiting), never O(pool). Removing a
  waiting sequence is O(1).
* `running` is in order of admission. Only its last sequence is ever preempted, so the first one always
  advances, and since admission is first come first served, nobody starves.
* A preempted sequence keeps its tokens, loses its blocks, and goes to the head of the queue: the queue
  is the order of arrival, preempted sequences first.
* Every running sequence that is decoding is in every plan; prefills share what is left of the budget.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from samebit.rollout.cache import CacheManager
from samebit.rollout.request import Sequence, SequenceStatus
from samebit.rollout.step import StepPlan


class Scheduler:
    def __init__(self, cache: CacheManager, max_num_batched_tokens: int) -> None:
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.admission_open = True
        self.preemptions = 0
        self.waiting_looked_at = 0

    @property
    def has_work(self) -> bool:
        """Whether `schedule()` would find something to compute."""
        return bool(self.running) or self._next_waiting() is not None

    @property
    def drained(self) -> bool:
        """Whether no request that has started is unfinished."""
        if self.running:
            return False
        return not self.waiting or not next(iter(self.waiting)).request.started

    def add(self, sequence: Sequence) -> None:
        self.waiting[sequence] = None

    def retire(self, sequences: Iterable[Sequence]) -> None:
        """Forget finished or aborted sequences and take back what they own."""
        gone = set(sequences)
        for sequence in gone:
            if sequence.slot >= 0:
                self.cache.release(sequence)
            else:
                self.waiting.pop(sequence, None)
        self.running = [sequence for sequence in self.running if sequence not in gone]

    def schedule(self) -> StepPlan:
        plan = StepPlan()
        prefills = self._plan_decodes(plan)
        budget = self.max_num_batched_tokens - plan.num_tokens
        for sequence in prefills:
            if budget == 0:
                return plan
            budget -= _plan_chunk(plan, sequence, budget)
        self._admit(plan, budget)
        return plan

    def preempt_all(self) -> None:
        """Take the blocks of every running sequence; all of them are recomputed later."""
        while self.running:
            self._preempt_last()

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Plan one token for each running decode, and return the running prefills.

        Sequences are visited in order of admission and victims come from the end, so a victim has not
        been planned yet.
        """
        prefills: list[Sequence] = []
        grow, add = self.cache.grow, plan.add
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            index += 1
            start, total = sequence.num_computed, sequence.num_tokens
            if not grow(sequence, total) and not self._make_room(sequence):
                break
            if total - start == 1:
                add(sequence, start, 1, True)
            else:
                prefills.append(sequence)
        return prefills

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt from the end until `sequence` has its blocks, or is the one preempted."""
        while True:
            victim = self._preempt_last()
            if victim is sequence:
                return False
            if self.cache.grow(sequence, sequence.num_tokens):
                return True

    def _preempt_last(self) -> Sequence:
        victim = self.running.pop()
        self.cache.release(victim)
        victim.forget_computed()
        victim.request.record("preempted", victim.sample_index)
        self.waiting[victim] = None
        self.waiting.move_to_end(victim, last=False)
        self.preemptions += 1
        return victim

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Admit from the head of the queue while slots, blocks and budget last.

        A newcomer leaves one free block for each sequence that runs already: it is not admitted only to be
        preempted before the others have filled a block, and a victim is not taken back in the same step.
        """
        while budget > 0:
            sequence = self._next_waiting()
            if sequence is None:
                return
            self.waiting_looked_at += 1
            if not self.cache.admit(sequence, sequence.num_tokens, headroom=len(self.running)):
                return
            del self.waiting[sequence]
            self.running.append(sequence)
            sequence.status = SequenceStatus.RUNNING
            sequence.request.started = True
            sequence.request.record("scheduled", sequence.sample_index)
            budget -= _plan_chunk(plan, sequence, budget)

    def _next_waiting(self) -> Sequence | None:
        """The head of the queue; while admission is closed, only if its request has started."""
        if not self.waiting:
            return None
        head = next(iter(self.waiting))
        return head if self.admission_open or head.request.started else None


def _plan_chunk(plan: StepPlan, sequence: Sequence, budget: int) -> int:
    """Plan as much of a prefill as the budget allows; the tokens planned."""
    start, total = sequence.num_computed, sequence.num_tokens
    length = min(total - start, budget)
    plan.add(sequence, start, length, start + length == total)
    return length
