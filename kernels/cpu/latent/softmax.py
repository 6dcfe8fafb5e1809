"""Take chunks of tokens into the online softmax of rows, for attention over latents: sixteen rows are a vector.

Invariants:

* A row takes in each chunk by the same operations in the same order, whatever rows are beside it: a score is a chain
  over the key, an output one over the tokens, weights are added up in sixteen lanes, token j in lane j % 16. Both
  chains go pair by pair where bfloat16 is multiplied so (`tiles`): pairs begin at even elements and even tokens.
* A value that a row does not see is left out, never multiplied by 0: its page may hold anything.

Online softmax: Milakov & Gimelshein 2018; tiling: Dao et al. 2022. H heads, W elements of a key, R of a value, C tokens
a chunk.
"""

from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.base.memory import floats, integers, whole_lines
from samebit.kernels.cpu.base.numeric import narrow, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.gemm.many_rows_vectors import HALF, transpose_strip
from samebit.kernels.cpu.gemm.pairs import STEP, transpose_pairs
from samebit.kernels.cpu.latent.dots import TOKENS, write_columns
from samebit.kernels.cpu.latent.pairs import score_pairs
from samebit.kernels.cpu.latent.tiles import LARGE, NARROW_COLUMNS, ROWS, VECTORS, add_values, score_tokens
from samebit.kernels.cpu.latent.vectors import FEW, PAIRED, PLAIN, weigh, write_halves
from samebit.kernels.layout.grids import CACHE_LINE, KV_CHUNK, LANES

_TILE = KV_CHUNK * LANES
_MOST = ROWS[-1]

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOWEST = np.float32(-np.inf)


class Running(NamedTuple):
    """Holds the online softmax of an item's rows, in whole vectors of them; all flat.

    query: ``[vectors, steps, LANES]``, elements, or pairs of them if ``paired``. words: the same as int32. acc:
    ``[rows, deep]``. sums: ``[vectors, LANES, LANES]``, partial sums of the weights. peaks: ``[rows]``, the greatest
    score so far. shrinks: ``[rows]``, what a chunk multiplies ``acc`` by. seen: ``[rows]``, how many tokens of a chunk
    a row sees. s: ``[vectors, C, LANES]``, scores and then weights.
    """

    paired: Any
    steps: Any
    deep: Any
    query: Any
    words: Any
    acc: Any
    sums: Any
    peaks: Any
    shrinks: Any
    seen: Any
    s: Any


class Following(NamedTuple):
    """Says where the tokens of the coming chunk lie in the pages, if there is one: scores ask for it meanwhile.

    alone: elements from which on a row is no value's, so that only scores can ask for them.
    """

    pages: Any
    places: Any
    there: Any
    alone: Any


@inlined_part
def whole_columns(rank: int, paired: bool) -> Any:
    """Return the elements of a value in whole vectors: of 32 elements where tokens are paired."""
    return (rank + 2 * LANES - 1) // (2 * LANES) * (2 * LANES) if paired else whole_lines(rank)


@inlined_part
def size_of_running(rows: int, width: int, deep: int) -> Any:
    """Return how many float32 `place_running` needs."""
    vectors = (rows + LANES - 1) // LANES
    return vectors * LANES * (width + deep + LANES + 3 + KV_CHUNK) + LANES


@inlined_part
def place_running(address: int, rows: int, width: int, rank: int, paired: bool) -> Any:
    """Place the online softmax of up to ``rows`` rows from an address on; return the address behind it too."""
    vectors = (rows + LANES - 1) // LANES
    lanes = vectors * LANES
    deep, steps = whole_columns(rank, paired), (width + 1) // 2 if paired else width
    acc = address + 4 * lanes * steps
    sums = acc + 4 * lanes * deep
    peaks = sums + 4 * lanes * LANES
    s = peaks + 12 * lanes
    running = Running(
        paired, steps, deep, floats(address, lanes * steps), integers(address, lanes * steps),
        floats(acc, lanes * deep), floats(sums, lanes * LANES),
        floats(peaks, lanes), floats(peaks + 4 * lanes, lanes), floats(peaks + 8 * lanes, lanes),
        floats(s, lanes * KV_CHUNK),
    )  # fmt: skip
    return running, s + 4 * lanes * KV_CHUNK


