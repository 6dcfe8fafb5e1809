"""The one face of KV memory that the scheduler sees.

Invariants
----------
* A sequence that runs has a slot, and blocks for all of its known tokens; one that does not run has
  neither.
* Every call either does the whole of what it says or changes nothing: a sequence that is not admitted
  leaves even the order of eviction as it was.
* A sequence writes to no block that others can see: hits are shared from the first block on, and what is
  computed of them again (the last token of a cached prompt, whatever `prompt_logprobs` needs) is not
  written (`Sequence.write_from`).
* With recurrent states (`states`), a sequence resumes at a checkpoint, and what follows in its match is
  computed again for the state's sake. A checkpoint is of a published block, and goes with it.
* A block is published when its KV has been computed, and only by a sequence whose oldest KV is of the
  current epoch. An owner of a block owns all blocks before it, so the owned hits of a match come first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from samebit.rollout.cache.blocks import BlockPool
from samebit.rollout.cache.chain import ChainHasher, PromptDigests, TokenChain
from samebit.rollout.cache.checkpoints import Captures, Checkpoints
from samebit.rollout.cache.counters import CacheCounters
from samebit.rollout.cache.index import CachedBlock, PrefixIndex, Tokens
from samebit.rollout.cache.leaders import Leaders
from samebit.rollout.cache.prefix_state import NEVER, PrefixState
from samebit.rollout.cache.states import StateCache
from samebit.rollout.cache.tables import BlockTables
from samebit.rollout.cache.tails import PromptTails

if TYPE_CHECKING:
    from samebit.rollout.request import Request, Sequence

SWEPT_PER_STEP = 64
"""Entries of a cleared index that a step frees."""

SWEPT_PER_BLOCK = 2
"""And those that a published block frees: one more than it leaves itself one day, so that they do not pile up."""


class CacheManager:
    """`prefix_caching=False` allocates nothing beyond pool and tables, and shares nothing."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        *,
        prefix_caching: bool = True,
        eviction_policy: str = "lru",
        states: StateCache | None = None,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tables = BlockTables(max_num_seqs, self.blocks_for(max_model_len), block_size)
        self.counters = CacheCounters()
        self.index = PrefixIndex(num_blocks, block_size) if prefix_caching else None
        self.hasher = ChainHasher(block_size) if prefix_caching else None
        self.leaders = Leaders() if prefix_caching else None
        self.states = states if prefix_caching else None
        self.checkpoints: Checkpoints | None = None
        if self.states is not None and self.index is not None:
            self.checkpoints = Checkpoints(self.states, self.index, self.tables)
        self._keeps_free_blocks = eviction_policy == "lru"
        self.tails = PromptTails(self.pool, self.tables, self._give_back, self.states) if prefix_caching else None
        self._copies: list[tuple[int, int]] = []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- before a sequence runs --------------------------------------------------------------------

    def hash_prompt(self, prompt: Tokens, cache_salt: str | None) -> PromptDigests | None:
        """What the full blocks of a prompt are called (any thread may call it); None without prefix caching."""
        return None if self.hasher is None else self.hasher.prompt(cache_salt, prompt)

    def track(self, request: Request) -> None:
        """Make a new request's sequences known."""
        if self.hasher is None:
            return
        if request.prompt_digests is None:
            request.prompt_digests = self.hasher.prompt(request.params.cache_salt, request.prompt)
        for sequence in request.sequences:
            sequence.prefix = PrefixState(TokenChain(self.hasher, request.prompt_digests))
        first = request.sequences[0].prefix
        if self.checkpoints is not None and first is not None:
            self.checkpoints.announce(first, len(request.prompt))

    def awaited(self, sequence: Sequence) -> int | None:
        """The number of blocks that a waiting sequence should wait for: a running one computes the last of them, and
        it saves tokens."""
        state = sequence.prefix
        if state is None or self.leaders is None or sequence.prompt_logprobs_wanted:
            return None
        match = self._match(sequence)
        here, _ = self._resume_point(sequence, state, match)
        if state.tail is not None and self.leaders.leader(state.tail) is not None and here < state.tail.prompt_length:
            return self.blocks_for(state.tail.prompt_length)
        end = self.leaders.reach(state.chain, len(match))
        if self.checkpoints is not None:
            end = self.checkpoints.reach(sequence, end)
            end = self.leaders.last_led(state.chain, min(here // self.block_size, end), end)
        elif end == len(match):
            return None
        return end if min(end * self.block_size, sequence.num_tokens - 1) > here else None

    def follow(self, sequence: Sequence, num_blocks: int) -> None:
        """Let a waiting sequence stand behind the one that computes these blocks, which takes a checkpoint there."""
        state = sequence.prefix
        if state is None or self.leaders is None:
            raise RuntimeError("there are no leaders without prefix caching")
        if state.tail is not None and self.leaders.leader(state.tail) is not None:
            self.leaders.follow(sequence, state.tail)
            return
        digest = state.chain[num_blocks - 1]
        leader = self.leaders.leader(digest)
        if self.checkpoints is not None and leader is not None and leader.prefix is not None:
            leader.prefix.wanted.add(num_blocks * self.block_size)
        self.leaders.follow(sequence, digest)

    def admit(self, sequence: Sequence, *, headroom: int = 0) -> bool:
        """Give a waiting sequence a slot and blocks for its known tokens, with `headroom` blocks to spare.
        Cached blocks are shared and `num_computed` says where it goes on.
        """
        match = self._match(sequence)
        fresh = self.blocks_for(sequence.num_tokens) - len(match)
        spare = self.pool.num_free - headroom
        if not self.tables.has_free_slot or fresh > spare or fresh + self._count_free(match) > spare:
            return False
        slot = sequence.slot = self.tables.take_slot()
        for entry in match:
            self.pool.claim(entry.block)
        self.tables.extend(slot, [entry.block for entry in match])
        self._extend(slot, fresh)
        self._resume(sequence, match)
        return True

    def forget(self, sequence: Sequence) -> None:
        """A sequence that waits, or never began to, goes away."""
        if sequence.prefix is not None:
            self._left_waiting(sequence.prefix)
        if self.leaders is not None and sequence in self.leaders:
            self.leaders.unfollow(sequence)

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) blocks that have to be copied before anything is computed."""
        copies, self._copies = self._copies, []
        return copies

    # -- while it runs -----------------------------------------------------------------------------

    def append(self, sequence: Sequence, count: int) -> bool:
        """Make a running sequence's blocks hold `count` tokens behind the computed ones."""
        slot = sequence.slot
        num_tokens = sequence.num_computed + count
        if num_tokens <= self.tables.capacity(slot):
            return True
        missing = self.blocks_for(num_tokens) - len(self.tables.blocks(slot))
        if missing > self.pool.num_free:
            return False
        self._extend(slot, missing)
        return True

    def chunk_end(self, sequence: Sequence, end: int) -> int:
        """Where a chunk that may go on to `end` ends: at the end of a prompt whose state is to be held again."""
        state = sequence.prefix
        if self.states is None or state is None or not state.renews or state.group is None:
            return end
        return min(end, state.group.prompt_length)

    def may_publish(self, sequence: Sequence) -> bool:
        """Whether all of its KV belongs to the current epoch."""
        return self.index is not None and sequence.prefix is not None and sequence.prefix.epoch == self.index.epoch

    @property
    def looks_at_tokens(self) -> bool:
        """Whether what a step keeps depends on its tokens: on whether a sequence that waits begins with them."""
        return self.checkpoints is not None and self.checkpoints.awaited

    def plan_captures(self, sequence: Sequence, end: int) -> Captures:
        """(position, checkpoint) of the states to keep while a step computes this sequence up to `end`."""
        state = sequence.prefix
        if self.checkpoints is None or state is None or not self.may_publish(sequence):
            return ()
        return self.checkpoints.plan(sequence, state, end)

    def publish(self, sequence: Sequence, captures: Captures = ()) -> list[Sequence]:
        """Make the full blocks that a step has computed hittable, with the states that it has kept at their ends; the
        followers that waited for them. Of a request that has failed nothing is published."""
        failed = sequence.request.error is not None
        woken = [] if failed else self._publish(sequence)
        if sequence.prefix is not None and sequence.prefix.renews and not failed:
            woken += self._renew(sequence, sequence.prefix)
        if self.checkpoints is not None and captures:
            state = sequence.prefix
            known = 0 if failed or state is None or not self.may_publish(sequence) else state.num_published
            self.checkpoints.keep(sequence, captures, known)
        return woken

    def drop_captures(self, sequence: Sequence, captures: Captures) -> None:
        """What a step has kept of a sequence that had ended already."""
        if self.checkpoints is not None:
            self.checkpoints.keep(sequence, captures, 0)

    def hold_tail(self, leader: Sequence, samples: Items[Sequence]) -> None:
        """Keep the blocks of a prompt, the partly filled last one too, for the other samples of the request."""
        if self.tails is not None and samples:
            self.tails.hold_first(leader, samples)

    def release(self, sequence: Sequence) -> list[Sequence]:
        """Take back a running sequence's slot and blocks; the followers that waited for it."""
        slot, state = sequence.slot, sequence.prefix
        if self.checkpoints is not None and state is not None and sequence.request.error is None:
            self.checkpoints.save(sequence, state.num_published if self.may_publish(sequence) else 0)
        if self.tails is not None and state is not None:
            self.tails.stopped(sequence, state)
            state.renews = False
        self._give_back(self.tables.blocks(slot)[::-1])
        self.tables.give_back(slot)
        sequence.slot = -1
        return [] if self.leaders is None else self.leaders.resign(sequence)

    def preempt(self, sequence: Sequence) -> list[Sequence]:
        """Take back a running sequence's slot and blocks until it is admitted again; the followers."""
        woken = self.release(sequence)
        if self.checkpoints is not None and sequence.prefix is not None:
            sequence.prefix.chain.cover(sequence.token_ids[: sequence.num_tokens])
            self.checkpoints.announce(sequence.prefix, sequence.num_tokens)
        return woken

    # -- the cache as a whole ----------------------------------------------------------------------

    def clear_index(self) -> list[Sequence]:
        """Nothing computed so far is ever hit again; blocks and running sequences stay. The followers."""
        if self.index is None or self.leaders is None:
            return []
        self.drop_tails()
        self.index.clear()
        self.pool.forget_kept()
        if self.states is not None:
            self.states.clear()
        return self.leaders.resign_all()

    def drop_tail(self) -> bool:
        """Free what one of the held prompts owns alone; False when none owns anything alone."""
        return self.tails is not None and self.tails.make_room()

    def drop_tails(self) -> bool:
        """Give up the prompts that are held; whether there were any."""
        return self.tails is not None and self.tails.drop()

    def sweep(self) -> None:
        """A step's share of freeing what `clear_index` left."""
        if self.index is not None:
            self.index.sweep(SWEPT_PER_STEP)
            self.pool.sweep(SWEPT_PER_STEP)

    def owned_blocks(self, sequence: Sequence) -> list[int]:
        """A copy of the blocks of a running sequence, in order of position."""
        return list(self.tables.blocks(sequence.slot))

    # -- parts -------------------------------------------------------------------------------------

    def _match(self, sequence: Sequence) -> list[CachedBlock]:
        state = sequence.prefix
        if state is None or self.index is None:
            return []
        state.chain.cover(sequence.token_ids[: sequence.num_tokens])
        self.index.extend_match(state.match, state.chain, sequence.token_ids)
        return state.match

    def _count_free(self, match: list[CachedBlock]) -> int:
        """How many of these are free, so that sharing them takes capacity: the last ones."""
        return len(match) - bisect_left(match, True, key=lambda entry: self.pool.refcount(entry.block) == 0)

    def _resume(self, sequence: Sequence, match: list[CachedBlock]) -> None:
        """Set where an admitted sequence goes on behind its shared blocks."""
        state = sequence.prefix
        if state is None or self.index is None or self.leaders is None or self.tails is None:
            return
        hits, slot = len(match), sequence.slot
        start, shared = self._resume_point(sequence, state, match)
        tail = self.tails.following(state, hits)
        if tail is not None and hits < len(tail.blocks):
            self._copies.append((tail.blocks[hits], self.tables.blocks(slot)[hits]))
        if self.checkpoints is not None:
            self.checkpoints.resume(sequence, state, start)
        self._count(state.chain, hits, start)
        self.tails.started(sequence, state, shared)
        self._left_waiting(state)
        state.match = []
        state.epoch = self.index.epoch
        state.num_published = hits
        state.num_passed = hits if self.checkpoints is None else start // self.block_size
        sequence.resume_at(start, write_from=shared)
        lost = self.tails.lost(state, start)
        state.renews = lost is not None and self.leaders.leader(lost) is None
        renewed = [lost] if lost is not None and state.renews else []
        self.leaders.lead(sequence, [*state.chain.tail(state.num_passed), *renewed])

    def _resume_point(self, sequence: Sequence, state: PrefixState, match: list[CachedBlock]) -> tuple[int, int]:
        """Where a sequence with this match goes on, and up to where its blocks have their KV."""
        shared = start = len(match) * self.block_size
        missing_end = None if self.tails is None else self.tails.following(state, len(match))
        if missing_end is not None:
            shared = start = missing_end.prompt_length
        forks = state.tail is not None and state.tail.state_slot is not None and start >= sequence.num_tokens - 1
        if self.states is not None and not forks:
            start = self.states.deepest(match, sequence.num_tokens) * self.block_size
        return 0 if sequence.prompt_logprobs_wanted else min(start, sequence.num_tokens - 1), shared

    def _renew(self, sequence: Sequence, state: PrefixState) -> list[Sequence]:
        """Hold the prompt that a sequence has computed again, if it has; the samples that waited for it."""
        tail = state.group
        if tail is None or self.tails is None or self.leaders is None or sequence.num_computed < tail.prompt_length:
            return []
        state.renews = False
        if tail.users and tail not in self.tails and self.may_publish(sequence):
            self.tails.hold(tail, sequence)
        return self.leaders.published(tail, sequence)

    def _publish(self, sequence: Sequence) -> list[Sequence]:
        state, index, leaders = sequence.prefix, self.index, self.leaders
        full = sequence.num_computed // self.block_size
        if state is None or index is None or leaders is None or full <= state.num_passed or state.epoch != index.epoch:
            return []
        woken: list[Sequence] = []
        by = None if self.checkpoints is None else sequence
        state.chain.cover(sequence.token_ids[: full * self.block_size])
        for number in range(state.num_passed, full):
            if number >= state.num_published and not self._publish_block(index, sequence, state.chain[number], number):
                state.epoch = NEVER
                return woken + leaders.resign(sequence)
            woken += leaders.published(state.chain[number], by)
        index.sweep(SWEPT_PER_BLOCK * (full - state.num_passed))
        state.num_passed = full
        state.num_published = max(full, state.num_published)
        return woken

    def _publish_block(self, index: PrefixIndex, sequence: Sequence, digest: bytes, number: int) -> bool:
        """Whether this block of a sequence, or the equal one that was there before, can be hit now."""
        size, blocks = self.block_size, self.tables.blocks(sequence.slot)
        previous = blocks[number - 1] if number else None
        first = index.publish(blocks[number], digest, sequence.token_ids[number * size : (number + 1) * size], previous)
        return first == blocks[number] or (first is not None and self._replace(sequence.slot, number, first))

    def _left_waiting(self, state: PrefixState) -> None:
        if self.tails is not None:
            self.tails.leave(state)
        if self.checkpoints is not None:
            self.checkpoints.withdraw(state)

    def _count(self, chain: TokenChain, hits: int, skipped: int) -> None:
        counters = self.counters
        counters.queries += 1
        counters.hits += skipped > 0
        counters.tokens_skipped += skipped
        if self.index is not None and hits < len(chain):
            counters.lost_to_eviction += self.index.was_evicted(chain[hits])

    def _evict(self, block: int) -> None:
        """A block leaves the index, and takes its checkpoint along."""
        if self.index is not None:
            self.index.remove(block)
        if self.states is not None:
            self.states.drop(block)

    def _extend(self, slot: int, count: int) -> None:
        blocks, evicted = self.pool.allocate(count)
        for block in evicted:
            self._evict(block)
        self.tables.extend(slot, blocks)

    def _replace(self, slot: int, number: int, block: int) -> bool:
        """Use the block that was there first instead of an equal one, unless others read the latter."""
        own = self.tables.blocks(slot)[number]
        if self.pool.refcount(own) > 1:
            return False
        self.pool.claim(block)
        self.tables.replace(slot, number, block)
        self._give_back([own])
        return True

    def _give_back(self, blocks: list[int]) -> None:
        """Release blocks, in this order."""
        if self.index is None:
            self.pool.release(blocks)
        elif self._keeps_free_blocks:
            self.pool.release(blocks, self.index.by_block)
        else:
            self.pool.release(blocks)
            for block in blocks:
                if block in self.index.by_block and self.pool.refcount(block) == 0:
                    self._evict(block)
