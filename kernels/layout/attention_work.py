"""List the work items of the attention kernel: which query rows walk which keys. Made on the host from the block
tables.

Invariants:

* The keys of a row are walked by items of two launches: first those that keep a softmax of its first keys, then the one
  that ends the row. What is kept are softmaxes of whole splits (`KV_SPLIT`), one each; or of all splits from position 0
  on, merged, if there is one item for them; the last may be of a part of a split, and the second launch goes on from
  there. So no bit depends on who is in a group, on the cuts, or on what is kept.
* Only sequences that compute one token have items of the first launch, and only over tokens that earlier calls have put
  into the pages: the second item always has a key. The first launch takes rows of several sequences over keys that lie
  in the same physical blocks, and whole splits of long sequences, so that many programs walk their keys at once.
* The longest are split first, within about `PARTS` items and `SLOTS` kept softmaxes: there is room for them in a graph.
* What this costs grows with the sequences, and with the blocks of those that share their first `KV_CHUNK` tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from samebit.kernels.layout.call_rows import CallRows, Ints
from samebit.kernels.layout.grids import KV_CHUNK, KV_SPLIT, ceil_div
from samebit.kernels.layout.transfer import Arrays

ITEM = 8
"""Counts the numbers of an item: the sequence whose block table is read, the first of its rows in
`AttentionWork.queries`, how many they are, the oldest position among them, the keys: from this one on, up to before
that one; and the slot of a softmax. Of an item that ends its rows, the first of those that it begins with, and how many
they are; of another, where it keeps that of its first sequence, and how much further on those of the next are. Zeros do
nothing.
"""

PARTS = 256
"""Limits the items of the first launch that walk a split each, if no sequence has more splits: enough for all of a GPU,
few enough to be idle in a graph."""

SLOTS = 1024
"""Limits the softmaxes of a row of one token that are kept of splits."""

_KEPT, _PIECES = "kept of ", "pieces of "


@dataclass(frozen=True, eq=False)
class AttentionWork:
    """Holds the sequences of a call in the order in which attention takes them: runs that share keys first.

    Attributes:
        order: ``[S]`` the sequences; ``row_start``, ``lengths`` and ``starts``: theirs, as in `CallRows`.
        places: ``[M]`` of the first M, which share: the place in the run.
        shared: ``[M]`` tokens that all of the run share, a multiple of `KV_CHUNK`.
    """

    order: Ints
    row_start: Ints
    lengths: Ints
    starts: Ints
    places: Ints
    shared: Ints

    @staticmethod
    def of(call: CallRows) -> "AttentionWork":
        """Order the call's sequences."""
        sharers, places, shared = _runs(call)
        if not len(sharers):
            order = np.arange(len(call.lengths), dtype=np.int32)
            return AttentionWork(order, call.row_start, call.lengths, call.starts, places, shared)
        alone = np.ones(len(call.lengths), np.bool_)
        alone[sharers] = False
        order = np.concatenate([sharers, np.flatnonzero(alone)])
        return AttentionWork(order, call.row_start[order], call.lengths[order], call.starts[order], places, shared)

    def queries(self) -> Ints:
        """List ``[N, 2]`` row and position of each token that is computed, sequence after sequence."""
        if self.one_token_each:
            return np.stack([self.row_start, self.starts], axis=1)
        before = np.cumsum(self.lengths) - self.lengths
        within = np.arange(int(self.lengths.sum())) - np.repeat(before, self.lengths)
        firsts = np.stack([self.row_start, self.starts], axis=1)
        return (np.repeat(firsts, self.lengths, axis=0) + within[:, None]).astype(np.int32)

    @cached_property
    def one_token_each(self) -> bool:
        """Tell whether each sequence computes one token, as in most steps: such work is listed faster."""
        return len(self.lengths) > 0 and bool(self.lengths.min() == self.lengths.max() == 1)

    def items(self, tokens: int) -> Arrays:
        """List two ``[N, ITEM]`` by name: those that keep softmaxes, then pieces, of at most ``tokens``."""
        units = _Units.of(self, tokens)
        kept, pieces = names_of_items(tokens)
        return {kept: units.kept(), pieces: self._pieces(tokens, units)}

    def tiles(self, tokens: int) -> Ints:
        """List ``[N, 2]`` sequence, and first row within it, of each piece of at most ``tokens``."""
        owner, within = self._cut(tokens)
        return np.stack([self.order[owner], within], axis=1).astype(np.int32)

    def _pieces(self, tokens: int, units: "_Units") -> Ints:
        """List the pieces of each sequence, which end their rows."""
        if self.one_token_each:
            since, slots, kept = units.begun()
            return _items(self.order, self.first_queries, 1, self.starts, since, self.starts + 1, slots, kept)
        owner, within = self._cut(tokens)
        rows = np.minimum(tokens, self.lengths[owner] - within)
        oldest = self.starts[owner] + within
        since, slots, kept = (of_each[owner] for of_each in units.begun())
        first = self.first_queries[owner] + within
        return _items(self.order[owner], first, rows, oldest, since, oldest + rows, slots, kept)

    @property
    def first_queries(self) -> Ints:
        """Return the place in ``queries`` of each sequence's first token, ``[S]``."""
        if self.one_token_each:
            return np.arange(len(self.order), dtype=np.int32)
        return (np.cumsum(self.lengths) - self.lengths).astype(np.int32)

    def _cut(self, tokens: int) -> tuple[Ints, Ints]:
        """Cut the sequences up: for each piece the place of its sequence in ``order``, and its first row within it."""
        counts = ceil_div(self.lengths, tokens)
        owner, piece = _numbered(counts)
        return owner, (piece * tokens).astype(np.int32)


