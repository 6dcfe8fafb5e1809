"""Decide where a sequence goes on from, and which of its states are kept on the way.

Invariants
----------
* Without recurrent states a sequence goes on behind any cached block (`ResumePolicy`); with them at a checkpoint
  (`CheckpointPolicy`), and what follows in its match is computed again for the state's sake.
* A state is kept where it will be wanted: at the last full block of what an admitted sequence knows and at the last
  one before its last token, where it leaves what is cached, where a sequence that waits leaves it, and at the last
  block of one that stops.
* A checkpoint is of a published block whose KV, with all before it, is of the current epoch; a request that fails
  leaves none.
"""

from __future__ import annotations

from samebit.rollout.cache.block_tables import BlockTables
from samebit.rollout.cache.cache_entry import CacheEntry, HeldPrompt
from samebit.rollout.cache.checkpoints.leaving_points import LeavingPoints
from samebit.rollout.cache.checkpoints.pool import Captures, CheckpointPool
from samebit.rollout.cache.leaders import Leaders
from samebit.rollout.cache.prefix_tree import PrefixTree
from samebit.rollout.requests.request import Sequence


class ResumePolicy:
    """Decides where sequences resume, of a model whose only memory is KV: there is nothing to keep."""

    def __init__(self, leaders: Leaders) -> None:
        self._leaders = leaders

    @property
    def depends_on_tokens(self) -> bool:
        """Return whether a sequence waits that could resume behind a state which is taken on the way."""
        return False

    # -- of a sequence that waits ------------------------------------------------------------------

    def add_waiting(self, entry: CacheEntry) -> None:
        """Note that a sequence waits which could resume behind any full block before the last of its tokens."""

    def remove_waiting(self, entry: CacheEntry) -> None:
        """Note that it does not wait any more."""

    def useful_end(self, entry: CacheEntry, start: int, end: int) -> int:
        """Return for which of its first `end` blocks a sequence should wait that would go on at `start` now."""
        return end

    def promise_checkpoint(self, leader: CacheEntry, position: int) -> None:
        """Note that a follower waits for what `leader` computes up to this position."""

    # -- of one that is admitted and runs ----------------------------------------------------------

    def resume_point(self, entry: CacheEntry, shared: int) -> int:
        """Return where a sequence goes on whose blocks have the KV of `shared` tokens."""
        return shared

    def begin_at(self, entry: CacheEntry, start: int) -> None:
        """Let an admitted sequence go on at `start`."""
        entry.num_passed = len(entry.match)

    def may_rebuild(self, prompt: HeldPrompt, start: int) -> bool:
        """Tell whether a sequence that goes on at `start` can hold this prompt again."""
        return True

    def chunk_end(self, entry: CacheEntry, end: int) -> int:
        """Return where a chunk ends that may go on to `end`."""
        return end

    def take_captures(self, entry: CacheEntry, end: int) -> Captures:
        """Choose which states to keep while a step computes this sequence up to `end`, and take their slots."""
        return ()

    def wake_followers(self, digest: bytes, publisher: Sequence) -> list[Sequence]:
        """Hand back the followers that a published block lets go on."""
        return self._leaders.wake(digest)

    def save_stopping(self, entry: CacheEntry, num_published: int) -> None:
        """Keep the state of a sequence that stops."""


