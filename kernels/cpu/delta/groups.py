"""Define the groups of arguments that the functions of the delta rule hand to each other.

Letters: T tokens, Hk and Hv heads of keys and values, K and V their sizes, C tokens a chunk.
"""

from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """Holds Hk, Hv, K and V; K (``deep``) and V (``wide``) in whole vectors; ``share``: value heads a key head.

    by_channel: each channel of a key decays by itself.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    deep: int
    wide: int
    share: int
    by_channel: bool


class Inputs(NamedTuple):
    """Holds what is read, flat: qkv ``[T, 2 Hk K + Hv V]`` and its stride, decay and beta ``[T, Hv]``, decay by
    channel ``[T, Hv K]``."""

    qkv: Any
    stride: int
    decay: Any
    beta: Any


class Memory(NamedTuple):
    """Holds what is read and written, flat: states ``[slots, Hv, K, V]``, and the tails of all sequences.

    k: ``[slots, Hk, C, K]``. u: ``[slots, Hv, C, V]``. sums: ``[slots, Hv, C]``. left: in their place by channel, what
    each token leaves of the state ``[slots, Hv, C, K]``. block_state: as ``state``, of the last
    multiple of ``grid`` tokens; a ``grid`` of 0 is that of a call without memory.
    """

    state: Any
    block_state: Any
    k: Any
    u: Any
    sums: Any
    left: Any
    grid: int


class Item(NamedTuple):
    """Names a work item: ``length`` rows from ``row`` on of a sequence that is at ``start``, a key head and its value
    heads.

    In the memory they are key head ``key_at`` and the value heads from ``value_at`` on.
    """

    sequence: Any
    row: Any
    length: Any
    start: Any
    key_head: Any
    key_at: Any
    value_at: Any


class Span(NamedTuple):
    """Names ``many`` rows from ``row`` on, tokens of one chunk from its token ``inside`` on."""

    row: Any
    inside: Any
    many: Any


class Scratch(NamedTuple):
    """Holds what a chunk needs meanwhile, flat, K and V padded.

    pairs: ``[chunk, 2, K]``, key and query of each token. scores: ``[chunk, 2, chunk]``, theirs with the keys of the
    chunk. acc: ``[4, V]``, what they read of the state. fed: ``[chunk, V]``, u as it enters the state. decays: ``[K]``,
    of a token's channels. kept: ``[chunk]``. weights: ``[2, chunk]``, of the tail in u and in o.
    """

    pairs: Any
    scores: Any
    acc: Any
    fed: Any
    decays: Any
    kept: Any
    weights: Any
