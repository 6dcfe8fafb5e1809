"""Name what only `make soak` runs: cases that take long and guard no behaviour that shorter ones do not guard too."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

CAMPAIGN = "SAMEBIT_SOAK_CASES" in os.environ
"""Says whether this is `make soak`."""

MARKS = (pytest.mark.soak, pytest.mark.skipif(not CAMPAIGN, reason="make soak: takes long"))


def long(test: Any) -> Any:
    """Mark a test that only `make soak` runs."""
    for mark in MARKS:
        test = mark(test)
    return test


def first_of(cases: Sequence[Any], count: int = 1) -> list[Any]:
    """Return the cases of a parametrised test; those after the first ``count`` are for `make soak`."""
    parts = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [*cases[:count], *(pytest.param(*part, marks=MARKS) for part in parts[count:])]


def in_turns(first: Iterable[Any], second: Iterable[Any], *, every: bool = CAMPAIGN) -> list[tuple[Any, Any]]:
    """Return each of the first with the second in turns; or `every` pair."""
    turns = list(second)
    return [
        (one, two)
        for row, one in enumerate(first)
        for turn, two in enumerate(turns)
        if every or row % len(turns) == turn
    ]


def in_pairs(
    first: Iterable[Any], second: Iterable[Any], third: Iterable[Any], *, every: bool = CAMPAIGN
) -> list[tuple[Any, Any, Any]]:
    """Return each of the first with each of the second, and with the third in turns; or `every` combination."""
    turns = list(third)
    return [
        (one, two, three)
        for row, one in enumerate(first)
        for column, two in enumerate(second)
        for turn, three in enumerate(turns)
        if every or (row + column) % len(turns) == turn
    ]
