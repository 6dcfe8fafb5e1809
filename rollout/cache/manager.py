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
from samebit.rollout.cache.chain import ChainHasher, TokenChain
from samebit.rollout.cache.counters import CacheCounters
from samebit.rollout.cache.index import CachedBlock, PrefixIndex, Tokens
from samebit.rollout.cache.leaders import Leaders
from samebit.rollout.cache.prefix_state import NEVER, PrefixState
from samebit.rollout.cache.states import StateCache
from samebit.rollout.cache.tables import BlockTables
from samebit.rollout.cache.tails import PromptTail, PromptTails
from samebit.rollout.cache.waiting_chains import WaitingChains

if TYPE_CHECKING:
    from samebit.rollout.request import Request, Sequence

SWEPT_PER_STEP = 64
"""Entries of a cleared index that a step frees."""

SWEPT_PER_BLOCK = 3
"""And those that a published block frees: as many as it may leave itself, so that they do not pile up."""


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
        self.waiting = WaitingChains()
        self._keeps_free_blocks = eviction_policy == "lru"
        self.tails = PromptTails(self._give_back, self.states)
        self._copies: list[tuple[int, int]] = []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- before a sequence runs --------------------------------------------------------------------

    def hash_prompt(self, prompt: Tokens, cache_salt: str | None) -> list[bytes]:
        """The digests of a prompt's full blocks (any thread may call it); none without prefix caching."""
        if self.hasher is None:
            return []
        return self.hasher.extend(self.hasher.root(cache_salt), prompt)

    def track(self, request: Request) -> None:
        """Make a new request's sequences known."""
        if self.hasher is None:
            return
        salt = request.params.cache_salt
        if request.prompt_digests is None:
            request.prompt_digests = self.hash_prompt(request.prompt, salt)
        root = self.hasher.root(salt)
        for sequence in request.sequences:
            sequence.prefix = PrefixState(TokenChain(self.hasher, root, request.prompt_digests))
        first = request.sequences[0].prefix
        if first is not None and self.states is not None and self.states.num_checkpoints:
            first.announced = request.prompt_digests[: (len(request.prompt) - 1) // self.block_size]
            self.waiting.announce(first.announced)

    def awaited(self, sequence: Sequence) -> bytes | None:
        """The block that a waiting sequence should wait for: a running one computes it, and it saves tokens."""
        state = sequence.prefix
        if state is None or self.leaders is None or sequence.prompt_logprobs_wanted:
            return None
        match = self._match(sequence)
        end = self.leaders.reach(state.chain, len(match))
        if self.states is not None:
            end = min(end, (sequence.num_tokens - 1) // self.block_size) if self.states.num_checkpoints else 0
        here, _ = self._resume_point(sequence, state, match)
        if end <= len(match) or min(end * self.block_size, sequence.num_tokens - 1) <= here:
            return None
        return state.chain[end - 1]

    def follow(self, sequence: Sequence, digest: bytes) -> None:
        """Let a waiting sequence stand behind the one that computes this block, which takes a checkpoint there."""
        state = sequence.prefix
        if state is None or self.leaders is None:
            raise RuntimeError("there are no leaders without prefix caching")
        leader = self.leaders.leader(digest).prefix
        if self.states is not None and leader is not None:
            number = len(state.match)
            while state.chain[number] != digest:
                number += 1
            leader.wanted.add((number + 1) * self.block_size)
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
            self.tails.leave(sequence.prefix)
            self._withdraw(sequence.prefix)
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

    def may_publish(self, sequence: Sequence) -> bool:
        """Whether all of its KV belongs to the current epoch."""
        return self.index is not None and sequence.prefix is not None and sequence.prefix.epoch == self.index.epoch

    def plan_captures(self, sequence: Sequence, end: int) -> tuple[tuple[int, int], ...]:
        """(position, checkpoint) of the states to keep while a step computes this sequence up to `end`."""
        state = sequence.prefix
        if self.states is None or state is None or not self.states.num_checkpoints or not self.may_publish(sequence):
            return ()
        reached = {position for position in state.wanted if position <= end}
        state.wanted -= reached
        reached |= self._left_by_waiting(state.chain, sequence.num_computed, end)
        taken = ((position, self.states.take()) for position in sorted(reached))
        return tuple((position, checkpoint) for position, checkpoint in taken if checkpoint is not None)

    def keep_captures(self, sequence: Sequence, captures: tuple[tuple[int, int], ...]) -> None:
        """The states that a step has kept belong to the blocks that end there, if these were published."""
        if self.states is None or self.index is None or sequence.prefix is None:
            return
        owned = self.tables.blocks(sequence.slot)
        for position, checkpoint in captures:
            number = position // self.block_size - 1
            known = self.may_publish(sequence) and number < sequence.prefix.num_published
            self.states.attach(self.index.by_block.get(owned[number]) if known else None, checkpoint)

    def publish(self, sequence: Sequence) -> list[Sequence]:
        """Make the full blocks that a step has computed hittable; the followers that waited for them."""
        state, index, leaders = sequence.prefix, self.index, self.leaders
        full = sequence.num_computed // self.block_size
        if state is None or index is None or leaders is None:
            return []
        if full <= state.num_published or state.epoch != index.epoch:
            return []
        woken: list[Sequence] = []
        size, tokens = self.block_size, sequence.token_ids
        state.chain.cover(tokens[: full * size])
        for number in range(state.num_published, full):
            digest = state.chain[number]
            block = self.tables.blocks(sequence.slot)[number]
            previous = self.tables.blocks(sequence.slot)[number - 1] if number else None
            first = index.publish(block, digest, tokens[number * size : (number + 1) * size], previous)
            if first != block and (first is None or not self._replace(sequence.slot, number, first)):
                state.epoch = NEVER
                return woken + leaders.resign(sequence)
            woken += leaders.published(digest)
        index.sweep(SWEPT_PER_BLOCK * (full - state.num_published))
        state.num_published = full
        return woken

    def hold_tail(self, leader: Sequence, samples: Items[Sequence]) -> None:
        """Keep the blocks of a prompt, the partly filled last one too, for the other samples of the request."""
        if not samples:
            return
        length = leader.num_prompt_tokens
        blocks = self.tables.blocks(leader.slot)[: self.blocks_for(length)]
        for block in blocks:
            self.pool.claim(block)
        tail = PromptTail(blocks, leader, length, len(samples))
        self.tails.hold(tail)
        for sample in samples:
            if sample.prefix is not None:
                sample.prefix.tail = tail

    def release(self, sequence: Sequence) -> list[Sequence]:
        """Take back a running sequence's slot and blocks; the followers that waited for it."""
        slot = sequence.slot
        self._save_state(sequence)
        self._give_back(self.tables.blocks(slot)[::-1])
        self.tables.give_back(slot)
        sequence.slot = -1
        return [] if self.leaders is None else self.leaders.resign(sequence)

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

    def drop_tails(self) -> bool:
        """Give up the prompts that are held; whether there were any."""
        return self.tails.drop()

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
        if state is None or self.index is None or self.leaders is None:
            return
        hits, slot = len(match), sequence.slot
        start, shared = self._resume_point(sequence, state, match)
        tail = self.tails.following(state, hits, self.block_size)
        if tail is not None and hits < len(tail.blocks):
            self._copies.append((tail.blocks[hits], self.tables.blocks(slot)[hits]))
        if self.states is not None:
            self._resume_state(self.states, sequence, state, start)
        self._count(state.chain, hits, start)
        self.tails.leave(state)
        self._withdraw(state)
        state.match = []
        state.epoch = self.index.epoch
        state.num_published = hits
        sequence.resume_at(start, write_from=shared)
        self.leaders.lead(sequence, [state.chain[number] for number in range(hits, len(state.chain))])

    def _resume_point(self, sequence: Sequence, state: PrefixState, match: list[CachedBlock]) -> tuple[int, int]:
        """Where a sequence with this match goes on, and up to where its blocks have their KV."""
        shared = start = len(match) * self.block_size
        missing_end = self.tails.following(state, len(match), self.block_size)
        if missing_end is not None:
            shared = start = missing_end.prompt_length
        forks = state.tail is not None and state.tail.state_slot is not None and start == sequence.num_tokens - 1
        if self.states is not None and not forks:
            start = self.states.deepest(match, sequence.num_tokens) * self.block_size
        return 0 if sequence.prompt_logprobs_wanted else min(start, sequence.num_tokens - 1), shared

    def _resume_state(self, states: StateCache, sequence: Sequence, state: PrefixState, start: int) -> None:
        """Bring the live state of an admitted sequence to `start`, and note where it will take checkpoints."""
        last = sequence.num_tokens - 1
        source = None if state.tail is None else state.tail.state_slot
        if start == last and source is not None:
            states.fork(source, sequence.slot)
        else:
            if not sequence.prompt_logprobs_wanted:
                states.count(state.match, start // self.block_size, sequence.num_tokens)
            if start:
                states.restore(state.match[start // self.block_size - 1], sequence.slot)
        ends = {len(state.match), last // self.block_size, sequence.num_tokens // self.block_size}
        state.wanted = {end * self.block_size for end in ends if end * self.block_size > start}

    def _left_by_waiting(self, chain: TokenChain, start: int, end: int) -> set[int]:
        """The block boundaries after `start`, up to `end`, at which a waiting prompt leaves this chain."""
        size = self.block_size
        if not self.waiting:
            return set()
        ends = range(start // size, min(end // size, len(chain)))
        following = (chain[number + 1] if number + 1 < len(chain) else None for number in ends)
        pairs = zip(ends, following, strict=True)
        return {(number + 1) * size for number, after in pairs if self.waiting.leave(chain[number], after)}

    def _withdraw(self, state: PrefixState) -> None:
        self.waiting.withdraw(state.announced)
        state.announced = []

    def _count(self, chain: TokenChain, hits: int, skipped: int) -> None:
        counters = self.counters
        counters.queries += 1
        counters.hits += skipped > 0
        counters.tokens_skipped += skipped
        if self.index is not None and hits < len(chain):
            counters.lost_to_eviction += self.index.was_evicted(chain[hits])

    def _save_state(self, sequence: Sequence) -> None:
        """Keep the state of a sequence that stops as of its last block boundary, if that block is published."""
        if self.states is None or self.index is None or sequence.prefix is None or not self.may_publish(sequence):
            return
        number = sequence.num_computed // self.block_size
        if not 0 < number <= sequence.prefix.num_published or sequence.request.error is not None:
            return
        entry = self.index.by_block.get(self.tables.blocks(sequence.slot)[number - 1])
        if entry is not None:
            self.states.save(sequence.slot, entry)

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
