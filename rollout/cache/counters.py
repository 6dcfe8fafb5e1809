"""Count what the cache does. Totals only grow, and add up across workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CacheCounters:
    """Totals since the cache was built, of admissions that succeeded, and of samples that ended with the one token that
    they drew from a prompt which another sample had computed.

    queries: sequences that looked their tokens up. hits: those that skipped some. tokens_skipped: how
    many. lost_to_eviction: queries that stopped at a block which had been there and was evicted.
    evictions: blocks that left the index for their memory. leader_waits: times that a sequence began to follow.
    """

    queries: int = 0
    hits: int = 0
    tokens_skipped: int = 0
    lost_to_eviction: int = 0
    evictions: int = 0
    leader_waits: int = 0

    def count(self, skipped: int) -> None:
        """A sequence that skipped this many tokens."""
        self.queries += 1
        self.hits += skipped > 0
        self.tokens_skipped += skipped


@dataclass
class CheckpointCounters:
    """Totals. replayed_tokens: computed again behind a checkpoint although their KV was there. holds: prompts whose
    state was kept for samples that begin later.

    misses: admissions whose KV match had no checkpoint at its end. It was evicted; or they leave a cached chain inside
    the next block, where it was not known that a state would be wanted; or there never was one for another reason (also
    where the match is one block with all of their tokens, and so has no place for one before the last of them).
    """

    restores: int = 0
    forks: int = 0
    holds: int = 0
    replayed_tokens: int = 0
    misses_evicted: int = 0
    misses_diverged: int = 0
    misses_no_checkpoint: int = 0
