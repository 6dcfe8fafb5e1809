"""Guess tokens ahead with a second, smaller model: what it would go on with, greedily, one token after the other.

Each sequence that is guessed of has one that stands for it in a cache of the draft model's own: it has the same tokens,
of which the draft model's keys and values are computed in as few forward calls as there are rows for. From the logits
behind its last token on, all sequences of a step go on together, a forward call for each token.

Invariants
----------
* Nothing of it reaches a result: what is guessed is computed by the engine, and kept only where it is drawn.
* A call computes what has come since the last one, at most `max_rows` tokens of it, and what it guesses; nothing
  depends on the length of what is known. What is behind by more is guessed of by a later call.
* Tokens that begin alike are computed once, as in any cache of prefixes: one sequence computes them, others that need
  them wait, and are not guessed of meanwhile. A block is published when all of its tokens are certain.
* Memory is what the pool was given. The first to come keep theirs; it is taken from a sequence that was not asked for
  in `IDLE_CALLS` calls, or has ended. A sequence that finds none is not guessed of, and tried again by the next call.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from samebit.rollout.cache import Cache
from samebit.rollout.drafts.trust import Trust
from samebit.rollout.engine.step_plan import Runner, StepInFlight, StepPlan
from samebit.rollout.requests.request import Request, Sequence
from samebit.rollout.requests.shared import IntArray
from samebit.rollout.sampling_params import SamplingParams

IDLE_CALLS = 32
"""After so many calls that do not ask for it, a sequence loses its blocks to one that needs them."""


@dataclass(slots=True, eq=False)
class _Followed:
    """Holds what the draft model knows of a sequence.

    own: stands for it in the cache; what is computed of it is of certain tokens, but for the guesses behind. call: that
    asked for it last. guessed: what was guessed last, of the tokens from `place` on. foreign: it has tokens that the
    model does not know.
    """

    own: Sequence
    trust: Trust
    call: int = 0
    guessed: tuple[int, ...] = ()
    place: int = 0
    foreign: bool = False

    def learn(self) -> None:
        """Take back what was computed of wrong guesses, and trust the model by how many were right."""
        own, place, guessed = self.own, self.place, self.guessed
        came = own.token_ids[place : min(place + len(guessed), own.num_tokens)].tolist()
        right = next((at for at, token in enumerate(came) if token != guessed[at]), len(came))
        self.trust.learn(right, len(guessed), own.num_tokens)
        own.num_computed = min(place + min(right, len(guessed) - 1), own.num_tokens - 1)
        self.guessed = ()


class DraftModel:
    """Guesses with a model. Implements `samebit.rollout.drafts.drafter.Proposer`.

    runner, cache: of the draft model alone. max_rows: tokens that a call computes of what is known. num_tokens: the
    most that are guessed of a sequence. max_len: tokens that a sequence may have.
    """

    def __init__(self, runner: Runner, cache: Cache, *, max_rows: int, num_tokens: int, max_len: int) -> None:
        self._runner = runner
        self._cache = cache
        self._max_rows = max_rows
        self._num_tokens = num_tokens
        self._max_len = min(max_len, cache.pool.num_blocks * cache.block_size)
        self._followed: OrderedDict[Sequence, _Followed] = OrderedDict()
        self._behind: set[Sequence] = set()
        self._calls = 0
        self._awake = True
        runner.allocate_cache(cache.pool.num_blocks)

    @property
    def num_blocks(self) -> tuple[int, int]:
        return self._cache.pool.num_blocks, self._cache.pool.num_free

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        if not self._awake:
            self._runner.allocate_cache(self._cache.pool.num_blocks)
            self._awake = True
        self._calls += 1
        self._cache.sweep()
        wanted = [self._wanted(sequence, count) for sequence, count in asked]
        plan, going_on = StepPlan(), list[tuple[_Followed, int]]()
        for followed, count in wanted:
            count = self._take_seat(followed, count) if count and plan.num_tokens < self._max_rows else 0
            if count and self._plan_known(plan, followed.own):
                going_on.append((followed, count))
        if plan.items:
            self._compute(plan, going_on)
        return [followed.guessed[:count] for followed, count in wanted]

    def forget(self, sequence: Sequence) -> None:
        followed = self._followed.pop(sequence, None)
        if followed is None:
            return
        self._leave_seat(followed)
        self._behind.discard(followed.own)
        self._cache.forget(followed.own)
        if not self._followed:
            self._runner.forget_sequences()

    def release(self) -> None:
        if not self._awake:
            return
        for sequence in list(self._followed):
            self.forget(sequence)
        self._cache.clear_index()
        self._runner.release_cache()
        self._awake = False

    # -- what is known of a sequence ---------------------------------------------------------------

    def _wanted(self, sequence: Sequence, count: int) -> tuple[_Followed, int]:
        """Return what is known of a sequence, brought up to date, and how many tokens to guess of it; 0 for none."""
        followed = self._followed.get(sequence)
        if followed is None:
            followed = self._followed[sequence] = self._follow(sequence)
        self._followed.move_to_end(sequence)
        followed.call = self._calls
        own, known = followed.own, sequence.num_tokens
        if known > own.num_tokens:
            followed.foreign |= self._is_foreign(sequence.token_ids[own.num_tokens : known])
            own.token_ids, own.num_tokens = sequence.token_ids, known
            if followed.guessed:
                followed.learn()
        count = min(count, followed.trust.asked(known), self._max_len - known)
        return followed, 0 if followed.foreign else max(count, 0)

    def _follow(self, sequence: Sequence) -> _Followed:
        shared = sequence.shared
        request = Request(
            shared.request_id,
            shared.prompt,
            SamplingParams(temperature=0.0, cache_salt=shared.params.cache_salt),
            ordinal=0,
            max_new_tokens=1,
        )
        self._cache.track(request)
        (own,) = request.sequences
        return _Followed(own, Trust.begin(self._num_tokens), foreign=self._is_foreign(shared.prompt))

    def _is_foreign(self, tokens: IntArray) -> bool:
        return bool(tokens.max(initial=0) >= self._runner.vocab_size)

    # -- memory ------------------------------------------------------------------------------------

    def _take_seat(self, followed: _Followed, count: int) -> int:
        """Give a sequence blocks for its tokens and for guesses; return for how many of these, 0 if there are none."""
        own, cache = followed.own, self._cache
        if own.slot < 0 and not self._admit(own):
            return 0
        todo = own.num_tokens - own.num_computed
        if not todo:  # no token has come since
            return 0
        if cache.reserve(own, todo + count - 1):
            return count
        while not cache.reserve(own, todo):
            if not self._take_idle_seat():
                self._leave_seat(followed)  # the others may go on
                return 0
        return 1

    def _admit(self, own: Sequence) -> bool:
        if own in self._behind:
            return False
        if self._cache.follow(own):
            self._behind.add(own)
            return False
        while not self._cache.admit(own):
            if not self._take_idle_seat():
                return False
        return True

    def _take_idle_seat(self) -> bool:
        """Take the blocks of the sequence that was not asked for the longest; tell whether there was one."""
        for followed in self._followed.values():
            if self._calls - followed.call < IDLE_CALLS:
                return False
            if followed.own.slot >= 0:
                self._leave_seat(followed)
                return True
        return False

    def _leave_seat(self, followed: _Followed) -> None:
        if followed.own.slot >= 0:
            self._behind.difference_update(self._cache.take_back(followed.own, waits_again=True))
            followed.own.forget_computed()
            followed.guessed = ()

    # -- computing ---------------------------------------------------------------------------------

    def _plan_known(self, plan: StepPlan, own: Sequence) -> bool:
        """Plan what is not computed of a sequence, as far as there are rows; tell whether that is all."""
        start = own.num_computed
        length = min(own.num_tokens - start, self._max_rows - plan.num_tokens)
        ends = start + length == own.num_tokens
        plan.add(own, start, length, int(ends))
        return ends

    def _compute(self, plan: StepPlan, going_on: list[tuple[_Followed, int]]) -> None:
        """Compute what is planned, and guess behind the sequences that are computed to their ends, all of them at
        once."""
        plan.copies = self._cache.take_copies()
        steps = [(going_on, self._launch(plan, None))]
        for item in plan.items:
            item.sequence.num_computed = item.start + item.length
            self._behind.difference_update(self._cache.publish_blocks(item.sequence))
        for number in range(1, max((count for _, count in going_on), default=1)):
            before, last = steps[-1]
            rows = [row for row, (_, count) in enumerate(before) if count > number]
            ahead = StepPlan(sources=rows)
            for row in rows:
                own = before[row][0].own
                ahead.add(own, own.num_tokens + number - 1, 1, 1)
            steps.append(([before[row] for row in rows], self._launch(ahead, last)))
        self._take(steps)

    def _launch(self, plan: StepPlan, before: StepInFlight | None) -> StepInFlight:
        return self._runner.launch(plan, self._cache.tables.rows, before)

    def _take(self, steps: list[tuple[list[tuple[_Followed, int]], StepInFlight]]) -> None:
        """Note what was guessed, as far as logits were finite."""
        for number, (going_on, step) in enumerate(steps):
            if not going_on:
                continue
            result = step.result()
            tokens, finite = result.token_ids.tolist(), result.finite.tolist()
            for row, (followed, _) in enumerate(going_on):
                if number == 0:
                    followed.place = followed.own.num_tokens
                if finite[row] and len(followed.guessed) == number:
                    followed.guessed = (*followed.guessed, tokens[row])
