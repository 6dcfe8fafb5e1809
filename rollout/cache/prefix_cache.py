"""Manage KV memory whose blocks are shared: what is computed once is hit by all that begin alike.

Invariants
----------
* A sequence writes to no block that others can see: hits are shared from the first block on, and what is
  computed of them again (the last token of a cached prompt, whatever `prompt_logprobs` needs, what a recurrent state
  needs) is not written (`KVHistory.write_from`).
* A block is published when its KV has been computed, and only by a sequence whose oldest KV is of the
  current epoch. An owner of a block owns all blocks before it, so the owned hits of a match come first.
* A checkpoint is of a published block, and goes with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Items

from samebit.rollout.cache.cache_entry import NEVER, CacheEntry
from samebit.rollout.cache.checkpoints.policy import CheckpointPolicy, ResumePolicy
from samebit.rollout.cache.checkpoints.pool import Captures, CheckpointPool
from samebit.rollout.cache.contract import Cache
from samebit.rollout.cache.leaders import Leaders
from samebit.rollout.cache.prefix_tree import CachedBlock, PrefixTree
from samebit.rollout.keys.digest_key import DigestKey
from samebit.rollout.publishing.journal import CacheJournal, CacheSnapshot
from samebit.rollout.requests.block_digests import ChainHasher, PromptDigests, TokenChain
from samebit.rollout.requests.images import PromptImages
from samebit.rollout.requests.request import Request, Sequence
from samebit.rollout.requests.shared import IntArray

SWEPT_PER_STEP = 64
"""A step frees this many blocks of a cleared index."""

SWEPT_PER_BLOCK = 2
"""A published block frees this many: one more than it leaves itself one day, so that they do not pile up."""


class PrefixCache(Cache):
    """Shares the KV of tokens that sequences begin with; `Cache` describes the methods.

    checkpoints: of a model with recurrent states, None for another. digest_key: names blocks; None for a new key.
    """

    shares_prompts = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        *,
        eviction_policy: str = "lru",
        checkpoints: CheckpointPool | None = None,
        digest_key: DigestKey | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, max_num_seqs, max_model_len, checkpoints)
        self.index = PrefixTree(num_blocks, block_size)
        self.hasher = ChainHasher(block_size, digest_key)
        self.entries: dict[Sequence, CacheEntry] = {}
        self.leaders = Leaders()
        self.policy = ResumePolicy(self.leaders)
        if checkpoints is not None:
            self.policy = CheckpointPolicy(self.leaders, checkpoints, self.index, self.tables)
        self._keeps_free_blocks = eviction_policy == "lru"

    # -- before a sequence runs --------------------------------------------------------------------

    def hash_prompt(
        self, prompt: IntArray, cache_salt: str | None, adapter: int = 0, images: PromptImages | None = None
    ) -> PromptDigests:
        return self.hasher.prompt(cache_salt, prompt, adapter, images)

    def track(self, request: Request) -> None:
        digests = request.prompt_digests
        if digests is None:
            digests = self.hash_prompt(
                request.prompt, request.params.cache_salt, request.adapter_number, request.images
            )
        for sequence in request.sequences:
            self.entries[sequence] = CacheEntry(sequence, TokenChain(self.hasher, digests))
        self.policy.add_waiting(self.entries[request.sequences[0]])

    def find_awaited(self, sequence: Sequence) -> int | None:
        """Find how many of its blocks a waiting sequence, whose match is brought up to date, should wait for: a running
        one computes the last of them, and it saves tokens. None where it should not wait."""
        if sequence.prompt_logprobs_wanted:
            return None
        entry = self.entries[sequence]
        self._match(entry)
        here, _ = self._resume_point(entry)
        prompt = entry.waits_for
        if prompt is not None and self.leaders.leader(prompt) is not None and here < prompt.length:
            return self.blocks_for(prompt.length)
        end = self.policy.useful_end(entry, here, self.leaders.reach(entry.chain, len(entry.match)))
        return end if min(end * self.block_size, sequence.num_tokens - 1) > here else None

    def follow(self, sequence: Sequence) -> bool:
        num_blocks = self.find_awaited(sequence)
        if num_blocks is None:
            return False
        self.counters.leader_waits += 1
        entry = self.entries[sequence]
        if entry.waits_for is not None and self.leaders.leader(entry.waits_for) is not None:
            self.leaders.add_follower(sequence, entry.waits_for)
            return True
        digest = entry.chain[num_blocks - 1]
        leader = self.leaders.leader(digest)
        if leader is not None:
            self.policy.promise_checkpoint(self.entries[leader], num_blocks * self.block_size)
        self.leaders.add_follower(sequence, digest)
        return True

    def admit(self, sequence: Sequence, *, headroom: int = 0) -> bool:
        entry = self.entries[sequence]
        match = self._match(entry)
        fresh = self.blocks_for(sequence.num_tokens) - len(match)
        spare = self.pool.num_free - headroom
        if not self.tables.has_free_slot or fresh > spare or fresh + self._count_free(match) > spare:
            return False
        slot = sequence.slot = self.tables.take_slot()
        blocks = [cached.block for cached in match]
        self.pool.claim(blocks)
        self.tables.extend(slot, blocks)
        self._extend(slot, fresh)
        self._resume(entry)
        return True

    def forget(self, sequence: Sequence) -> None:
        self._left_waiting(self.entries.pop(sequence))
        self.leaders.remove_follower(sequence)

    # -- while it runs -----------------------------------------------------------------------------

    def chunk_end(self, sequence: Sequence, end: int) -> int:
        return self.policy.chunk_end(self.entries[sequence], end)

    def may_publish(self, sequence: Sequence) -> bool:
        return self.entries[sequence].epoch == self.index.epoch

    @property
    def depends_on_tokens(self) -> bool:
        return self.policy.depends_on_tokens

    def take_captures(self, sequence: Sequence, end: int) -> Captures:
        entry = self.entries[sequence]
        return self.policy.take_captures(entry, end) if entry.epoch == self.index.epoch else ()

    def publish_blocks(self, sequence: Sequence, captures: Captures = ()) -> list[Sequence]:
        if sequence.shared.error is not None:
            self.checkpoints.free_captured(captures)
            return []
        entry = self.entries[sequence]
        woken: list[Sequence] = []
        full = sequence.num_computed // self.tables.block_size
        if full > entry.num_passed and entry.epoch == self.index.epoch:
            woken += self._insert_blocks(entry, full)
        if entry.rebuilds_prompt:
            woken += self._hold_again(entry)
        if captures:
            self._keep(entry, captures)
        return woken

    def hold_prompt(self, leader: Sequence, samples: Items[Sequence]) -> None:
        if samples:
            self.held.hold_first(self.entries[leader], [self.entries[sample] for sample in samples])

    def take_back(self, sequence: Sequence, *, waits_again: bool = False) -> list[Sequence]:
        entry = self.entries[sequence]
        if sequence.shared.error is None:
            self.policy.save_stopping(entry, self._num_known(entry))
        self.held.note_stopping(entry)
        entry.rebuilds_prompt = False
        self._free_slot(sequence)
        if waits_again:
            self.policy.add_waiting(entry)
        return self.leaders.resign(sequence)

    # -- the cache as a whole ----------------------------------------------------------------------

    @property
    def num_hittable(self) -> int:
        return len(self.index)

    def clear_index(self) -> list[Sequence]:
        self.held.drop_all()
        self.index.clear()
        self.pool.forget_kept()
        self.checkpoints.clear()
        return self.leaders.resign_all()

    def open_journal(self, incarnation: int) -> CacheJournal:
        journal = self.index.journal = CacheJournal(incarnation, self.index.epoch)
        return journal

    def snapshot(self, journal: CacheJournal) -> CacheSnapshot:
        return journal.snapshot([cached.digest for cached in self.index.by_block.values()])

    def sweep(self) -> None:
        self.index.sweep(SWEPT_PER_STEP)
        self.pool.sweep(SWEPT_PER_STEP)

    # -- parts of admission ------------------------------------------------------------------------

    def _match(self, entry: CacheEntry) -> list[CachedBlock]:
        """Bring the match of a waiting sequence up to date, and return it."""
        sequence = entry.sequence
        entry.chain.cover(sequence.token_ids[: sequence.num_tokens])
        self.index.extend_match(entry.match, entry.chain, sequence.token_ids)
        return entry.match

    def _count_free(self, match: list[CachedBlock]) -> int:
        """Count the matched blocks without an owner, which are the last ones: they are among the free blocks."""
        return len(match) - bisect_left(match, True, key=lambda cached: self.pool.refcount(cached.block) == 0)

    def _resume_point(self, entry: CacheEntry) -> tuple[int, int]:
        """Return where a sequence with this match goes on, and up to where its blocks have their KV."""
        prompt = self.held.missing_end(entry, len(entry.match))
        shared = len(entry.match) * self.block_size if prompt is None else prompt.length
        if entry.sequence.prompt_logprobs_wanted:
            return 0, shared
        return min(self.policy.resume_point(entry, shared), entry.sequence.num_tokens - 1), shared

    def _resume(self, entry: CacheEntry) -> None:
        """Set where an admitted sequence goes on behind its shared blocks, and what it will compute for others."""
        sequence, hits = entry.sequence, len(entry.match)
        start, shared = self._resume_point(entry)
        prompt = self.held.missing_end(entry, hits)
        if prompt is not None and hits < len(prompt.blocks):
            self._copies.append((prompt.blocks[hits], self.tables.blocks(sequence.slot)[hits]))
        self.policy.begin_at(entry, start)
        self._count(entry, start)
        self.held.note_running(entry, shared)
        self._left_waiting(entry)
        entry.match = []
        entry.epoch = self.index.epoch
        entry.num_published = hits
        sequence.resume_at(start, write_from=shared)
        self._lead(entry, start)

    def _lead(self, entry: CacheEntry, start: int) -> None:
        """Let others wait for what a sequence that goes on at `start` will compute."""
        lost = self.held.lost(entry)
        entry.rebuilds_prompt = (
            lost is not None and self.policy.may_rebuild(lost, start) and self.leaders.leader(lost) is None
        )
        rebuilt = [lost] if lost is not None and entry.rebuilds_prompt else []
        # A prompt that is scored may stand still until it is its turn: nobody waits for it.
        coming = [] if entry.sequence.prompt_logprobs_wanted else entry.chain.beyond(entry.num_passed)
        self.leaders.lead(entry.sequence, [*coming, *rebuilt])

    def _left_waiting(self, entry: CacheEntry) -> None:
        self.held.count_out(entry)
        self.policy.remove_waiting(entry)

    def _count(self, entry: CacheEntry, skipped: int) -> None:
        counters, hits = self.counters, len(entry.match)
        counters.count(skipped)
        if hits < len(entry.chain):
            counters.lost_to_eviction += self.index.was_evicted(entry.chain[hits])

    # -- parts of publishing -----------------------------------------------------------------------

    def _num_known(self, entry: CacheEntry) -> int:
        """Count the leading blocks of a sequence that may have checkpoints."""
        return entry.num_published if entry.epoch == self.index.epoch else 0

    def _insert_blocks(self, entry: CacheEntry, full: int) -> list[Sequence]:
        sequence = entry.sequence
        woken: list[Sequence] = []
        entry.chain.cover(sequence.token_ids[: full * self.block_size])
        for number in range(entry.num_passed, full):
            if number >= entry.num_published and not self._insert_block(entry, number):
                entry.epoch = NEVER
                return woken + self.leaders.resign(sequence)
            woken += self.policy.wake_followers(entry.chain[number], sequence)
        self.index.sweep(SWEPT_PER_BLOCK * (full - entry.num_passed))
        entry.num_passed = full
        entry.num_published = max(full, entry.num_published)
        return woken

    def _insert_block(self, entry: CacheEntry, number: int) -> bool:
        """Insert a block of a sequence; tell whether it, or the equal one that was there before, can be hit now."""
        sequence, size = entry.sequence, self.block_size
        blocks = self.tables.blocks(sequence.slot)
        previous = blocks[number - 1] if number else None
        tokens = sequence.token_ids[number * size : (number + 1) * size]
        first = self.index.insert(blocks[number], entry.chain[number], tokens, previous)
        return first == blocks[number] or (first is not None and self._replace(sequence.slot, number, first))

    def _replace(self, slot: int, number: int, block: int) -> bool:
        """Use the block that was there first instead of an equal one, unless others read the latter."""
        own = self.tables.blocks(slot)[number]
        if self.pool.refcount(own) > 1:
            return False
        self.pool.claim([block])
        self.tables.replace(slot, number, block)
        self._give_back([own])
        return True

    def _keep(self, entry: CacheEntry, captures: Captures) -> None:
        """Give the states that a step has kept to the blocks that end there, if these are known."""
        known, blocks = self._num_known(entry), self.tables.blocks(entry.sequence.slot)
        for position, checkpoint in captures:
            number = position // self.block_size
            cached = self.index.by_block.get(blocks[number - 1]) if number <= known else None
            self.checkpoints.attach(cached, checkpoint)

    def _hold_again(self, entry: CacheEntry) -> list[Sequence]:
        """Hold the prompt that a sequence computes again, if it has come to its end."""
        prompt, sequence = entry.prompt, entry.sequence
        if prompt is None or sequence.num_computed < prompt.length:
            return []
        entry.rebuilds_prompt = False
        if prompt.num_unstarted and prompt not in self.held and entry.epoch == self.index.epoch:
            self.held.hold(prompt, sequence)
        return self.leaders.wake(prompt, sequence)

    # -- blocks ------------------------------------------------------------------------------------

    def _give_back(self, blocks: list[int]) -> None:
        hittable = self.index.by_block
        if self._keeps_free_blocks:
            self.pool.release(blocks, hittable)
        else:
            self.pool.release(blocks)
            self._evict([block for block in blocks if block in hittable and self.pool.refcount(block) == 0])

    def _evict(self, blocks: list[int]) -> None:
        """Take blocks out of the index, with their checkpoints."""
        for block in blocks:
            self.index.remove(block)
            self.checkpoints.drop(block)
        self.counters.evictions += len(blocks)
