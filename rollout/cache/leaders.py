"""Decide who computes a block that several need, or the end of a prompt that will be held again, and who waits.

Invariants
----------
* A digest (or a prompt, `HeldPrompt`) is led by a running sequence that will publish it; when that sequence
  stops leading for any reason, the followers are handed back to the scheduler, and the first of them to be
  admitted leads.
* A follower waits for one digest: the last block that it has in common with what is being computed. It
  holds no memory meanwhile.
* A block that is there already is led too while it is computed again for the state behind it.
"""

from __future__ import annotations

from samebit.rollout.cache.cache_entry import HeldPrompt
from samebit.rollout.requests.block_digests import TokenChain
from samebit.rollout.requests.request import Sequence

Awaited = bytes | HeldPrompt


class Leaders:
    """Knows the leaders and followers of one cache."""

    def __init__(self) -> None:
        self._led: dict[Awaited, Sequence] = {}
        self._leading: dict[Sequence, dict[Awaited, None]] = {}
        self._followers: dict[Awaited, dict[Sequence, None]] = {}
        self._waits_for: dict[Sequence, Awaited] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        """Tell whether a sequence waits behind a leader."""
        return sequence in self._waits_for

    def lead(self, sequence: Sequence, awaited: list[Awaited]) -> None:
        """Note that `sequence` will compute and publish these blocks or prompts, except those that have a leader."""
        led = {digest: None for digest in awaited if digest not in self._led}
        if led:
            self._leading[sequence] = led
            for digest in led:
                self._led[digest] = sequence

    def reach(self, chain: TokenChain, start: int) -> int:
        """Return how many blocks of a chain there will be, when `start` are there already."""
        led = self._led
        end = start
        while led and end < len(chain) and chain[end] in led:
            end += 1
        return end

    def last_led(self, chain: TokenChain, start: int, end: int) -> int:
        """Return the end of the last block of a chain among `start .. end - 1` that is led; `start` if none is."""
        led = self._led
        while led and end > start and chain[end - 1] not in led:
            end -= 1
        return end if led else start

    def leader(self, awaited: Awaited) -> Sequence | None:
        """Return the sequence that computes this, if one does."""
        return self._led.get(awaited)

    def add_follower(self, sequence: Sequence, awaited: Awaited) -> None:
        """Let a sequence wait for a block or prompt that has a leader."""
        self._waits_for[sequence] = awaited
        self._followers.setdefault(awaited, {})[sequence] = None

    def remove_follower(self, sequence: Sequence) -> None:
        """Forget a sequence that goes away itself, if it follows."""
        awaited = self._waits_for.pop(sequence, None)
        if awaited is not None:
            followers = self._followers[awaited]
            del followers[sequence]
            if not followers:
                del self._followers[awaited]

    def wake(self, awaited: Awaited, by: Sequence | None = None) -> list[Sequence]:
        """Hand back the followers of a block or prompt that is there now. With `by`, only if that sequence leads it."""
        leader = self._led.get(awaited)
        if leader is None or (by is not None and leader is not by):
            return []
        del self._led[awaited]
        led = self._leading[leader]
        del led[awaited]
        if not led:
            del self._leading[leader]
        return self._let_go(awaited)

    def resign(self, sequence: Sequence) -> list[Sequence]:
        """Hand back the followers of a sequence that will publish nothing more."""
        woken: list[Sequence] = []
        for awaited in self._leading.pop(sequence, ()):
            del self._led[awaited]
            woken += self._let_go(awaited)
        return woken

    def resign_all(self) -> list[Sequence]:
        """Hand back all followers: nothing is led any more."""
        woken = list(self._waits_for)
        self._led, self._leading, self._followers, self._waits_for = {}, {}, {}, {}
        return woken

    def _let_go(self, awaited: Awaited) -> list[Sequence]:
        woken = list(self._followers.pop(awaited, ()))
        for sequence in woken:
            del self._waits_for[sequence]
        return woken
