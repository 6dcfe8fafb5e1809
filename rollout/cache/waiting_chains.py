"""Where the prompts that wait leave the chain of a running one: there a checkpoint will be wanted.

Invariants
----------
* Each block of each announced chain is counted once, so a chain that holds a block holds all before it.
* Announcing and withdrawing cost O(blocks of that chain), asking O(1); nothing depends on how many wait.
"""

from __future__ import annotations

from collections import Counter


class WaitingChains:
    def __init__(self) -> None:
        self._holders: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def announce(self, digests: list[bytes]) -> None:
        """A prompt waits that could resume behind any of these blocks."""
        self._holders.update(digests)

    def withdraw(self, digests: list[bytes]) -> None:
        """It does not wait any more."""
        for digest in digests:
            if self._holders[digest] == 1:
                del self._holders[digest]
            else:
                self._holders[digest] -= 1

    def leave(self, digest: bytes, following: bytes | None) -> bool:
        """Whether a waiting chain holds this block and not the one that follows it on the chain of who asks."""
        return self._holders[digest] > (0 if following is None else self._holders[following])
