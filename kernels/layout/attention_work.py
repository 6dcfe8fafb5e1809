"""List the work items of the attention kernel: which query rows walk which keys. Made on the host from the block
tables.

Invariants:

* The keys of a row are walked by one item, or by two one after the other: the first has rows of several sequences and
  the keys that lie in the same physical blocks for all of them, the second goes on from there. The cut is at a multiple
  of `KV_CHUNK`, so no bit depends on it, nor on who is in a group.
* Only sequences that compute one token are grouped, and only over tokens that earlier calls have put into the pages:
  each row sees all keys of its group's item, but for a sliding window's, and the second item always has a key.
* What this costs grows with the sequences, and with the blocks of those that share their first `KV_CHUNK` tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from samebit.kernels.layout.call_rows import CallRows, Ints
from samebit.kernels.layout.grids import KV_CHUNK, ceil_div
from samebit.kernels.layout.transfer import Arrays

ITEM = 6
"""An item has so many numbers: the sequence whose block table is read, the first of its rows in
`AttentionWork.queries`, how many they are, the oldest position among them, and the keys: from this one on, up to before
that one. Zeros do nothing.
"""

_PREFIXES, _PIECES = "prefixes of ", "pieces of "


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
        alone = np.ones(len(call.lengths), np.bool_)
        alone[sharers] = False
        order = np.concatenate([sharers, np.flatnonzero(alone)])
        return AttentionWork(order, call.row_start[order], call.lengths[order], call.starts[order], places, shared)

    def queries(self) -> Ints:
        """List ``[N, 2]`` row and position of each token that is computed, sequence after sequence."""
        before = np.cumsum(self.lengths) - self.lengths
        within = np.arange(int(self.lengths.sum())) - np.repeat(before, self.lengths)
        firsts = np.stack([self.row_start, self.starts], axis=1)
        return (np.repeat(firsts, self.lengths, axis=0) + within[:, None]).astype(np.int32)

    def items(self, tokens: int) -> Arrays:
        """List two ``[N, ITEM]`` by name: prefixes of several sequences, then pieces of one, of at most ``tokens``."""
        members = len(self.places)
        first = np.flatnonzero(self.places % tokens == 0)
        counts = np.diff(first, append=members)
        oldest = np.minimum.reduceat(self.starts[:members], first)
        until = np.where(counts > 1, self.shared[first], 0)
        since = np.zeros(len(self.order), np.int32)
        since[:members] = np.repeat(until, counts)
        prefixes = np.stack([self.order[first], first, counts, oldest, 0 * first, until], axis=1)
        names = names_of_items(tokens)
        return {names[0]: prefixes[counts > 1].astype(np.int32), names[1]: self._pieces(tokens, since)}

    def tiles(self, tokens: int) -> Ints:
        """List ``[N, 2]`` sequence, and first row within it, of each piece of at most ``tokens``."""
        owner, within = self._cut(tokens)
        return np.stack([self.order[owner], within], axis=1).astype(np.int32)

    def _pieces(self, tokens: int, since: Ints) -> Ints:
        """List the pieces of each sequence, from these keys ``[S]`` on."""
        owner, within = self._cut(tokens)
        first = (np.cumsum(self.lengths) - self.lengths)[owner] + within
        rows = np.minimum(tokens, self.lengths[owner] - within)
        oldest = self.starts[owner] + within
        return np.stack([self.order[owner], first, rows, oldest, since[owner], oldest + rows], axis=1).astype(np.int32)

    def _cut(self, tokens: int) -> tuple[Ints, Ints]:
        """Cut the sequences up: for each piece the place of its sequence in ``order``, and its first row within it."""
        counts = ceil_div(self.lengths, tokens)
        owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        piece = np.arange(len(owner), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
        return owner, (piece * tokens).astype(np.int32)


def sizes_of_items(names: Iterable[str]) -> list[int]:
    """Return for how many tokens there are items among arrays of these names."""
    return [int(name.removeprefix(_PIECES)) for name in names if name.startswith(_PIECES)]


def names_of_items(tokens: int) -> tuple[str, str]:
    """Return the names of the prefixes and of the pieces."""
    return f"{_PREFIXES}{tokens}", f"{_PIECES}{tokens}"


def room_for_items(name: str, rows: int, sequences: int) -> Ints:
    """Make as many idle items as these rows and sequences can have; ``name``: of an array of items."""
    if name.startswith(_PREFIXES):
        count = min(rows, sequences) // 2
    else:
        count = ceil_div(rows, int(name.removeprefix(_PIECES))) + sequences
    return np.zeros((count, ITEM), np.int32)


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
    common = np.zeros(len(single) + 1, np.int32)  # of each with the one before; nobody is before the first
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