@kernel_part
def begin_rows(q: Any, heads: int, place: Any, running: Any) -> None:
    """Load the queries of an item, zeros for rows that fill up the last vector, and begin with nothing."""
    width, rows = q.shape[2], place.count * heads
    lanes = whole_lines(rows)
    running.query[: lanes * running.steps] = _ZERO
    for token in range(place.count):
        at = ((place.row + token) * q.shape[1] + place.kv_head * heads) * width
        if running.paired:
            _pair_queries(q.reshape(-1), at, token * heads, heads, width, running)
        else:
            _load_queries(q.reshape(-1), at, token * heads, heads, width, running)
    running.peaks[:lanes] = _LOWEST
    running.sums[: lanes * LANES] = _ZERO
    running.acc[: lanes * running.deep] = _ZERO


@kernel_part
def _load_queries(queries: Any, first: int, row: int, heads: int, width: int, running: Any) -> None:
    """Load a token's queries, from the ``first`` element on, as rows from ``row`` on: eights of rows by vectors."""
    whole = width // LANES * LANES if heads % HALF == 0 and row % HALF == 0 else 0
    for r in range(0, heads if whole > 0 else 0, HALF):
        to = (row + r) // LANES * LANES * running.steps + (row + r) % LANES
        for d in range(0, whole, LANES):
            transpose_strip(queries, first + r * width + d, width, HALF, running.query, to + d * LANES, LANES)
    for r in range(heads):
        at, to = first + r * width, (row + r) // LANES * LANES * running.steps + (row + r) % LANES
        for d in range(whole, width):
            running.query[to + d * LANES] = widen(queries[at + d])


