"""From a step's logits to its tokens: parameters of each row, random numbers, what is reported.

Invariants
----------
* Processing (penalties, biases, filters) works on a copy of a row and changes the choice only.
* At temperature 0 the choice is greedy and the report is at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels import sampling as kernels
from samebit.kernels.logprobs import log_softmax, logprobs_of_rows
from samebit.rollout.request import Sequence
from samebit.rollout.step import StepResult

_UNSEEDED = 1 << 31
"""Set in the counter of requests without a seed: their streams never meet those of seeded ones."""

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class DrawInputs:
    """What R draws need besides the logits, on the host or on the device.

    rows: ``[R]`` int64, of the logits: a fork draws from the row of the sequence that it left. temperatures: ``[R]``
    float32. keys, counters: of the random numbers, ``[R, 2]`` and ``[R, 4]`` uint32.
    """

    rows: torch.Tensor
    temperatures: torch.Tensor
    keys: torch.Tensor
    counters: torch.Tensor


class Sampler:
    """Chooses the next token of each row and reports its log-probability."""

    def __init__(self, seed: int, exact: bool) -> None:
        self.seed = seed
        self.score = logprobs_of_rows if exact else _torch_logprobs

    def inputs(self, sequences: list[Sequence], rows: npt.NDArray[np.int64]) -> DrawInputs:
        """Of the next token of each sequence, which goes to position ``num_tokens``; on the host."""
        keys = np.empty((len(sequences), 2), np.uint32)
        counters = np.zeros((len(sequences), 4), np.uint32)
        for row, sequence in enumerate(sequences):
            seed = sequence.params.seed
            counters[row, 0] = sequence.num_tokens
            counters[row, 1] = sequence.sample_index
            if seed is None:
                seed = self.seed
                ordinal = sequence.request.ordinal
                counters[row, 2] = ordinal & _WORD
                counters[row, 3] = (ordinal >> 32) | _UNSEEDED
            keys[row, 0] = seed & _WORD
            keys[row, 1] = (seed >> 32) & _WORD
        temperatures = torch.tensor([s.params.temperature for s in sequences], dtype=torch.float32)
        return DrawInputs(torch.from_numpy(rows), temperatures, torch.from_numpy(keys), torch.from_numpy(counters))

    def sample(self, logits: torch.Tensor, sequences: list[Sequence], inputs: DrawInputs) -> StepResult:
        """One token a row; waits for the device once, unless likely tokens are asked for as well.

        Args:
            logits: ``[R, V]`` float32, unprocessed, or fewer where several draw from one row.
            sequences: the R sequences.
            inputs: theirs, on the device of the logits.
        """
        logits = logits.contiguous() if len(logits) == len(sequences) else logits[inputs.rows]
        temperatures = inputs.temperatures
        uniform = kernels.uniforms(inputs.keys, inputs.counters)
        chosen = kernels.draw(_processed(logits, sequences), temperatures, uniform)
        tokens = chosen.clamp(min=0)
        report_at = torch.where(temperatures == 0, 1.0, temperatures)
        scores = self.score(logits, tokens, report_at)
        plain = all(sequence.params.temperature in (0, 1) for sequence in sequences)
        at_one = scores if plain else self.score(logits, tokens, torch.ones_like(report_at))
        found = torch.stack([chosen.double(), scores.double(), at_one.double()]).cpu().numpy()
        logprobs, raw = found[1].astype(np.float32), found[2].astype(np.float32)
        return StepResult(
            token_ids=np.maximum(found[0], 0).astype(np.int64),
            logprobs=logprobs,
            raw_logprobs=raw,
            finite=np.isfinite(logprobs) & np.isfinite(raw) & (found[0] >= 0),
            top_logprobs=_top_logprobs(logits, tokens, report_at, sequences),
        )


def _torch_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """What other engines report (``exact=False``)."""
    return torch.log_softmax(logits / temperatures[:, None], dim=-1).gather(1, tokens[:, None])[:, 0]


def most_likely(
    logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor, count: int
) -> list[dict[int, float] | None]:
    """The ``count`` likeliest tokens of each row and the row's own token, with their log-probabilities."""
    scores = log_softmax(logits, temperatures)
    best = scores.topk(min(count, scores.shape[1]), dim=1)
    rows: list[dict[int, float] | None] = []
    for row, token in enumerate(tokens.tolist()):
        entry = dict(zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True))
        entry.setdefault(token, float(scores[row, token]))
        rows.append(entry)
    return rows


def _top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor, sequences: list[Sequence]
) -> list[dict[int, float] | None] | None:
    if all(sequence.params.logprobs is None for sequence in sequences):
        return None
    result: list[dict[int, float] | None] = [None] * len(sequences)
    for row, sequence in enumerate(sequences):
        count = sequence.params.logprobs
        if count is not None:
            only = slice(row, row + 1)
            result[row] = most_likely(logits[only], tokens[only], temperatures[only], count)[0]
    return result


def _processed(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """``logits`` itself when no row wants processing, else a copy with those rows processed."""
    rows = [
        row
        for row, sequence in enumerate(sequences)
        if sequence.params.reshapes or sequence.num_new_tokens < sequence.params.min_tokens
    ]
    if not rows:
        return logits
    copy = logits.clone()
    for row in rows:
        _process(copy[row], sequences[row])
    return copy


def _process(row: torch.Tensor, sequence: Sequence) -> None:
    """Penalty, bias, forbidden ends, then the filters: the order of vLLM."""
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(sequence.token_ids[: sequence.num_tokens])).to(row.device)
        kernels.penalize_repetition(row, seen, params.repetition_penalty)
    if params.logit_bias:
        kernels.add_bias(row, params.logit_bias)
    if sequence.num_new_tokens < params.min_tokens:
        kernels.rule_out(row, sequence.request.eos_token_ids)
    if params.temperature > 0 and params.filters:
        kernels.keep_likely(row, params.temperature, params.top_k, params.top_p, params.min_p)
