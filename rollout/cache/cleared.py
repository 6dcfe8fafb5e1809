"""Dictionaries that were cleared at once, and are taken apart later, item by item."""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Cleared(Generic[Key, Value]):
    """Adding a dictionary and taking an item cost O(1), whatever their sizes."""

    def __init__(self) -> None:
        self._left: list[dict[Key, Value]] = []

    def __bool__(self) -> bool:
        return bool(self._left)

    def __len__(self) -> int:
        return sum(map(len, self._left))

    def add(self, dictionary: dict[Key, Value]) -> None:
        """Take over a dictionary that its owner has replaced."""
        if dictionary:
            self._left.append(dictionary)

    def pop(self) -> tuple[Key, Value]:
        """Take out one item; there must be one."""
        last = self._left[-1]
        item = last.popitem()
        if not last:
            self._left.pop()
        return item
