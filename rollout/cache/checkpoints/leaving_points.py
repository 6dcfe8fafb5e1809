"""Find where the prompts that wait leave the chain of a running one: there a checkpoint will be wanted.

Invariants
----------
* Each block of each chain that was added is counted once, so a chain that holds a block holds all before it.
* Adding and removing cost O(blocks of that chain), asking O(1); nothing depends on how many wait.
"""

from __future__ import annotations

from collections import Counter


class LeavingPoints:
    """Counts the waiting chains that hold each block."""

    def __init__(self) -> None:
        self._holders: Counter[bytes] = Counter()

    def __bool__(self) -> bool:
        return bool(self._holders)

    def add_chain(self, digests: list[bytes]) -> None:
        """Note that a prompt waits which could resume behind any of these blocks."""
        self._holders.update(digests)

    def remove_chain(self, digests: list[bytes]) -> None:
        """Note that a prompt with these blocks does not wait any more."""
        for digest in digests:
            if self._holders[digest] == 1:
                del self._holders[digest]
            else:
                self._holders[digest] -= 1

    def leaves_behind(self, digest: bytes, following: bytes | None) -> bool:
        """Tell whether a waiting chain holds this block, and not `following`, the next one of the chain that asks."""
        return self._holders[digest] > (0 if following is None else self._holders[following])