class CheckpointPolicy(ResumePolicy):
    """Decides where sequences resume and where checkpoints are taken, of a model with recurrent states."""

    def __init__(self, leaders: Leaders, pool: CheckpointPool, index: PrefixTree, tables: BlockTables) -> None:
        super().__init__(leaders)
        self.pool = pool
        self.waiting = LeavingPoints()
        self._index = index
        self._tables = tables
        self._size = tables.block_size

    @property
    def depends_on_tokens(self) -> bool:
        return bool(self.waiting)

    def add_waiting(self, entry: CacheEntry) -> None:
        if self.pool.num_checkpoints:
            num_tokens = entry.sequence.num_tokens
            entry.chain.cover(entry.sequence.token_ids[:num_tokens])
            entry.counted_waiting = entry.chain.head((num_tokens - 1) // self._size)
            self.waiting.add_chain(entry.counted_waiting)

    def remove_waiting(self, entry: CacheEntry) -> None:
        self.waiting.remove_chain(entry.counted_waiting)
        entry.counted_waiting = []

    def useful_end(self, entry: CacheEntry, start: int, end: int) -> int:
        """Return for how many blocks to wait: a follower waits for a state, so also for a block that is there and
        computed again for its state."""
        end = min(end, (entry.sequence.num_tokens - 1) // self._size) if self.pool.num_checkpoints else 0
        return self._leaders.last_led(entry.chain, min(start // self._size, end), end)

    def promise_checkpoint(self, leader: CacheEntry, position: int) -> None:
        leader.checkpoints_due.add(position)

    def resume_point(self, entry: CacheEntry, shared: int) -> int:
        """Return the end of a prompt whose state is there, else that of the deepest checkpoint of the match."""
        num_tokens = entry.sequence.num_tokens
        if entry.waits_for is not None and entry.waits_for.state_slot is not None and shared >= num_tokens - 1:
            return shared
        return self.pool.deepest(entry.match, num_tokens) * self._size

    def begin_at(self, entry: CacheEntry, start: int) -> None:
        """Bring its live state to `start`, and note where it will take checkpoints."""
        size, sequence, match = self._size, entry.sequence, entry.match
        last = sequence.num_tokens - 1
        source = None if entry.waits_for is None else entry.waits_for.state_slot
        if start == last and source is not None:
            self.pool.fork(source, sequence.slot)
        else:
            if not sequence.prompt_logprobs_wanted:
                self.pool.count_misses(match, start // size, sequence.num_tokens)
            if start:
                self.pool.restore(match[start // size - 1], sequence.slot)
        ends = {len(match), last // size, sequence.num_tokens // size}
        entry.checkpoints_due = {end * size for end in ends if end * size > start}
        entry.num_passed = start // size

    def may_rebuild(self, prompt: HeldPrompt, start: int) -> bool:
        """Tell whether a sequence that begins at `start` comes past the prompt's end, and a slot is free for the state
        there."""
        return start < prompt.length and self.pool.may_hold

    def chunk_end(self, entry: CacheEntry, end: int) -> int:
        """Return where a chunk ends: at the end of a prompt whose state is to be held again, if it comes there."""
        return min(end, entry.prompt.length) if entry.rebuilds_prompt and entry.prompt is not None else end

    def take_captures(self, entry: CacheEntry, end: int) -> Captures:
        if not (entry.checkpoints_due or self.waiting) or not self.pool.num_checkpoints:
            return ()
        reached = {position for position in entry.checkpoints_due if position <= end}
        entry.checkpoints_due -= reached
        reached |= self._left_by_waiting(entry, end)
        # Cached blocks are computed again for scores, and for a state behind the last of them: none gives way for what
        # is there already.
        taken = ((position, self.pool.take()) for position in sorted(reached) if not self._is_kept(entry, position))
        return tuple((position, checkpoint) for position, checkpoint in taken if checkpoint is not None)

    def wake_followers(self, digest: bytes, publisher: Sequence) -> list[Sequence]:
        """Hand back the followers only where the leader published the block: it takes the state behind it."""
        return self._leaders.wake(digest, publisher)

    def save_stopping(self, entry: CacheEntry, num_published: int) -> None:
        """Keep the state as of the last block boundary, if that block is published and no step has gone beyond the next
        one."""
        sequence = entry.sequence
        number = sequence.num_computed // self._size
        gone_on = (sequence.num_computed + sequence.schedule.num_ahead) // self._size > number
        if 0 < number <= num_published and not gone_on:
            block = self._tables.blocks(sequence.slot)[number - 1]
            self.pool.save(sequence.slot, self._index.by_block[block])

    def _is_kept(self, entry: CacheEntry, position: int) -> bool:
        """Tell whether the block that ends at this position has its checkpoint, which is the newest then."""
        number = position // self._size
        blocks = self._tables.blocks(entry.sequence.slot)
        return number <= entry.num_published and self.pool.renew(blocks[number - 1])

    def _left_by_waiting(self, entry: CacheEntry, end: int) -> set[int]:
        """Return the block boundaries that this step reaches at which a chain that waits leaves this one."""
        sequence, chain = entry.sequence, entry.chain
        first, last = sequence.num_computed // self._size, end // self._size
        if first == last or not self.waiting:
            return set()
        chain.cover(sequence.token_ids[:end])
        return {
            end * self._size
            for end in range(first + 1, last + 1)
            if self.waiting.leaves_behind(chain[end - 1], chain[end] if end < len(chain) else None)
        }
