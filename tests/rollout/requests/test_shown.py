"""An error shows the beginning of what was given, and reads no more of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.rollout.checks import shown

TEXTS = st.text(st.characters(exclude_characters="'\""), max_size=400)  # which of them is around depends on the whole
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXTS
    | TEXTS.map(lambda text: text.encode(errors="surrogatepass"))
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=300) | st.lists(inner, max_size=9).map(tuple) | st.dictionaries(TEXTS, inner)
    ),
)


@given(VALUES)
def test_the_beginning_is_that_of_the_whole(value: object) -> None:
    whole = repr(value)
    assert shown(value) == (whole if len(whole) <= 200 else f"{whole[:200]}...")


class Noted:
    """Counts how often one is shown."""

    times = 0

    def __repr__(self) -> str:
        Noted.times += 1
        return "a"


@pytest.mark.parametrize("make", [list, tuple, dict.fromkeys, lambda items: {"a": [list(items)]}])
def test_what_is_not_shown_is_not_read(make: Any) -> None:
    """What stands behind the beginning is not read: a million items took a second of all other requests."""
    Noted.times = 0
    assert shown(make([Noted() for _ in range(10_000)])).endswith("...")
    assert Noted.times < 300


def test_a_value_of_many_levels_is_shown() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert shown(value) == "[" * 200 + "..."
    while value:  # level by level: all at once is too deep
        value = value[0]
