"""Take numbers that a caller gives as the plain Python ones.

Invariant: NumPy's scalars count as the numbers that they hold, a bool as neither an int nor a number. What is no such
number is None here; the caller names the field, the value given and the values allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

T = TypeVar("T")
_LONGEST = 200
"""The most characters of a value that an error shows."""

_LARGEST = float(np.finfo(np.float32).max)
SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)


def as_int(value: object) -> int | None:
    """Return an int or a NumPy integer as an int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return None
    return int(value)


def as_bool(value: object) -> bool | None:
    """Return a bool, Python's or NumPy's, as a bool."""
    return bool(value) if isinstance(value, bool | np.bool_) else None


def as_number(value: object) -> float | None:
    """Return a number that is finite, as a float32 too, as a float: torch takes no int beyond 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    plain = int(value) if isinstance(value, int | np.integer) else float(value)
    return float(plain) if -_LARGEST <= plain <= _LARGEST else None


def as_name(value: object) -> str | None:
    """Return the path of a folder, or a name, as a str."""
    return str(value) if isinstance(value, str | Path) else None


def shown(value: object) -> str:
    """Return what a caller gave as an error shows it, whatever its length: no more of it is read than that."""
    try:
        text = repr(_beginning(value, [_LONGEST]))
    except ValueError:  # an int of more than 4,300 digits has no repr
        text = f"an {type(value).__name__} of too many digits to show"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _beginning(value: object, left: list[int]) -> object:
    """Return a value with as many items as can be shown: each takes a character at least, and so does each level.
    left: how many characters there are behind what was taken."""
    if left[0] < 0:
        return None
    if type(value) is str or type(value) is bytes:
        return value[: _LONGEST + 1]
    if type(value) is dict:
        return {_beginning(key, left): _beginning(one, left) for key, one in _taken(value.items(), left)}
    if type(value) is list:
        return [_beginning(one, left) for one in _taken(value, left)]
    if type(value) is tuple:
        return tuple(_beginning(one, left) for one in _taken(value, left))
    return value


def _taken(items: Iterable[T], left: list[int]) -> Iterator[T]:
    for one in items:
        left[0] -= 1
        yield one
        if left[0] < 0:
            return


def is_positive_number(value: object) -> bool:
    """Return whether a value is a finite number above 0."""
    number = as_number(value)
    return number is not None and number > 0 and math.isfinite(number)


def check_positive_int(name: str, value: object) -> None:
    """Raise ValueError unless a field is an int of at least 1."""
    number = as_int(value)
    if number is None or number < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {shown(value)}")


def check_bool(name: str, value: object) -> None:
    """Raise ValueError unless a field is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")


def check_timeout(timeout: object) -> None:
    """Raise ValueError unless it is a number of seconds to wait, or None."""
    if timeout is not None and timeout != math.inf and as_number(timeout) is None:
        raise ValueError(f"timeout must be a number of seconds or None, got {shown(timeout)}")


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless a field is one of the strings that are allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {shown(value)}")