def sizes_of_items(names: Iterable[str]) -> list[int]:
    """Return for how many tokens there are items among arrays of these names."""
    return [int(name.removeprefix(_PIECES)) for name in names if name.startswith(_PIECES)]


def names_of_items(tokens: int) -> tuple[str, str]:
    """Return the names of the items that keep softmaxes, and of the pieces."""
    return f"{_KEPT}{tokens}", f"{_PIECES}{tokens}"


def room_for_items(name: str, rows: int, sequences: int, longest: int) -> Ints:
    """Make as many idle items as these rows and sequences of at most ``longest`` tokens can have.

    ``name``: of an array of items.
    """
    if name.startswith(_KEPT):
        splits = _most_splits(sequences, longest, max(PARTS, _splits_before(longest - 1)))
        count = min(rows, sequences) // 2 * 2 + splits
    else:
        count = ceil_div(rows, int(name.removeprefix(_PIECES))) + sequences
    return np.zeros((count, ITEM), np.int32)


def room_for_slots(sequences: int, longest: int) -> int:
    """Return how many softmaxes of a row the items of these sequences, of at most ``longest`` tokens, keep at once."""
    return 2 * sequences + _most_splits(sequences, longest, SLOTS)


def _most_splits(sequences: int, longest: int, limit: int) -> int:
    return min(limit, sequences * _splits_before(longest - 1))


def _splits_before(token: int) -> int:
    return max(token, 0) // KV_SPLIT


