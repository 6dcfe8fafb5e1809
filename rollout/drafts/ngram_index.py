"""Know where the n-grams of a text stand.

Invariant: the text only grows.
"""

from __future__ import annotations

import numpy as np

from samebit.kernels.ops.dispatch import find_match
from samebit.rollout.requests.shared import IntArray

_SMALLEST = 64


class NgramIndex:
    """Finds n-grams of one text. gram: how many tokens an n-gram has."""

    __slots__ = ("_gram", "_known", "_links", "_table")

    def __init__(self, gram: int) -> None:
        self._gram = gram
        self._known = 0
        self._links = self._table = np.zeros(0, np.int32)

    def find(self, tokens: IntArray, context: IntArray) -> tuple[int, int]:
        """Return the length of the longest match of the end of `context` in the text, `tokens`, and the place behind
        it, which is in the text; (0, 0) where no n-gram matches. Of matches as long the last one counts."""
        if len(tokens) >= len(self._links):
            self._make_room(len(tokens))
        found = find_match(tokens, context, self._gram, self._known, self._table, self._links)
        self._known = len(tokens)
        return found

    def _make_room(self, count: int) -> None:
        """Begin anew with room for twice as many tokens: all are linked again by the next search."""
        size = max(_SMALLEST, 1 << (2 * count - 1).bit_length())
        self._links, self._table = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._known = 0
