"""Say what the scheduler asks of KV memory: `Cache`, which by itself shares nothing. `PrefixCache` shares.

What a cache and a sequence share
---------------------------------
* A cache writes `slot`; and when it admits a sequence, through `Sequence.resume_at`, `num_computed` and
  `kv.write_from`. It writes nothing else of a sequence or its request.
* It reads `token_ids[:num_tokens]`, `num_prompt_tokens`, `num_computed`, `prompt_logprobs_wanted`, of `schedule`
  `num_ahead`, and of the request `prompt`, `prompt_digests`, `params.cache_salt`, `adapter_number`, `images`,
  `sequences` and `shared.error`.
* What it remembers of a sequence between `track` and `forget` is its own (`CacheEntry`): no other writes it.

Invariants
----------
* A sequence that runs has a slot, and blocks for all of its known tokens; one that does not run has neither.
* Every call either does the whole of what it says or changes nothing: a sequence that is not admitted leaves even the
  order of eviction as it was.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from samebit.kernels.layout.grids import ceil_div
from samebit.rollout.cache.block_pool import BlockPool
from samebit.rollout.cache.block_tables import BlockTables
from samebit.rollout.cache.checkpoints.pool import Captures, CheckpointPool
from samebit.rollout.cache.counters import CacheCounters
from samebit.rollout.cache.held_prompts import HeldPrompts
from samebit.rollout.publishing.journal import CacheJournal, CacheSnapshot
from samebit.rollout.requests.block_digests import PromptDigests
from samebit.rollout.requests.images import PromptImages
from samebit.rollout.requests.request import Request, Sequence
from samebit.rollout.requests.shared import IntArray


class Cache:
    """Owns blocks and slots of the sequences that run, and whatever of their KV can be used again: nothing, but for
    what a subclass overrides.

    keeps_checkpoints: whether there are states to move before a step, and to keep during it.
    checkpoints: of recurrent states; a pool without slots where none are kept. held: prompts for samples that have not
    begun; none where nothing is shared.
    Methods that return sequences return the followers that wait no longer: the scheduler queues them again.
    """

    shares_prompts = False
    """Says whether one sample of a request computes the prompt for all of them."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        checkpoints: CheckpointPool | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables = BlockTables(max_num_seqs, ceil_div(max_model_len, block_size), block_size)
        self.keeps_checkpoints = checkpoints is not None
        self.checkpoints = CheckpointPool(0, block_size, range(0)) if checkpoints is None else checkpoints
        self.held = HeldPrompts(self.pool, self.tables, self._give_back, self.checkpoints)
        self.counters = CacheCounters()
        self._copies: list[tuple[int, int]] = []

    @property
    def block_size(self) -> int:
        """Return the tokens of a block."""
        return self.tables.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return ceil_div(num_tokens, self.block_size)

    # -- before a sequence runs --------------------------------------------------------------------

    def hash_prompt(
        self, prompt: IntArray, cache_salt: str | None, adapter: int = 0, images: PromptImages | None = None
    ) -> PromptDigests | None:
        """Name the full blocks of a prompt that goes through the adapter of this number, where names are used; 0 for
        none. They name its images too. Any thread may call it."""
        return None

    def track(self, request: Request) -> None:
        """Make the sequences of a new request known."""

    def follow(self, sequence: Sequence) -> bool:
        """Let a waiting sequence stand behind the running one that computes what it needs, if there is one; tell
        whether there is."""
        return False

    def admit(self, sequence: Sequence, *, headroom: int = 0) -> bool:
        """Give a waiting sequence a slot and blocks for its known tokens, if `headroom` blocks stay free; tell whether
        it was admitted. `num_computed` then says where it goes on."""
        needed = self.blocks_for(sequence.num_tokens)
        if not self.tables.has_free_slot or needed > self.pool.num_free - headroom:
            return False
        sequence.slot = self.tables.take_slot()
        self._extend(sequence.slot, needed)
        return True

    def forget(self, sequence: Sequence) -> None:
        """Drop what is remembered of a sequence that does not run and never will again."""

    def take_copies(self) -> list[tuple[int, int]]:
        """Hand over the (from, to) blocks that have to be copied before the coming step computes anything."""
        copies, self._copies = self._copies, []
        return copies

    # -- while it runs -----------------------------------------------------------------------------

    def reserve(self, sequence: Sequence, count: int) -> bool:
        """Make a running sequence's blocks hold `count` tokens behind the computed ones; tell whether they do."""
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
        """Return where a chunk ends that may go on to `end`."""
        return end

    def may_publish(self, sequence: Sequence) -> bool:
        """Tell whether others may use what a running sequence computes: all of its KV is of the current weights."""
        return False

    @property
    def depends_on_tokens(self) -> bool:
        """Return whether what a step keeps depends on its tokens: on whether a sequence that waits begins with them."""
        return False

    def take_captures(self, sequence: Sequence, end: int) -> Captures:
        """Choose which states to keep while a step computes this sequence up to `end`, and take their slots."""
        return ()

    def publish_blocks(self, sequence: Sequence, captures: Captures = ()) -> list[Sequence]:
        """Make hittable what a step has computed of a sequence: its full blocks, with the states kept at their ends.
        Nothing of a request that has failed is published."""
        return []

    def hold_prompt(self, leader: Sequence, samples: Items[Sequence]) -> None:
        """Keep the blocks of a prompt, the partly filled last one too, for the other samples of the request."""

    def take_back(self, sequence: Sequence, *, waits_again: bool = False) -> list[Sequence]:
        """Take a running sequence's slot and blocks back, for ever or until it is admitted again."""
        self._free_slot(sequence)
        return []

    # -- the cache as a whole ----------------------------------------------------------------------

    @property
    def num_hittable(self) -> int:
        """Return how many blocks can be hit, used or free."""
        return 0

    def clear_index(self) -> list[Sequence]:
        """Make sure that nothing computed so far is hit again, as after a weight update; blocks and running sequences
        stay."""
        return []

    def open_journal(self, incarnation: int) -> CacheJournal:
        """Note from now on what can be hit and what no longer, in a new journal of this incarnation. What is there
        already, `snapshot` says."""
        return CacheJournal(incarnation, 0)

    def snapshot(self, journal: CacheJournal) -> CacheSnapshot:
        """Return all that can be hit, as a message of the journal that is open."""
        return journal.snapshot([])

    def sweep(self) -> None:
        """Do a step's share of freeing what `clear_index` left."""

    # -- parts -------------------------------------------------------------------------------------

    def _extend(self, slot: int, count: int) -> None:
        """Give a slot this many new blocks, which the caller has seen to be free."""
        blocks, evicted = self.pool.allocate(count)
        self._evict(evicted)
        self.tables.extend(slot, blocks)

    def _free_slot(self, sequence: Sequence) -> None:
        """Give back a sequence's blocks, the last one first, and its slot."""
        self._give_back(self.tables.blocks(sequence.slot)[::-1])
        self.tables.empty(sequence.slot)
        sequence.slot = -1

    def _give_back(self, blocks: list[int]) -> None:
        """Release blocks, in this order."""
        self.pool.release(blocks)

    def _evict(self, blocks: list[int]) -> None:
        """Forget the content of blocks whose memory is needed."""


class NoPrefixCache(Cache):
    """Shares nothing: each sequence computes all of its tokens, and its blocks end with it."""
