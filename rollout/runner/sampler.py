"""Make tokens of a step's logits: parameters of each row, random numbers, what is reported.

Invariants
----------
* Processing (penalties, biases, filters) changes the choice only: rows are put back before anything else is read of
  them.
* Where several samples draw from one row, there are at most `max_rows` rows of copies at a time.
* At temperature 0 the choice is greedy and the report is at temperature 1.
* What is drawn depends on the position that a token goes to, not on what its sequence holds when it is drawn. (A
  grammar, a repetition penalty and likely tokens are the exceptions: see `SamplingParams.can_run_ahead`.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout.options import Filters
from samebit.kernels.layout.transfer import Arrival, indices
from samebit.kernels.ops import sampling as kernels
from samebit.kernels.ops.logprobs import logprobs_of_rows
from samebit.rollout.engine.step_plan import StepResult
from samebit.rollout.requests.request import Sequence, TopLogprobs
from samebit.rollout.runner.likely_tokens import rows_by_count, top_logprobs
from samebit.rollout.runner.seen_tokens import SeenTokens, seen_by
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.structured_outputs.grammars import Grammar
from samebit.rollout.structured_outputs.matching import Matcher, followed, rule_out_all_but

Words = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.int64]

_UNSEEDED = 1 << 31
"""Set in the counter of requests without a seed: their streams never meet those of seeded ones."""

_WORD = 0xFFFFFFFF

LARGEST_LOGIT = 3e38
"""A logit is at most this, the greatest of float32, with room for rounding where it is divided by a temperature
again."""


@dataclass(frozen=True, eq=False)
class DrawInputs:
    """Holds what R draws need besides the logits, on the host or on the device.

    rows: ``[R]`` int64, of the logits: a fork draws from the row of the sequence that it left. temperatures: ``[R]``
    float32. keys, counters: of the random numbers, ``[R, 2]`` and ``[R, 4]`` uint32.
    """

    rows: torch.Tensor
    temperatures: torch.Tensor
    keys: torch.Tensor
    counters: torch.Tensor

    def part(self, at: slice) -> DrawInputs:
        """Return what some of the draws need."""
        return DrawInputs(self.rows[at], self.temperatures[at], self.keys[at], self.counters[at])


NO_DRAWS = DrawInputs(
    rows=torch.zeros(0, dtype=torch.int64, device="cpu"),
    temperatures=torch.zeros(0, dtype=torch.float32, device="cpu"),
    keys=torch.zeros(0, 2, dtype=torch.uint32, device="cpu"),
    counters=torch.zeros(0, 4, dtype=torch.uint32, device="cpu"),
)
"""Is what a step needs from which nothing is drawn."""


@dataclass(frozen=True, eq=False)
class Draws:
    """Holds what was drawn. tokens: ``[R]`` int64, where the logits are. top: each row's likeliest, None if unasked."""

    tokens: torch.Tensor
    found: Arrival
    top: TopLogprobs | None

    def result(self) -> StepResult:
        """Return it on the host; wait for the device."""
        chosen, scores, at_one = self.found.numpy()
        logprobs, raw = scores.astype(np.float32), at_one.astype(np.float32)
        return StepResult(
            token_ids=chosen.astype(np.int64),
            logprobs=logprobs,
            raw_logprobs=raw,
            finite=np.isfinite(logprobs) & np.isfinite(raw),
            top_logprobs=self.top,
        )


@dataclass(frozen=True, eq=False)
class _Kept:
    """Holds rows of the logits as they are before they are processed; `at`: which, on their device."""

    at: torch.Tensor
    logits: torch.Tensor

    def put_back(self, logits: torch.Tensor) -> None:
        logits.index_copy_(0, self.at, self.logits)


@dataclass(frozen=True, eq=False)
class _Streams:
    """Holds what sequences draw from at any position: of the step before, since most steps have the same sequences.

    greedy: a temperature is 0. scaled: one is neither 0 nor 1. processed: the rows whose logits may be. likely: by a
    count of likely tokens, the rows that ask for as many. seen: what is kept of those that are penalized.
    matchers: where those that are constrained are in their grammars.
    """

    sequences: list[Sequence]
    temperatures: torch.Tensor
    keys: torch.Tensor
    counters: Words
    greedy: bool
    scaled: bool
    processed: list[int]
    likely: dict[int, list[int]]
    seen: dict[Sequence, SeenTokens]
    matchers: dict[Sequence, Matcher]

    def part(self, at: slice) -> _Streams:
        """Return it of some of the sequences; what they draw from, `DrawInputs.part` has."""
        some = self.sequences[at]
        return replace(self, sequences=some, processed=_to_process(some), likely=rows_by_count(some))


