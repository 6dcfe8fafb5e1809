"""Define the groups of arguments that attention's forward and its gradients share on the CPU.

H heads, D head size, B tokens a block, C tokens a chunk.
"""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Holds the sizes of a layer and of its pages: KV heads, query heads a KV head (G), D of queries and keys, D of
    values, and B."""

    kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    block_size: int


class Softmax(NamedTuple):
    """Says what becomes of the scores: times ``scale``, ``softcap`` (0 for off), ``window`` tokens seen (0 for all)."""

    scale: Any
    softcap: Any
    window: int


class Place(NamedTuple):
    """Names a work item: ``count`` tokens from ``row`` on, at absolute ``position``, for the heads of one KV head.

    table: the row of the block tables that is its sequence's.
    """

    table: Any
    row: Any
    position: Any
    count: Any
    kv_head: Any


class Following(NamedTuple):
    """Says what this thread computes after an item, and what was computed before it.

    last_table: row of the block tables of the sequence before, whose blocks are cached; -1 for none. first: the token
    that it begins with. behind: how many chunks behind the first are located in `Pieces`.
    """

    last_table: Any
    table: Any
    kv_head: Any
    first: Any
    behind: Any


class Running(NamedTuple):
    """Holds the online softmax of an item's rows, which are up to `QUERY_TILE` tokens of G heads.

    query, acc: ``[rows, D]`` of keys and of values, flat. sums: ``[rows, LANES]``, flat, partial sums of the weights.
    peaks: ``[rows]``, the greatest score so far. tokens: ``[rows]``, absolute positions. s: ``[4, C]``, flat, scores
    and then weights. bounds: ``[2, 4]``, flat, the last token of the chunk that each of four rows does not see yet, and
    the last one that it sees.
    """

    query: Any
    acc: Any
    sums: Any
    peaks: Any
    tokens: Any
    s: Any
    bounds: Any


class Pieces(NamedTuple):
    """Says where each sixteen tokens of a chunk begin in ``source``, and those of the coming chunks in the pages.

    source: the pages, or a copy of the chunk from pages smaller than a vector. stride: between two rows of its keys.
    """

    source: Any
    stride: int
    keys: Any
    values: Any
    coming_keys: Any
    coming_values: Any
