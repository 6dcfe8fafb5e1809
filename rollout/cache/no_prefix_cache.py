"""Manage KV memory that shares nothing: each sequence computes all of its tokens, and its blocks end with it."""

from __future__ import annotations

from collections.abc import Sequence as Items

from samebit.rollout.cache.checkpoints.pool import Captures
from samebit.rollout.cache.contract import Cache
from samebit.rollout.cache.publishing.journal import CacheJournal, CacheSnapshot
from samebit.rollout.requests.request import IntArray, Request, Sequence


class NoPrefixCache(Cache):
    """Implements `Cache`, which says what each method is asked, without sharing."""

    shares_prompts = False
    depends_on_tokens = False
    num_hittable = 0

    def hash_prompt(self, prompt: IntArray, cache_salt: str | None, adapter: int = 0) -> None:
        return None

    def track(self, request: Request) -> None:
        pass

    def follow(self, sequence: Sequence) -> bool:
        return False

    def admit(self, sequence: Sequence, *, headroom: int = 0) -> bool:
        needed = self.blocks_for(sequence.num_tokens)
        if not self.tables.has_free_slot or needed > self.pool.num_free - headroom:
            return False
        sequence.slot = self.tables.take_slot()
        self._extend(sequence.slot, needed)
        return True

    def forget(self, sequence: Sequence) -> None:
        pass

    def chunk_end(self, sequence: Sequence, end: int) -> int:
        return end

    def may_publish(self, sequence: Sequence) -> bool:
        return False

    def plan_captures(self, sequence: Sequence, end: int) -> Captures:
        return ()

    def publish_blocks(self, sequence: Sequence, captures: Captures = ()) -> list[Sequence]:
        return []

    def hold_prompt(self, leader: Sequence, samples: Items[Sequence]) -> None:
        pass

    def take_back(self, sequence: Sequence, *, waits_again: bool = False) -> list[Sequence]:
        self._free_slot(sequence)
        return []

    def clear_index(self) -> list[Sequence]:
        return []

    def open_journal(self, incarnation: int) -> CacheJournal:
        return CacheJournal(incarnation, 0)

    def snapshot(self, journal: CacheJournal) -> CacheSnapshot:
        return journal.snapshot([])

    def sweep(self) -> None:
        pass

    def _give_back(self, blocks: list[int]) -> None:
        self.pool.release(blocks)

    def _evict(self, blocks: list[int]) -> None:
        pass
