"""Find the likeliest tokens of rows of logits, and their log-probabilities.

Invariant: of tokens that are equally likely the lower ids come first, on every device.
"""

from __future__ import annotations

import numpy as np
import torch

from samebit.kernels.layout.transfer import indices
from samebit.kernels.ops.logprobs import log_softmax
from samebit.rollout.requests.request import Sequence, TopLogprobs

_PART = 128
"""Tokens of the vocabulary, whose likeliest is looked at first."""

_MOST_PLACES = 1 << 24
"""Limits how many tokens of all rows are put in order at once, as numbers of eight bytes."""


def rows_by_count(sequences: list[Sequence]) -> dict[int, list[int]]:
    """Return the rows that ask for likely tokens, by how many they ask for."""
    found: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if sequence.params.logprobs is not None:
            found.setdefault(sequence.params.logprobs, []).append(row)
    return found


def top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, temperatures: torch.Tensor,
    likely: dict[int, list[int]],
) -> TopLogprobs:  # fmt: skip
    """Find the likeliest tokens for all rows at once that ask for as many (`likely`: from `rows_by_count`); ``scores``:
    of the tokens, which is all that 0 asks for."""
    result: TopLogprobs = [None] * len(logits)
    at: slice | torch.Tensor
    found: TopLogprobs
    for count, rows in likely.items():
        at = slice(None) if len(rows) == len(logits) else indices(np.array(rows, np.int64), logits.device)
        if count:
            found = most_likely(logits[at], tokens[at], temperatures[at], count)
        else:
            found = [{token: score} for token, score in zip(tokens[at].tolist(), scores[at].tolist(), strict=True)]
        for row, entry in zip(rows, found, strict=True):
            result[row] = entry
    return result


def most_likely(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor, count: int) -> TopLogprobs:
    """Return the ``count`` likeliest tokens of each row and the row's own token, with their log-probabilities.

    Of those that are equally likely the lower ids come first, and stay.
    """
    scores = log_softmax(logits, temperatures)
    count = min(count, scores.shape[1])
    at_once = max(1, _MOST_PLACES // (_PART * (count + 1)))
    best = torch.cat([_largest(rows, count) for rows in scores.split(at_once)])
    own = scores.gather(1, tokens[:, None])[:, 0]
    on_host = (part.tolist() for part in (best, scores.gather(1, best), tokens, own))
    rows: TopLogprobs = []
    for ids, values, token, score in zip(*on_host, strict=True):
        entry = dict(zip(ids, values, strict=True))
        entry.setdefault(token, score)
        rows.append(entry)
    return rows


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the largest of each row, ``[R, count]``: they lie in the parts with the largest peaks, or
    behind the last whole part. (`torch.topk` of whole rows copies them, on the CPU, and says nothing about ties.)"""
    vocab = scores.shape[1]
    parts = vocab // _PART
    ids = torch.arange(vocab, device=scores.device)
    peaks = scores[:, : parts * _PART].unflatten(1, (parts, _PART)).amax(2)
    best = _order(peaks, ids[:parts]).topk(min(count, parts), dim=1).indices
    inside = (best[:, :, None] * _PART + ids[:_PART]).flatten(1)
    left = torch.cat([inside, ids[parts * _PART :].expand(len(scores), -1)], dim=1)
    return left.gather(1, _order(scores.gather(1, left), left).topk(count, dim=1).indices)


def _order(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers in the order of the scores, and of ties from the higher id to the lower; no two are equal.

    The bits of a float32, of which those of a negative one are turned round, are in its order.
    """
    bits = scores.view(torch.int32)
    return ((bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32) - ids