@dataclass(frozen=True, eq=False)
class _Units:
    """Holds the sequences that items take together: U units of one, or of several that share keys.

    Attributes:
        each: ``[S]`` how many splits of a sequence end before the token that it computes.
        first, counts: ``[U]`` the sequences of a unit, as places in `AttentionWork.order`.
        split: ``[U]`` whether each split before the tokens that are computed is an item's of its own.
        shared: ``[U]`` keys that are walked once for all.
        kept_each: ``[U]`` slots of each sequence of a unit, as many as softmaxes are kept of its first keys;
            ``slots``: the first of all.

    Of two sequences at token 130 whose first 100 lie in the same blocks, and one at token 1100 that shares none, the
    units are (0, 1) and (2), at ``first`` 0 and 2. The first is not split, with 64 ``shared`` keys; an item walks them
    for both, and keeps one softmax of each: ``kept_each`` 1, ``slots`` 0. The second is split: an item walks each of
    its two whole splits, ``kept_each`` 2, ``slots`` 2. So four softmaxes are kept, in 0 and 1, 2 and 3; then pieces
    walk from keys 64, 64 and 1024 on.
    """

    work: AttentionWork
    each: Ints
    first: Ints
    counts: Ints
    split: npt.NDArray[np.bool_]
    shared: Ints
    kept_each: Ints
    slots: Ints

    @staticmethod
    def of(work: AttentionWork, tokens: int) -> "_Units":
        """Gather units of at most ``tokens`` sequences, and choose which are split."""
        members, sequences = len(work.places), len(work.order)
        each: Ints = work.starts // KV_SPLIT
        if not work.one_token_each:
            each = np.where(work.lengths == 1, each, 0)
        if not members:
            return _Units._apart(work, each)
        first = np.concatenate([np.flatnonzero(work.places % tokens == 0), np.arange(members, sequences)])
        counts = np.diff(first, append=sequences).astype(np.int32)
        shared = np.zeros(len(first), np.int32)
        several = counts > 1
        shared[several] = work.shared[first[several]]
        most: Ints = np.maximum.reduceat(each, first, dtype=np.int32)
        total: Ints = np.add.reduceat(each, first, dtype=np.int32)
        split = _longest_that_fit(most, counts * most, total - (counts - 1) * (shared // KV_SPLIT))
        shared = np.where(split, shared // KV_SPLIT * KV_SPLIT, shared)
        # Not split: one item of the first launch merges all whole splits, one has the rest. Each keeps a softmax.
        whole, rest = (shared >= KV_SPLIT).astype(np.int32), shared % KV_SPLIT > 0
        kept_each = np.where(split, most, whole + rest)
        slots = np.cumsum(counts * kept_each) - counts * kept_each
        return _Units(work, each, first, counts, split, shared, kept_each, slots)

    @staticmethod
    def _apart(work: AttentionWork, each: Ints) -> "_Units":
        """Make a unit of each sequence: none shares with another."""
        order, nothing = work.order, np.zeros_like(each)
        split = _longest_that_fit(each, each, each)
        kept_each = each * split
        slots = np.cumsum(kept_each, dtype=np.int32) - kept_each
        return _Units(work, each, order, nothing + 1, split, nothing, kept_each, slots)

    def kept(self) -> Ints:
        """List the items that keep softmaxes."""
        if not self.kept_each.any():
            return np.empty((0, ITEM), np.int32)
        if not len(self.work.places):
            return self._own_splits()
        return np.concatenate([self._prefixes(), self._own_splits()])

    def _prefixes(self) -> Ints:
        """List the items that sequences share: one for each split, or two, for all whole splits and for the rest."""
        whole = self.shared // KV_SPLIT
        leading = np.where(self.split, 1, np.maximum(whole, 1))  # splits of the first item
        unit, part = _numbered(np.where(self.shared > 0, ceil_div(self.shared, KV_SPLIT) - leading + 1, 0))
        first, after = self.first[unit], leading[unit] + part
        since = np.where(part > 0, after - 1, 0) * KV_SPLIT
        until = np.minimum(after * KV_SPLIT, self.shared[unit])
        oldest = np.minimum.reduceat(self.work.starts, self.first)[unit]
        slots = self.slots[unit] + part
        return _items(
            self.work.order[first], first, self.counts[unit], oldest, since, until, slots, self.kept_each[unit]
        )

    def _own_splits(self) -> Ints:
        """List the items of splits that sequences do not share."""
        unit, slots = self._of_each
        before = self.shared[unit] // KV_SPLIT
        place, part = _numbered(np.where(self.split[unit], self.each - before, 0))
        number = before[place] + part
        since, oldest, first = number * KV_SPLIT, self.work.starts[place], self.work.first_queries[place]
        return _items(self.work.order[place], first, 1, oldest, since, since + KV_SPLIT, slots[place] + number, 1)

    def begun(self) -> tuple[Ints, Ints, Ints]:
        """Return ``[S]`` from which key on pieces walk, where what is kept of those before begins, and its number."""
        unit, slots = self._of_each
        split = self.split[unit]
        return (
            np.where(split, self.each * KV_SPLIT, self.shared[unit]),
            slots,
            np.where(split, self.each, self.kept_each[unit]),
        )

    @cached_property
    def _of_each(self) -> tuple[Ints, Ints]:
        """Return the unit of each sequence, and its first slot, ``[S]``."""
        if not len(self.work.places):
            return self.first, self.slots
        unit, place = _numbered(self.counts)
        return unit, self.slots[unit] + place * self.kept_each[unit]


def _longest_that_fit(splits: Ints, slots: Ints, items: Ints) -> npt.NDArray[np.bool_]:
    """Choose units with these counts of splits, slots and items, the longest first."""
    most = max(PARTS, int(splits.max(initial=0)))
    chosen = (splits > 0) & (slots <= SLOTS) & (items <= most)
    if not chosen.any() or ((slots * chosen).sum() <= SLOTS and (items * chosen).sum() <= most):
        return chosen
    order = np.argsort(np.where(chosen, -splits, 1), kind="stable")
    for sizes, limit in ((slots, SLOTS), (items, most)):
        chosen[order] &= np.cumsum(sizes[order]) <= limit
    return chosen


def _numbered(counts: Ints) -> tuple[Ints, Ints]:
    """Return the place of each thing and its number there, from the count of things in each place."""
    place = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return place, np.arange(len(place), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts).astype(np.int32)


def _items(sequences: Ints, *columns: Ints | int) -> Ints:
    items = np.empty((len(sequences), ITEM), np.int32)
    items[:, 0] = sequences
    for place, column in enumerate(columns, start=1):
        items[:, place] = column
    return items


def _runs(call: CallRows) -> tuple[Ints, Ints, Ints]:
    """Find the sequences that share, each run of them together, each one's place in the run, the tokens shared.

    Neighbours are joined where they share as much as either shares with its other neighbour.
    """
    single = np.flatnonzero((call.lengths == 1) & (call.starts >= KV_CHUNK)).astype(np.int32)
    if len(single) < 2:
        return single[:0], single[:0], single[:0]
    decisive = call.block_tables[call.table_rows[single], (KV_CHUNK - 1) // call.block_size]
    order = np.argsort(decisive, kind="stable")
    single, decisive = single[order], decisive[order]
    after = np.flatnonzero(decisive[1:] == decisive[:-1]) + 1
    if not len(after):
        return single[:0], single[:0], single[:0]
    common = np.zeros(len(single) + 1, np.int32)  # of each with the one before; the first has no predecessor
    common[after] = _common(call, single[after - 1], single[after])
    joined = common.copy()
    joined[1:-1][(common[1:-1] < common[:-2]) | (common[1:-1] < common[2:])] = 0
    shared = np.maximum(joined[:-1], joined[1:])
    index = np.arange(len(single), dtype=np.int32)
    places = index - np.maximum.accumulate(np.where(joined[:-1] == 0, index, 0))
    sharing = shared > 0
    return single[sharing], places[sharing], shared[sharing]


def _common(call: CallRows, one: Ints, other: Ints) -> Ints:
    """Count ``[P]`` tokens of whole tiles that lie in the same blocks for both, before what either computes."""
    most = np.minimum(call.starts[one], call.starts[other])
    columns = int(most.max(initial=0)) // call.block_size
    mine, theirs = (call.block_tables[call.table_rows[few], : columns + 1] for few in (one, other))
    same = mine == theirs
    same[:, columns] = False
    shared: Ints = np.minimum(same.argmin(axis=1) * call.block_size, most).astype(np.int32)
    return shared // KV_CHUNK * KV_CHUNK
