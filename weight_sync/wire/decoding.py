"""Translate messages between processes: dataclasses, written as JSON and read back by the types of their fields.

Invariants
----------
* `decode` is the only way in for what a peer says. Every field of the message has the type that its dataclass declares,
  or `SyncBrokenError` is raised. Time and memory are in proportion to the bytes, which the caller bounds.
* A number is from 0 to 2**64 - 1, a text can be encoded; no field is missing and none is added. A dataclass checks
  anything more in `__post_init__`, by `ValueError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import IntEnum
from functools import cache
from reprlib import Repr
from types import UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import torch

from samebit.weight_sync.digest import DTYPES
from samebit.weight_sync.report import SyncBrokenError

_KIND = "kind"
_MOST_DIGITS = 20
_short = Repr()
_short.maxstring = 80
T = TypeVar("T")


def encode(message: object) -> bytes:
    """Return the message, a dataclass, as JSON with the name of its class."""
    body = {_KIND: type(message).__name__, **vars(message)}
    return json.dumps(body, default=_plain, ensure_ascii=False).encode()


def decode(data: bytes, *kinds: type[T]) -> T:
    """Return the message in `data`. Raises `SyncBrokenError` unless it is a valid one of these classes."""
    body = _parsed(data)
    name = body.pop(_KIND, None)
    for kind in kinds:
        if name == kind.__name__:
            return build(kind, body)
    raise SyncBrokenError(f"a message of the kind {_short.repr(name)} came out of turn")


def build(kind: type[T], fields: Mapping[str, object]) -> T:
    """Return a dataclass of values that a peer gave. Raises `SyncBrokenError` for a value of the wrong type."""
    try:
        built: T = _dataclass(kind, fields)
    except ValueError as error:
        raise SyncBrokenError(f"a {kind.__name__} that is not valid: {error}") from error
    return built


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data.decode(), parse_int=_integer, parse_float=_no_number, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise SyncBrokenError(f"a message that is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise SyncBrokenError(f"a message that is not an object but a {type(body).__name__}")
    return body


def _integer(digits: str) -> int:
    return int(digits) if len(digits) <= _MOST_DIGITS else _no_number(digits)


def _no_number(digits: str) -> NoReturn:
    raise ValueError(f"the number {_short.repr(digits)}")


def _plain(value: object) -> object:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else vars(value)


@cache
def _fields(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _dataclass(kind: type[Any], given: object) -> Any:
    fields = _fields(kind)  # type: ignore[arg-type]  # mypy looks for the hash of an instance
    if not isinstance(given, Mapping) or given.keys() != fields.keys():
        raise ValueError(f"it has the fields {', '.join(fields)}, got {_short.repr(given)}")
    return kind(**{name: _value(hint, given[name]) for name, hint in fields.items()})


def _value(hint: Any, given: object) -> object:
    if get_origin(hint) is tuple:
        if not isinstance(given, list):
            raise _unexpected("a list", given)
        return tuple(_value(get_args(hint)[0], one) for one in given)
    if isinstance(hint, UnionType):
        inner, _ = get_args(hint)  # of `X | None`
        return None if given is None else _value(inner, given)
    if is_dataclass(hint):
        return _dataclass(hint, given)  # type: ignore[arg-type]
    return _scalar(hint, given)


def _scalar(hint: Any, given: object) -> object:
    if hint is torch.dtype:
        if not isinstance(given, str) or given not in DTYPES:
            raise _unexpected("a dtype", given)
        return DTYPES[given]
    expected = int if issubclass(hint, IntEnum) else hint
    if type(given) is not expected:
        raise _unexpected(f"{expected.__name__}", given)
    if isinstance(given, int) and not 0 <= given < 1 << 64:
        raise _unexpected("a number from 0 to 2**64 - 1", given)
    if isinstance(given, str):
        given.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
    return hint(given)


def _unexpected(expected: str, given: object) -> ValueError:
    return ValueError(f"{expected} was expected, got {_short.repr(given)}")
