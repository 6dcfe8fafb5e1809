"""Hold prompts for the samples of a request which have not begun.

Invariants
----------
* A held prompt owns its blocks, all of them, so that a partly filled last one never outlives those before it.
* It ends with the last sample that leaves it, or when its memory is needed; then the first sample that computes
  it again holds it again, for those that still wait.
* While a sample that has the prompt runs (`running`), what is held costs no block: when memory is needed, the last
  block is swapped for that sample's own. So only a prompt of which no sample runs is ever given up for memory.
* With recurrent states it owns a slot with the prompt's, as far as there are such slots.
"""

from __future__ import annotations

from collections.abc import Callable

from samebit.kernels.layout.grids import ceil_div
from samebit.rollout.cache.block_pool import BlockPool
from samebit.rollout.cache.block_tables import BlockTables
from samebit.rollout.cache.cache_entry import CacheEntry, HeldPrompt
from samebit.rollout.cache.checkpoints.pool import CheckpointPool
from samebit.rollout.requests.request import Sequence


class HeldPrompts:
    """Holds the prompts of one cache. give_back: releases blocks, in that order. checkpoints: holds states."""

    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTables,
        give_back: Callable[[list[int]], None],
        checkpoints: CheckpointPool,
    ) -> None:
        self._pool = pool
        self._tables = tables
        self._give_back = give_back
        self._checkpoints = checkpoints
        self._held: dict[HeldPrompt, None] = {}
        self._without_keeper: dict[HeldPrompt, None] = {}

    def __contains__(self, prompt: HeldPrompt) -> bool:
        """Tell whether a prompt is held."""
        return prompt in self._held

    def hold_first(self, leader: CacheEntry, samples: list[CacheEntry]) -> None:
        """Keep a prompt that was just computed for the other samples of its request."""
        prompt = HeldPrompt(leader.sequence, leader.sequence.num_prompt_tokens, len(samples))
        leader.prompt, leader.waits_for = prompt, None
        for sample in samples:
            sample.prompt = sample.waits_for = prompt
        self.hold(prompt, leader.sequence)

    def hold(self, prompt: HeldPrompt, leader: Sequence) -> None:
        """Keep what `leader` has computed of this prompt, all of it; its state is the leader's."""
        count = ceil_div(prompt.length, self._tables.block_size)
        prompt.leader = prompt.keeper = leader
        prompt.running = {leader: None}
        prompt.blocks = self._tables.blocks(leader.slot)[:count]
        self._pool.claim(prompt.blocks)
        prompt.held_slot = self._checkpoints.hold(leader.slot)
        self._held[prompt] = None

    def missing_end(self, entry: CacheEntry, hits: int) -> HeldPrompt | None:
        """Return the prompt of which only the end is missing behind these hits, if it is held."""
        prompt = entry.prompt
        if prompt is None or prompt not in self._held or prompt.length // self._tables.block_size != hits:
            return None
        return prompt

    def lost(self, entry: CacheEntry) -> HeldPrompt | None:
        """Return the prompt of this sequence that other samples wait for, if it is not held."""
        prompt = entry.prompt
        return None if prompt is None or not prompt.num_unstarted or prompt in self._held else prompt

    def count_out(self, entry: CacheEntry) -> None:
        """Note that a sample begins, or never will."""
        prompt, entry.waits_for = entry.waits_for, None
        if prompt is not None:
            prompt.num_unstarted -= 1
            if prompt.num_unstarted == 0 and prompt in self._held:
                self._end(prompt)

    def note_running(self, entry: CacheEntry, shared: int) -> None:
        """Note that a sequence runs whose blocks have the KV of `shared` tokens."""
        prompt = entry.prompt
        if prompt is not None and prompt in self._held and shared >= prompt.length:
            prompt.running[entry.sequence] = None

    def note_stopping(self, entry: CacheEntry) -> None:
        """Note that a sequence is about to give its blocks back."""
        prompt = entry.prompt
        if prompt is None:
            return
        prompt.running.pop(entry.sequence, None)
        if prompt.keeper is entry.sequence:
            prompt.keeper = None
            if prompt in self._held:
                self._without_keeper[prompt] = None

    def free_one(self) -> bool:
        """Free the blocks that the last held of the prompts without a keeper owns alone; False when each has one."""
        if not self._without_keeper:
            return False
        prompt = self._without_keeper.popitem()[0]
        if prompt.running:
            self._keep_by(prompt, next(iter(prompt.running)))
        else:
            self._end(prompt)
        return True

    def drop_all(self) -> None:
        """Give up all prompts."""
        for prompt in list(self._held):
            self._end(prompt)

    def _keep_by(self, prompt: HeldPrompt, sample: Sequence) -> None:
        """Swap the last block for the one that a running sample has in its place; they share the others."""
        own = self._tables.blocks(sample.slot)[len(prompt.blocks) - 1]
        before, prompt.blocks[-1] = prompt.blocks[-1], own
        prompt.keeper = sample
        self._pool.claim([own])
        self._give_back([before])

    def _end(self, prompt: HeldPrompt) -> None:
        del self._held[prompt]
        self._without_keeper.pop(prompt, None)
        self._give_back(prompt.blocks[::-1])
        prompt.running, prompt.keeper = {}, None
        if prompt.held_slot is not None:
            self._checkpoints.let_go(prompt.held_slot)
            prompt.held_slot = None