@kernel_part
def _pair_queries(queries: Any, first: int, row: int, heads: int, width: int, running: Any) -> None:
    """Load a token's queries, from the ``first`` element on, as rows from ``row`` on: eights of rows by vectors."""
    whole = width // STEP * STEP if heads % HALF == 0 else 0
    for r in range(0, heads if whole > 0 else 0, HALF):
        to = (row + r) // LANES * LANES * running.steps + (row + r) % LANES
        for d in range(0, whole, STEP):
            transpose_pairs(
                queries, first + r * width + d, width, HALF, running.query, to + d // 2 * LANES, LANES
            )  # fmt: skip
    for r in range(heads):
        at, to = first + r * width, (row + r) // LANES * LANES * running.steps + (row + r) % LANES
        for d in range(whole, width, 2):
            word = np.int32(queries[at + d])
            if d + 1 < width:
                word |= np.int32(queries[at + d + 1]) << 16
            running.words[to + d // 2 * LANES] = word


@kernel_part
def see(heads: int, position: int, base: int, count: int, running: Any) -> None:
    """Begin the chunk at ``base`` for the rows of ``count`` tokens, the first at ``position``: scores are 0."""
    rows = count * heads
    lanes = whole_lines(rows)
    for token in range(count):
        seen = np.float32(max(0, min(KV_CHUNK, position + token + 1 - base)))
        running.seen[token * heads : (lanes if token == count - 1 else (token + 1) * heads)] = seen
    running.s[: lanes * KV_CHUNK] = _ZERO


@kernel_part
def score(
    rows: int, first: int, last: int, begin: int, count: int, source: Any, places: Any, offset: int, following: Any,
    running: Any,
) -> None:  # fmt: skip
    """Go on with the scores of the tokens of a chunk from ``first`` to before ``last``, by elements from ``begin`` on.

    These ``count`` lie at ``source[places[j] + offset]``. Tokens are scored in whole `TOKENS`.
    """
    lanes, step = whole_lines(rows), begin // 2 if running.paired else begin
    for token in range(first, last, TOKENS):
        v = 0
        while v < lanes // LANES:
            vectors = min(VECTORS, lanes // LANES - v)
            if running.seen[(v + vectors) * LANES - 1] > np.float32(token):
                tile = 0 if rows - v * LANES <= LANES // 2 else vectors
                score_tokens(
                    tile, v == 0 and following.there, running.query, (v * running.steps + step) * LANES,
                    running.steps * LANES, count, source, places, offset, token, following.pages, following.places,
                    begin, following.alone, running.s, v * _TILE,
                )  # fmt: skip
            v += vectors


@kernel_part
def score_in_pairs(
    first: int, begin: int, count: int, copied: Any, stride: int, following: Any, running: Any
) -> None:  # fmt: skip
    """Do as `score` for at most `PAIRED_ROWS` rows and keys that `copy_pairs` copied."""
    if running.seen[LANES - 1] > np.float32(first):
        score_pairs(
            following.there, running.query, begin * LANES, count, copied, stride, first, following.pages,
            following.places, begin, running.s, 0,
        )  # fmt: skip


@kernel_part
def weigh_all(rows: int, scale: Any, running: Any) -> None:
    """Turn the scores of a chunk into weights."""
    for v in range(whole_lines(rows) // LANES):
        if running.seen[v * LANES + LANES - 1] == _ZERO:
            running.shrinks[v * LANES : (v + 1) * LANES] = _ONE
        else:
            few = not LARGE and rows - v * LANES <= LANES // 2
            weigh(
                running.seen[v * LANES] == np.float32(KV_CHUNK),
                PAIRED if running.paired else FEW if few else PLAIN, running.s, v * _TILE, scale, running.seen,
                running.peaks, running.shrinks, v * LANES, running.sums, v * LANES * LANES,
            )  # fmt: skip


@kernel_part
def add_weighted(rows: int, columns: int, source: Any, places: Any, following: Any, running: Any) -> None:
    """Multiply what the rows have gathered by what the chunk shrinks it by, and add the weighted values."""
    column = 0
    while column < running.deep:
        columns = columns if column + columns * LANES <= running.deep else 1
        _add_columns(rows, columns, column, source, places, following, running)
        column += columns * LANES


@inlined_part
def rows_together(r: int, rows: int) -> Any:
    """Return how many rows from r on the next tile covers, a few that are not there among them: of a vector's lanes."""
    left = rows - r
    if LARGE:
        many = _MOST
        while many > 1 and many >= 2 * left:
            many //= 2
        return many
    if left > 8 or left in (5, 6):
        return min(_MOST, LANES - r % LANES)
    return 4 if left > 2 else left


@inlined_part
def _add_columns(
    rows: int, columns: int, column: int, source: Any, places: Any, following: Any, running: Any
) -> None:  # fmt: skip
    """Add some columns: of tokens that all rows of a tile see together, and of others row by row."""
    r, deep = 0, running.deep
    line = following.pages.itemsize * columns * LANES >= CACHE_LINE or column % (2 * LANES) == 0
    while r < rows:
        many = rows_together(r, rows)
        together = np.int64(running.seen[r])
        if running.paired and running.seen[min(r + many, rows) - 1] > running.seen[r]:
            together -= together % 2  # a pair is multiplied as one
        add_values(
            many, columns, 2 if r == 0 and line else 1, running.s, r // LANES * _TILE + r % LANES, 0, together, source,
            places, column, following.pages, following.places, running.shrinks, r, running.acc, r * deep + column,
            deep,
        )  # fmt: skip
        for row in range(r, min(r + many, rows)):
            last = np.int64(running.seen[row])
            if last > together:
                add_values(
                    1, columns, 0, running.s, row // LANES * _TILE + row % LANES, together, last, source, places,
                    column, following.pages, following.places, running.shrinks, row, running.acc, row * deep + column,
                    deep,
                )  # fmt: skip
        r += many


@kernel_part
def write_rows(heads: int, rank: int, halved: bool, place: Any, running: Any, out: Any, lse: Any) -> None:
    """Divide the sums of weighted values by the sums of weights; ``halved`` if even columns lie before odd ones."""
    deep = running.deep
    for r in range(place.count * heads):
        total = _ZERO
        for lane in range(LANES):
            total = total + running.sums[(r // LANES * LANES + lane) * LANES + r % LANES]
        token, head = place.row + r // heads, place.kv_head * heads + r % heads
        target, at = out[token, head], r * deep
        if running.paired:
            for d in range(0, rank - rank % (2 * LANES), 2 * LANES):
                write_columns(running.acc, at + d, total, target, d)
            for d in range(rank - rank % (2 * LANES), rank):
                lane = d // (2 * LANES) * (2 * LANES) + d // 4 % 2 * LANES + d // 8 % 4 * 4 + d % 4
                target[d] = narrow(running.acc[at + lane] / total, target[0])
        elif halved:
            for d in range(0, rank, NARROW_COLUMNS * LANES):
                write_halves(running.acc, at + d, total, target, d)
        else:
            for d in range(rank):
                target[d] = narrow(running.acc[at + d] / total, target[0])
        if len(lse) > 0:
            lse[token, head] = running.peaks[r] + np.float32(np.log(np.float64(total)))
