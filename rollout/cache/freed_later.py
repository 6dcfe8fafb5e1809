"""Free dictionaries later, item by item: clearing a large one costs nothing at once, and a little in each step after.

What a weight update clears goes this way: `PrefixCache.clear_index` replaces the tree, the order of free blocks and the
checkpoints by empty ones.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class FreedLater(Generic[Key, Value]):
    """Keeps dictionaries that were replaced; adding one and taking an item cost O(1), whatever their sizes."""

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