class Sampler:
    """Chooses the next token of each row and reports its log-probability."""

    def __init__(self, seed: int, exact: bool, max_rows: int) -> None:
        self.seed = seed
        self.max_rows = max_rows
        self._last: _Streams | None = None
        self._exact = exact

    def forget_sequences(self) -> None:
        """Keep nothing of the sequences of the step before."""
        self._last = None

    def draw_inputs(self, sequences: list[Sequence], positions: Positions, rows: npt.NDArray[np.int64]) -> DrawInputs:
        """Return what drawing each sequence's token for its position needs; on the host."""
        streams = self._streams(sequences)
        counters = streams.counters.copy()
        counters[:, 0] = positions
        return DrawInputs(torch.from_numpy(rows), streams.temperatures, streams.keys, torch.from_numpy(counters))

    def _streams(self, sequences: list[Sequence]) -> _Streams:
        if self._last is None or self._last.sequences != sequences:
            self._last = self._worked_out(sequences)
        return self._last

    def _worked_out(self, sequences: list[Sequence]) -> _Streams:
        """Work out what sequences draw from in all steps."""
        words = [self._words(sequence) for sequence in sequences]
        keys = np.array([key for key, _ in words], np.uint32).reshape(-1, 2)
        counters = np.array([counter for _, counter in words], np.uint32).reshape(-1, 4)
        each = [sequence.params for sequence in sequences]
        temperatures = [one.temperature for one in each]
        return _Streams(
            sequences, torch.tensor(temperatures, dtype=torch.float32), torch.from_numpy(keys), counters,
            greedy=0 in temperatures,
            scaled=not {0, 1}.issuperset(temperatures),
            processed=_to_process(sequences),
            likely=rows_by_count(sequences),
            seen=seen_by(sequences, {} if self._last is None else self._last.seen),
            matchers=followed(_grammars(sequences), {} if self._last is None else self._last.matchers),
        )  # fmt: skip

    def _words(self, sequence: Sequence) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the words of a sequence's key, and those of its counter at position 0."""
        seed, stream = sequence.params.seed, 0
        if seed is None:
            seed, stream = self.seed, sequence.shared.ordinal | _UNSEEDED << 32
        return (seed & _WORD, seed >> 32 & _WORD), (0, sequence.sample_index, stream & _WORD, stream >> 32)

    def sample(
        self, logits: torch.Tensor, sequences: list[Sequence], positions: Positions, inputs: DrawInputs
    ) -> Draws:
        """Draw one token a row; does not wait for the device, unless likely tokens are asked for.

        Args:
            logits: ``[R, V]`` float32, unprocessed, or fewer where several draw from one row.
            sequences: the R sequences, and the positions that their tokens go to.
            inputs: theirs, on the device of the logits.
        """
        streams = self._streams(sequences)
        if len(logits) == len(sequences):
            tokens, found, top = self._drawn(logits.contiguous(), streams, positions, inputs)
            return Draws(tokens, Arrival(found), top)
        parts = [
            self._drawn(logits[inputs.rows[at]], streams.part(at), positions[at], inputs.part(at))
            for at in (slice(first, first + self.max_rows) for first in range(0, len(sequences), self.max_rows))
        ]
        return Draws(
            torch.cat([tokens for tokens, _, _ in parts]),
            Arrival(torch.cat([found for _, found, _ in parts], dim=1)),
            [row for tokens, _, top in parts for row in top or [None] * len(tokens)] if streams.likely else None,
        )

    def _drawn(
        self, logits: torch.Tensor, streams: _Streams, positions: Positions, inputs: DrawInputs
    ) -> tuple[torch.Tensor, torch.Tensor, TopLogprobs | None]:
        """Draw one token for each of the rows ``[R, V]``; return what `Draws` holds."""
        report_at = inputs.temperatures
        if streams.greedy:
            report_at = torch.where(report_at == 0, 1.0, report_at)
        kept = _process(logits, streams, positions)
        tokens, found = self._sample(logits, inputs, report_at, streams.scaled, kept)
        top = top_logprobs(logits, tokens, found[1], report_at, streams.likely) if streams.likely else None
        return tokens, found, top

    def _sample(
        self, logits: torch.Tensor, inputs: DrawInputs, report_at: torch.Tensor, scaled: bool, kept: _Kept | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as `kernels.sample`, but report of the logits before they were processed, which are put back."""
        sampled = kernels.sample(logits, inputs.temperatures, inputs.keys, inputs.counters) if self._exact else None
        if sampled is None:
            return self._drawn_then_scored(logits, inputs, report_at, scaled, kept)
        tokens, found = sampled
        if kept is not None:  # the one call has scored these rows as they were processed
            kept.put_back(logits)
            found[1:, kept.at] = self._scores(kept.logits, tokens[kept.at], report_at[kept.at], scaled)
        return tokens, found

    def _drawn_then_scored(
        self, logits: torch.Tensor, inputs: DrawInputs, report_at: torch.Tensor, scaled: bool, kept: _Kept | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as `_sample` in calls of their own: draw, put back what was processed, and only then score."""
        chosen = kernels.draw(logits, inputs.temperatures, kernels.uniforms(inputs.keys, inputs.counters))
        if kept is not None:
            kept.put_back(logits)
        tokens = chosen.clamp(min=0)
        return tokens, torch.cat([chosen.double()[None], self._scores(logits, tokens, report_at, scaled)])

    def _scores(
        self, logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor, scaled: bool
    ) -> torch.Tensor:
        """Return the tokens' log-probabilities, and those at temperature 1, ``[2, R]`` float64."""
        report = logprobs_of_rows if self._exact else _torch_logprobs
        scores = report(logits, tokens, temperatures)
        at_one = report(logits, tokens, torch.ones_like(temperatures)) if scaled else scores
        return torch.stack([scores.double(), at_one.double()])


def _to_process(sequences: list[Sequence]) -> list[int]:
    """Return the rows whose logits may be processed."""
    return [row for row, one in enumerate(sequences) if one.params.changes_logits or one.params.min_tokens]


def _grammars(sequences: list[Sequence]) -> dict[Sequence, Grammar]:
    """Return the grammars of those sequences that are constrained."""
    return {one: grammar for one in sequences if (grammar := one.shared.grammar) is not None}


def _torch_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Compute what most engines report (``exact=False``)."""
    return torch.log_softmax(logits / temperatures[:, None], dim=-1).gather(1, tokens[:, None])[:, 0]


def _process(logits: torch.Tensor, streams: _Streams, positions: Positions) -> _Kept | None:
    """Process in place the rows that want it now; return them as they were."""
    rows: dict[int, bool] = {}
    for row in streams.processed:
        sequence = streams.sequences[row]
        may_end = bool(positions[row] >= sequence.num_prompt_tokens + sequence.params.min_tokens)
        if sequence.params.changes_logits or not may_end:
            rows[row] = may_end
    if not rows:
        return None
    at = indices(np.array(list(rows), np.int64), logits.device)
    kept = _Kept(at, logits.index_select(0, at))
    if streams.matchers:
        _constrain(logits, streams)
    for row, may_end in rows.items():
        sequence = streams.sequences[row]
        _process_row(logits[row], sequence, streams.seen.get(sequence), may_end)
    filtered = [row for row in rows if streams.sequences[row].params.filters]
    if filtered:
        kernels.keep_likely(logits, _filters(filtered, streams.sequences, logits.shape[1]))
    return kept


def _constrain(logits: torch.Tensor, streams: _Streams) -> None:
    """Rule out what grammars do not allow, before all else as in vLLM: no filter counts what can not be chosen."""
    places = [row for row in streams.processed if streams.sequences[row].shared.grammar is not None]
    if places:
        matchers = [streams.matchers[one].take(one.output_ids) for one in (streams.sequences[row] for row in places)]
        rule_out_all_but(logits, places, matchers)


def _filters(rows: list[int], sequences: list[Sequence], vocab: int) -> Filters:
    """Return what the sequences of these rows ask for."""
    asked = [sequences[row].params for row in rows]
    return Filters(
        np.array(rows, np.int64),
        np.array([one.temperature for one in asked], np.float64),
        np.array([min(one.top_k, vocab) for one in asked], np.int64),
        np.array([one.top_p for one in asked], np.float64),
        np.array([one.min_p for one in asked], np.float64),
    )


def _process_row(row: torch.Tensor, sequence: Sequence, seen: SeenTokens | None, may_end: bool) -> None:
    """Apply bias, penalties and forbidden ends; the filters follow, for all rows at once: the order of vLLM.

    What a penalty or a bias drives beyond float32 stays at its end, so that a choice is left.
    """
    params = sequence.params
    if params.logit_bias:
        kernels.add_bias(row, params.logit_bias)
    if seen is not None:
        _penalize(row, seen.take(sequence.output_ids), params)
    if params.logit_bias or params.penalizes:
        row.clamp_(max=LARGEST_LOGIT * min(1.0, params.temperature or 1.0))
    if not may_end:
        kernels.rule_out(row, tuple(sequence.shared.end_ids))


def _penalize(row: torch.Tensor, seen: SeenTokens, params: SamplingParams) -> None:
    if params.repetition_penalty != 1.0:
        kernels.penalize_repetition(row, indices(seen.ids, row.device), params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        kernels.penalize_counts(row, *seen.sampled, params.presence_penalty, params.frequency_penalty)
