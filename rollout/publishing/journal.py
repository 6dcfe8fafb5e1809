"""Note what enters and leaves the index of a cache, for a router elsewhere that keeps a shadow of it.

Invariants
----------
* An event costs O(1). What is noted is bounded: when too much is noted before it is taken, it is dropped, a number of
  the sequence is left out, and the router asks for a snapshot.
* A message says what became of each digest since the message before it: whether it is there at the end. Of what
  happened in between is of no use.
* (incarnation, epoch, sequence) order the messages: an incarnation is one life of a replica, an epoch one of its index,
  and the sequence counts messages. A reader that misses one knows it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

MOST_NOTED = 1 << 16
MOST_IN_A_MESSAGE = 1 << 13


@dataclass(frozen=True)
class CacheNews:
    """Says what has changed since the message before; a new epoch begins with an empty index."""

    incarnation: int
    epoch: int
    sequence: int
    published: list[bytes]
    evicted: list[bytes]


@dataclass(frozen=True)
class CacheSnapshot:
    """Lists all digests that can be hit, as of the message `sequence`."""

    incarnation: int
    epoch: int
    sequence: int
    digests: list[bytes]


class CacheJournal:
    """Takes the events of one index, under its owner's lock, and hands out messages to a reader in any thread."""

    def __init__(self, incarnation: int, epoch: int, most: int = MOST_NOTED) -> None:
        self._incarnation = incarnation
        self._epoch = epoch
        self._sequence = 0
        self._most = most
        self._noted: dict[bytes, bool] = {}
        self._cleared = False
        self._mutex = threading.Lock()

    def published(self, digest: bytes) -> None:
        """Note that a block can be hit."""
        self._note(digest, True)

    def evicted(self, digest: bytes) -> None:
        """Note that a block can be hit no longer."""
        self._note(digest, False)

    def cleared(self, epoch: int) -> None:
        """Note that the index was emptied, and what its epoch is from now on."""
        with self._mutex:
            self._epoch, self._noted, self._cleared = epoch, {}, True

    @property
    def pending(self) -> bool:
        """Return whether there is something to take."""
        return self._cleared or bool(self._noted)

    def take(self) -> CacheNews | None:
        """Hand out the next message; None if nothing has happened. Long ones come in parts: call it again until it
        returns None."""
        with self._mutex:
            if not self.pending:
                return None
            self._sequence += 1
            self._cleared = False
            noted = self._noted
            if len(noted) <= MOST_IN_A_MESSAGE:
                self._noted = {}
            else:
                part = list(noted)[:MOST_IN_A_MESSAGE]
                noted = {digest: noted.pop(digest) for digest in part}
            here = [digest for digest, there in noted.items() if there]
            gone = [digest for digest, there in noted.items() if not there]
            return CacheNews(self._incarnation, self._epoch, self._sequence, here, gone)

    def snapshot(self, digests: list[bytes]) -> CacheSnapshot:
        """Return all that is there as a message, and forget what was noted. Under the lock of the index's owner."""
        with self._mutex:
            self._noted, self._cleared = {}, False
            return CacheSnapshot(self._incarnation, self._epoch, self._sequence, digests)

    def _note(self, digest: bytes, there: bool) -> None:
        with self._mutex:
            if len(self._noted) >= self._most and digest not in self._noted:
                self._noted = {}
                self._sequence += 1  # a reader that goes on sees the gap
            self._noted[digest] = there
