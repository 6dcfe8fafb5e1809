"""Hold what the samples of one prompt have to guess from: their prompt, what other samples have made of it, and each
its own tokens.

Invariant: an index covers a text from its beginning; texts only grow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from samebit.rollout.drafts.ngram_index import NgramIndex
from samebit.rollout.requests.request import Sequence
from samebit.rollout.requests.shared import IntArray

Kept = npt.NDArray[np.int32]

CONTEXT = 32
"""The most tokens at a sequence's end that are looked for, but for an n-gram of more."""


class Text:
    """Holds tokens that others are put behind."""

    __slots__ = ("_index", "_memory", "_size")

    def __init__(self, tokens: IntArray, gram: int) -> None:
        self._memory, self._size = tokens, len(tokens)
        self._index = NgramIndex(gram)

    def append(self, tokens: IntArray | Kept) -> None:
        """Put tokens behind those that are there; the array that it began with is not written to."""
        size = self._size + len(tokens)
        if size > len(self._memory):
            memory = np.empty(2 * size, np.int64)
            memory[: self._size] = self._memory[: self._size]
            self._memory = memory
        self._memory[self._size : size] = tokens
        self._size = size

    def after(self, context: IntArray, count: int) -> tuple[int, IntArray]:
        """Return the length of the longest match of the context's end, and up to `count` tokens behind it."""
        tokens = self._memory[: self._size]
        length, place = self._index.find(tokens, context)
        return length, tokens[place : place + count] if length else tokens[:0]


class Group:
    """Holds the texts of a prompt's samples.

    left: samples that have not ended. outputs: of those that have, for the next time that the prompt comes.
    """

    __slots__ = ("_gram", "_own", "_text", "left", "outputs")

    def __init__(self, prompt: IntArray, before: list[Kept], count: int, gram: int) -> None:
        self.left = count
        self.outputs: list[Kept] = []
        self._gram = gram
        self._own: dict[int, NgramIndex] = {}
        self._text = Text(prompt, gram)
        for output in before:
            self._text.append(output)

    def guess(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Return up to `count` tokens that may follow, those behind the longest match of the sequence's end: in its own
        output, where that is as long as any elsewhere."""
        end = sequence.num_tokens
        context = sequence.token_ids[max(0, end - max(CONTEXT, self._gram)) : end]
        own = self._own.setdefault(sequence.sample_index, NgramIndex(self._gram))
        output = sequence.output_ids
        length, place = own.find(output, context)
        other, tokens = self._text.after(context, count)
        best = output[place : place + count] if length and length >= other else tokens
        return tuple(best.tolist())

    def end(self, sequence: Sequence) -> None:
        """Let the other samples guess from what an ended one has made."""
        self.left -= 1
        self._own.pop(sequence.sample_index, None)
        output = sequence.output_ids
        if len(output):
            self._text.append(output)
            self.outputs.append(output.astype(np.int32))
