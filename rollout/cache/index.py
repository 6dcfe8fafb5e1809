"""Which blocks can be hit: digest -> block.

Invariants
----------
* An entry's KV was computed in the current epoch, with that of all blocks before it. Clearing starts a new
  epoch; nothing of an old one is reachable.
* An entry's parent is in the index as long as the entry is: a block is published by an owner of its
  parent, owners release tail first, and the least recently released goes first. So a chain is matched
  from its root, and a match whose last entry still stands is whole.
* A digest names at most one block and a block at most one digest.
* Clearing is O(1): the old entries are freed in slices, by later steps.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from samebit.rollout.cache.chain import TokenChain

Tokens = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class CachedBlock:
    """An entry of the index.

    parent: the entry of the block before it; None for a first one. children: entries that follow it.
    stands: False once the block was evicted. had_checkpoint: there is, or was, a state for it.
    """

    block: int
    digest: bytes
    epoch: int
    parent: CachedBlock | None = None
    children: int = 0
    stands: bool = True
    had_checkpoint: bool = False


class PrefixIndex:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.epoch = 0
        self.evictions = 0
        self.tokens: npt.NDArray[np.int32] = np.zeros((num_blocks + 1, block_size), np.int32)
        self.by_digest: dict[bytes, CachedBlock] = {}
        self.by_block: dict[int, CachedBlock] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._remembered = num_blocks
        self._garbage: list[dict[bytes, CachedBlock] | dict[int, CachedBlock] | OrderedDict[bytes, None]] = []

    def __len__(self) -> int:
        return len(self.by_block)

    def extend_match(self, match: list[CachedBlock], chain: TokenChain, tokens: Tokens) -> None:
        """Bring a match of `chain` up to date: drop what is gone from its end, add what has come.

        `tokens` are the sequence's own: a digest that agrees with other tokens is no hit.
        """
        while match and not (match[-1].stands and match[-1].epoch == self.epoch):
            match.pop()
        known = len(match)
        for index in range(known, len(chain)):
            entry = self.by_digest.get(chain[index])
            if entry is None:
                break
            match.append(entry)
        del match[known + self._agreeing(match[known:], tokens[known * self.block_size :]) :]

    def _agreeing(self, entries: list[CachedBlock], tokens: Tokens) -> int:
        """How many of the entries, from the first on, hold these tokens."""
        if not entries:
            return 0
        given = tokens[: len(entries) * self.block_size].reshape(len(entries), self.block_size)
        equal = (self.tokens[[entry.block for entry in entries]] == given).all(axis=1)
        return len(entries) if bool(equal.all()) else int(equal.argmin())

    def publish(self, block: int, digest: bytes, tokens: Tokens, previous: int | None) -> int | None:
        """Make a block hittable; the block that has this content already when there is one, else `block`.

        `previous` is the block before it, None for a first one. None is returned when the digest names other tokens:
        this block can not be hit.
        """
        entry = self.by_digest.get(digest)
        if entry is not None:
            return entry.block if np.array_equal(self.tokens[entry.block], tokens) else None
        parent = None if previous is None else self.by_block[previous]
        if parent is not None:
            parent.children += 1
        entry = CachedBlock(block, digest, self.epoch, parent)
        self.by_digest[digest] = self.by_block[block] = entry
        self.tokens[block] = tokens
        return block

    def remove(self, block: int) -> None:
        """Take a block out, because its memory is needed or nobody owns it."""
        entry = self.by_block.pop(block)
        del self.by_digest[entry.digest]
        entry.stands = False
        if entry.parent is not None:
            entry.parent.children -= 1
            entry.parent = None
        self.evictions += 1
        self._evicted[entry.digest] = None
        if len(self._evicted) > self._remembered:
            self._evicted.popitem(last=False)

    def was_evicted(self, digest: bytes) -> bool:
        """Whether a block of this content was here in this epoch and had to go (the last ones are known)."""
        return digest in self._evicted and digest not in self.by_digest

    def clear(self) -> None:
        """Forget everything and start an epoch."""
        self.epoch += 1
        self._garbage += [old for old in (self.by_digest, self.by_block, self._evicted) if old]
        self.by_digest, self.by_block, self._evicted = {}, {}, OrderedDict()

    def sweep(self, limit: int) -> None:
        """Free a little of what `clear` left."""
        while limit > 0 and self._garbage:
            self._garbage[-1].popitem()
            if not self._garbage[-1]:
                self._garbage.pop()
            limit -= 1
