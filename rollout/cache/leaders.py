"""Who computes a block that several need, or the end of a prompt that will be held again, and who waits for it.

Invariants
----------
* A digest (or a prompt, `PromptTail`) is led by a running sequence that will publish it; when that sequence
  stops leading for any reason, whoever waits is handed back to the scheduler, and the first of them to be
  admitted leads.
* A follower waits for one digest: the last block that it has in common with what is being computed. It
  holds no memory meanwhile.
* A block that is there already is led too while it is computed again for the state behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebit.rollout.cache.chain import TokenChain

if TYPE_CHECKING:
    from samebit.rollout.cache.tails import PromptTail
    from samebit.rollout.request import Sequence

    Awaited = bytes | PromptTail


class Leaders:
    def __init__(self) -> None:
        self.waits = 0
        self._led: dict[Awaited, Sequence] = {}
        self._leading: dict[Sequence, dict[Awaited, None]] = {}
        self._followers: dict[Awaited, dict[Sequence, None]] = {}
        self._waits_for: dict[Sequence, Awaited] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether it waits behind a leader."""
        return sequence in self._waits_for

    def lead(self, sequence: Sequence, digests: list[Awaited]) -> None:
        """`sequence` is going to compute and publish these blocks."""
        led = {digest: None for digest in digests if digest not in self._led}
        if led:
            self._leading[sequence] = led
            for digest in led:
                self._led[digest] = sequence

    def reach(self, chain: TokenChain, start: int) -> int:
        """How many blocks of a chain there will be, when `start` are there already."""
        led = self._led
        end = start
        while led and end < len(chain) and chain[end] in led:
            end += 1
        return end

    def leader(self, digest: Awaited) -> Sequence | None:
        """Who computes this block, if somebody does."""
        return self._led.get(digest)

    def follow(self, sequence: Sequence, digest: Awaited) -> None:
        self.waits += 1
        self._waits_for[sequence] = digest
        self._followers.setdefault(digest, {})[sequence] = None

    def unfollow(self, sequence: Sequence) -> None:
        """A follower that goes away itself."""
        digest = self._waits_for.pop(sequence)
        followers = self._followers[digest]
        del followers[sequence]
        if not followers:
            del self._followers[digest]

    def last_led(self, chain: TokenChain, start: int, end: int) -> int:
        """The end of the last block of a chain among `start .. end - 1` that is led; `start` for none."""
        led = self._led
        while led and end > start and chain[end - 1] not in led:
            end -= 1
        return end if led else start

    def published(self, digest: Awaited, by: Sequence | None = None) -> list[Sequence]:
        """The block is there: the followers that waited for it. With `by`, only if this sequence leads it."""
        leader = self._led.get(digest)
        if leader is None or (by is not None and leader is not by):
            return []
        del self._led[digest]
        led = self._leading[leader]
        del led[digest]
        if not led:
            del self._leading[leader]
        return self._wake(digest)

    def resign(self, sequence: Sequence) -> list[Sequence]:
        """`sequence` will publish nothing more: the followers of what it led."""
        woken: list[Sequence] = []
        for digest in self._leading.pop(sequence, ()):
            del self._led[digest]
            woken += self._wake(digest)
        return woken

    def resign_all(self) -> list[Sequence]:
        """Nothing is led any more: all followers."""
        woken = list(self._waits_for)
        self._led, self._leading, self._followers, self._waits_for = {}, {}, {}, {}
        return woken

    def _wake(self, digest: Awaited) -> list[Sequence]:
        woken = list(self._followers.pop(digest, ()))
        for sequence in woken:
            del self._waits_for[sequence]
        return woken

    def check(self) -> None:
        """Raise unless every follower waits for a block that somebody leads."""
        for sequence, digest in self._waits_for.items():
            if digest not in self._led or sequence not in self._followers[digest]:
                raise AssertionError("a follower waits for a block that nobody computes")
        led = {digest: leader for leader, digests in self._leading.items() for digest in digests}
        if led != self._led:
            raise AssertionError("the blocks led and their leaders differ")
