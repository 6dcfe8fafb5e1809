"""Hold what the samples of one prompt have to guess from: their prompt, what other samples have made of it, and each
its own tokens.

Invariants
----------
* An index covers a text from its beginning; texts only grow.
* A sample whose guesses are wrong is guessed only behind longer matches: how often a text of short n-grams that come
  again goes on otherwise differs from text to text.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(slots=True)
class Own:
    """Holds what is known of a sample that runs: its output's n-grams, and how its guesses fared.

    least: tokens that must match before a guess, from an n-gram's to `CONTEXT`. guessed: what was guessed last, of the
    tokens from `place` on.
    """

    index: NgramIndex
    least: int
    guessed: tuple[int, ...] = ()
    place: int = 0

    def learn(self, output: IntArray, gram: int) -> None:
        """Ask for a longer match after guesses of which the first was wrong, for a shorter one when all were right."""
        came = output[self.place : self.place + len(self.guessed)].tolist()
        if self.guessed and came[:1] != [self.guessed[0]]:
            self.least = min(2 * self.least, max(CONTEXT, gram))
        elif self.guessed and came == list(self.guessed):
            self.least = max(self.least // 2, gram)
        self.guessed = ()


class Group:
    """Holds the texts of a prompt's samples.

    left: samples that have not ended. outputs: of those that were not aborted, for the next time that the prompt comes.
    """

    __slots__ = ("_ended", "_gram", "_own", "_text", "_texts", "left", "outputs")

    def __init__(self, prompt: IntArray, before: list[Kept], count: int, gram: int) -> None:
        self.left = count
        self.outputs: list[Kept] = []
        self._ended: list[Kept] = []
        self._gram = gram
        self._own: dict[int, Own] = {}
        self._text: Text | None = None
        self._texts = (prompt, before)

    def guess(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Return up to `count` tokens that may follow, those behind the longest match of the sequence's end: in its own
        output, where that is as long as any elsewhere; there the tokens since the match may come again and again."""
        end, output = sequence.num_tokens, sequence.output_ids
        context = sequence.token_ids[max(0, end - max(CONTEXT, self._gram)) : end]
        own = self._own.setdefault(sequence.sample_index, Own(NgramIndex(self._gram), self._gram))
        own.learn(output, self._gram)
        length, place = own.index.find(output, context)
        other, tokens = self._others().after(context, count)
        if max(length, other) < own.least:
            return ()
        if length >= other:
            tokens = output[place + np.arange(count) % (len(output) - place)]
        own.guessed, own.place = tuple(tokens.tolist()), len(output)
        return own.guessed

    def end(self, sequence: Sequence, *, answered: bool) -> None:
        """Let the other samples guess from what an ended one has made. answered: it has ended by itself."""
        self.left -= 1
        self._own.pop(sequence.sample_index, None)
        output = sequence.output_ids
        if len(output):
            self._ended.append(output.astype(np.int32))
            if self._text is not None:
                self._text.append(output)
        if len(output) and answered:
            self.outputs.append(self._ended[-1])

    def _others(self) -> Text:
        """Return the text of the prompt and all outputs, which is made when it is asked for first."""
        if self._text is None:
            prompt, before = self._texts
            self._text = Text(prompt, self._gram)
            for output in (*before, *self._ended):
                self._text.append(output)
        return self._text
