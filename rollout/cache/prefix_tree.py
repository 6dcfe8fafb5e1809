"""Find the blocks that can be hit: a tree whose paths are chains of digests.

Invariants
----------
* The KV of a block in the tree was computed in the current epoch, with that of all blocks before it. Clearing starts a
  new epoch; nothing of an old one is reachable. (A weight update clears: `Engine.weights_changed`.)
* A block's parent is in the tree as long as the block is: a block is published by an owner of its parent, owners
  release the last one first, and the least recently released goes first. So a chain is matched from its root, and a
  match whose last block still stands is whole.
* A block is in the tree once at most, and the blocks that follow one have different digests.
* Clearing is O(1): the blocks that were in the tree are freed in slices, by later steps.

Why a tree: one dictionary of all digests is larger than a processor's caches, and each look-up waits for memory. A
chain's next block is found without one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from samebit.rollout.cache.block_pool import NULL_BLOCK
from samebit.rollout.cache.freed_later import FreedLater
from samebit.rollout.cache.recent_digests import RecentDigests
from samebit.rollout.publishing.journal import CacheJournal
from samebit.rollout.requests.block_digests import TokenChain
from samebit.rollout.requests.shared import IntArray


@dataclass(slots=True, eq=False)
class CachedBlock:
    """Holds the place of a block in the tree.

    parent: the block before it, the root for a first one; None for the root and for what left the tree.
    child, more_children: the blocks that follow it; one, and the others by digest.
    stands: False once the block was evicted. had_checkpoint: there is, or was, a state for it.
    """

    block: int
    digest: bytes
    epoch: int
    parent: CachedBlock | None = field(default=None, repr=False)
    child: CachedBlock | None = field(default=None, repr=False)
    more_children: dict[bytes, CachedBlock] | None = field(default=None, repr=False)
    stands: bool = True
    had_checkpoint: bool = False

    @property
    def has_children(self) -> bool:
        """Return whether a block follows."""
        return self.child is not None or bool(self.more_children)

    def following(self, digest: bytes) -> CachedBlock | None:
        """Return the block of this digest that follows, if there is one."""
        if self.child is not None and self.child.digest == digest:
            return self.child
        return None if self.more_children is None else self.more_children.get(digest)

    def adopt(self, child: CachedBlock) -> None:
        """Let `child` follow this block."""
        if self.child is None:
            self.child = child
        elif self.more_children is None:
            self.more_children = {child.digest: child}
        else:
            self.more_children[child.digest] = child
        child.parent = self

    def detach(self) -> None:
        """Take this block out of the tree."""
        parent, self.parent = self.parent, None
        if parent is None:
            return
        if parent.child is self:
            parent.child = None
        elif parent.more_children is not None:
            del parent.more_children[self.digest]


class PrefixTree:
    """Holds the tree of the current epoch, and the tokens of each block in it: the index of a `PrefixCache`.

    journal: where it notes what can be hit and what no longer.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.epoch = 0
        self.tokens: npt.NDArray[np.int32] = np.zeros((num_blocks + 1, block_size), np.int32)
        self.root = self._new_root()
        self.by_block: dict[int, CachedBlock] = {}
        self._evicted = RecentDigests(num_blocks)
        self._cleared: FreedLater[int, CachedBlock] = FreedLater()
        self.journal: CacheJournal | None = None

    def __len__(self) -> int:
        return len(self.by_block)

    def extend_match(self, match: list[CachedBlock], chain: TokenChain, tokens: IntArray) -> None:
        """Bring a match of `chain` up to date: drop what is gone from its end, add what has come.

        `tokens` are the sequence's own: a digest that agrees with other tokens is no hit.
        """
        while match and not (match[-1].stands and match[-1].epoch == self.epoch):
            match.pop()
        known = len(match)
        last = match[-1] if match else self.root
        for digest in chain.beyond(known):
            following = last.following(digest)
            if following is None:
                break
            match.append(following)
            last = following
        del match[known + self._agreeing(match[known:], tokens[known * self.block_size :]) :]

    def _agreeing(self, match: list[CachedBlock], tokens: IntArray) -> int:
        """Return how many of the blocks, from the first on, hold these tokens."""
        if not match:
            return 0
        given = tokens[: len(match) * self.block_size].reshape(len(match), self.block_size)
        equal = (self.tokens[[cached.block for cached in match]] == given).all(axis=1)
        return len(match) if bool(equal.all()) else int(equal.argmin())

    def insert(self, block: int, digest: bytes, tokens: IntArray, previous: int | None) -> int | None:
        """Make a block hittable; return the block that had this content already if there is one, else `block`.

        `previous` is the block before it, None for a first one. None is returned when the digest names other tokens:
        this block can not be hit.

        Raises:
            RuntimeError: the block is in the tree already.
        """
        if block in self.by_block:
            raise RuntimeError(f"block {block} is published already")
        parent = self.root if previous is None else self.by_block[previous]
        first = parent.following(digest)
        if first is not None:
            return first.block if np.array_equal(self.tokens[first.block], tokens) else None
        cached = self.by_block[block] = CachedBlock(block, digest, self.epoch)
        parent.adopt(cached)
        self.tokens[block] = tokens
        if self.journal is not None:
            self.journal.published(digest)
        return block

    def remove(self, block: int) -> None:
        """Take a block out, because its memory is needed or it has no owner."""
        cached = self.by_block.pop(block)
        cached.detach()
        cached.stands = False
        self._evicted.add(cached.digest)
        if self.journal is not None:
            self.journal.evicted(cached.digest)

    def was_evicted(self, digest: bytes) -> bool:
        """Tell whether a block that is not here was, in this epoch, and had to go (the last ones are known)."""
        return digest in self._evicted

    def clear(self) -> None:
        """Forget all blocks and start an epoch: nothing that was computed so far is hit again."""
        self.epoch += 1
        self._cleared.add(self.by_block)
        self._evicted.clear()
        self.root, self.by_block = self._new_root(), {}
        if self.journal is not None:
            self.journal.cleared(self.epoch)

    def sweep(self, limit: int) -> None:
        """Free a little of what `clear` left."""
        for _ in range(limit):
            if self._cleared:
                self._cleared.pop()[1].detach()  # parents and children hold each other
            elif not self._evicted.sweep():
                return

    def _new_root(self) -> CachedBlock:
        return CachedBlock(NULL_BLOCK, b"", self.epoch)
