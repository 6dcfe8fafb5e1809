"""Lay the same sequences out in each way that a trainer may hand them over; each gives their log-probabilities back."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from samebit.kernels import logprobs_from_logits, token_logprobs

from ..campaign import CAMPAIGN

Scores = list[torch.Tensor]
"""Holds for each sequence the log-probabilities of its tokens from the second on."""


def padded(sequences: Sequence[list[int]], left: bool, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask ``[B, T]``."""
    width = max(map(len, sequences)) + extra
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        columns = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, columns] = torch.tensor(sequence)
        mask[row, columns] = 1
    return ids, mask


def packed(sequences: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and positions ``[1, T]``."""
    ids = torch.tensor([token for sequence in sequences for token in sequence])[None]
    return ids, torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None]


def alone(model: nn.Module, sequences: Sequence[list[int]], temperature: float = 1.0) -> Scores:
    return [token_logprobs(model, torch.tensor([s]), temperature=temperature)[0] for s in sequences]


def _from_padded(left: bool, through_logits: bool) -> Callable[..., Scores]:
    def scores(model: nn.Module, sequences: Sequence[list[int]], temperature: float = 1.0) -> Scores:
        ids, mask = padded(sequences, left, extra=3)
        if through_logits:
            logits = model(input_ids=ids, attention_mask=mask).logits
            out = logprobs_from_logits(logits[:, :-1], ids[:, 1:], temperature)
        else:
            out = token_logprobs(model, ids, attention_mask=mask, temperature=temperature)
        predicts = (mask[:, 1:] * mask[:, :-1]).bool()
        return [row[keep] for row, keep in zip(out, predicts, strict=True)]

    return scores


def _from_packed(through_logits: bool) -> Callable[..., Scores]:
    def scores(model: nn.Module, sequences: Sequence[list[int]], temperature: float = 1.0) -> Scores:
        ids, positions = packed(sequences)
        if through_logits:
            logits = model(input_ids=ids, position_ids=positions).logits
            out = logprobs_from_logits(logits[:, :-1], ids[:, 1:], temperature)
        else:
            out = token_logprobs(model, ids, position_ids=positions, temperature=temperature)
        parts = torch.cat([out[0], out.new_zeros(1)]).split([len(sequence) for sequence in sequences])
        return [part[:-1] for part in parts]

    return scores


def _two_micro_batches(model: nn.Module, sequences: Sequence[list[int]], temperature: float = 1.0) -> Scores:
    cut = len(sequences) // 2
    scores = _from_packed(through_logits=False)(model, sequences[cut:], temperature)
    first = _from_padded(left=True, through_logits=False)(model, sequences[:cut], temperature) if cut else []
    return [*first, *scores]


LAYOUTS: dict[str, Callable[..., Scores]] = {
    "alone": alone,
    "left padded": _from_padded(left=True, through_logits=False),
    "right padded": _from_padded(left=False, through_logits=False),
    "packed": _from_packed(through_logits=False),
    "logits of a left-padded batch": _from_padded(left=True, through_logits=True),
    "logits of a right-padded batch": _from_padded(left=False, through_logits=True),
    "logits of a packed batch": _from_packed(through_logits=True),
    "two micro-batches": _two_micro_batches,
}

TURNS = (
    ("left padded", "logits of a packed batch", "logits of a right-padded batch"),
    ("right padded", "packed", "logits of a left-padded batch", "two micro-batches"),
)
"""Lists `LAYOUTS` of several sequences: in each turn each place of the padding, and both ways to log-probabilities."""


def in_turns(families: Sequence[str], family: str) -> list[Callable[..., Scores]]:
    """Return the layouts that a family is compared in: under `make soak` all, and otherwise those of one turn.

    Of two families after each other, which `paired` gives one dtype each, both take the same.
    """
    turn = families.index(family) // 2 % len(TURNS)
    return [LAYOUTS[name] for name in (itertools.chain(*TURNS) if CAMPAIGN else TURNS[turn])]


def assert_same_bits(found: Scores, expected: Scores) -> None:
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"sequence {number}: {int((a != b).sum())} of {len(b)} tokens differ"
