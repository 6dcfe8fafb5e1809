"""An index of n-grams finds what a search of the whole text finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from samebit.rollout.drafts.ngram_index import NgramIndex


def _searched(text: list[int], context: list[int], gram: int) -> int:
    """Return the length of the longest match of the context's end that has a token behind it."""
    lengths = [0]
    for place in range(gram, len(text)):
        length = 0
        while length < min(place, len(context)) and text[place - 1 - length] == context[-1 - length]:
            length += 1
        lengths.append(length if length >= gram else 0)
    return max(lengths)


@given(
    parts=st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=6),
    context=st.lists(st.integers(0, 3), max_size=8),
    gram=st.integers(1, 4),
)
def test_a_match_is_where_a_search_of_the_whole_text_finds_one(
    parts: list[list[int]], context: list[int], gram: int
) -> None:
    index, text = NgramIndex(gram), np.zeros(0, np.int64)
    for part in parts:
        text = np.concatenate([text, np.array(part, np.int64)])
        length, place = index.find(text, np.array(context, np.int64))
        longest = _searched(text.tolist(), context, gram)
        assert bool(length) == bool(longest)
        assert length <= longest
        if length:
            assert place < len(text)
            assert text[place - length : place].tolist() == context[len(context) - length :]


def test_a_long_match_is_preferred_and_a_late_one_of_those_as_long() -> None:
    text = np.array([1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3, 6], np.int64)
    assert NgramIndex(2).find(text, np.array([7, 1, 2, 3], np.int64)) == (3, 3)
    assert NgramIndex(2).find(text, np.array([7, 2, 3], np.int64)) == (2, 11)
    assert NgramIndex(2).find(text, np.array([2, 7], np.int64)) == (0, 0)
