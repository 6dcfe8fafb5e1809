"""Follow samples through their grammars, and rule out the tokens that may not come next.

Invariants
----------
* What is allowed depends on the sampled tokens alone: not on the batch, nor on how often a sample was preempted.
* A step reads the tokens since the last one. A sample that was out of the batch is followed from its beginning again.
* Where a text may end, exactly the tokens that end its request may follow, beside those that go on.
* A special token is no text: one that the tokenizer makes of a text is never allowed for it, but what spells it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.transfer import sent
from samebit.rollout.structured_outputs.grammars import Bits, Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor

Sample = TypeVar("Sample")
_WORD = 32


class Matcher:
    """Follows one sample through its grammar."""

    __slots__ = ("_num_taken", "grammar", "place")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.place = grammar.start.copied()
        self._num_taken = 0

    def take(self, output_ids: npt.NDArray[np.int64]) -> Matcher:
        """Go on by the sampled tokens that were not taken yet."""
        new = output_ids[self._num_taken :].tolist()
        if new:
            self.place.consume_tokens(new)
            self._num_taken = len(output_ids)
        return self


def followed(grammars: Mapping[Sample, Grammar], before: Mapping[Sample, Matcher]) -> dict[Sample, Matcher]:
    """Return the matchers of samples of these grammars, those of `before` where they are there."""
    return {one: before[one] if one in before else Matcher(grammar) for one, grammar in grammars.items()}


def rule_out_all_but(logits: torch.Tensor, rows: list[int], matchers: list[Matcher]) -> None:
    """Make impossible, in place, what the matchers of these rows do not allow; ``logits``: ``[R, V]``."""
    vocab = logits.shape[1]
    bits = _allowed(matchers)
    forbidden = np.unpackbits(~bits.view(np.uint8), axis=1, count=vocab, bitorder="little").view(np.bool_)
    there = sent({"forbidden": forbidden}, logits.device)["forbidden"]
    for row, mask in zip(rows, there, strict=True):  # in place: a gather would copy the rows twice
        logits[row].masked_fill_(mask, float("-inf"))


def _allowed(matchers: list[Matcher]) -> Bits:
    """Return a bit a token, ``[rows, words]``; none where a grammar has become too much for the library."""
    words = ceil_div(max(one.grammar.words.width for one in matchers), _WORD)
    bits = np.zeros((len(matchers), words), np.int32)
    _executor(torch.get_num_threads()).unsafe_compute_mask_ptr(
        [(one.place, row) for row, one in enumerate(matchers)], bits.ctypes.data, words * bits.itemsize, len(bits)
    )
    for row, one in zip(bits, matchers, strict=True):
        if one.place.is_error():
            row[:] = 0
        elif (row & one.grammar.words.special).any() and not _spell(row, one):
            _replace_ends(row, one.grammar)
    return bits


def _spell(row: Bits, matcher: Matcher) -> bool:
    """Put what spells a text where it is all that may follow, and the library has a special token for it: one that the
    tokenizer makes of this text, but that is another. Tell whether it was so."""
    token = matcher.grammar.spelled(matcher.place)
    if token is None:
        return False
    row[:] = 0
    row.view(np.uint8)[token >> 3] = 1 << (token & 7)
    return True


def _replace_ends(row: Bits, grammar: Grammar) -> None:
    """Put the request's end tokens where the library has those of the tokenizer."""
    accepting, ending = grammar.words.accepting, grammar.ending
    may_end = any(_bit(row, token) for token in accepting)
    tokens = row.view(np.uint8)
    for token in accepting:
        tokens[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    if may_end:
        for token in ending:
            tokens[token >> 3] |= 1 << (token & 7)


def _bit(row: Bits, token: int) -> bool:
    return bool(row.view(np.uint8)[token >> 3] >> (token & 7) & 1)


@cache
def _executor(num_threads: int) -> LLExecutor:
    """Return what fills masks in parallel, in as many threads as the worker computes with."""
    from llguidance import LLExecutor

    return LLExecutor(num_threads)
