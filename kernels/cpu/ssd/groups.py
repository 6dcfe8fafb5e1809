"""Define the groups of arguments that the functions of the scan hand to each other.

Letters: T tokens, H heads, P head size, N state size, G groups, C tokens a chunk.
"""

from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """Holds H, P, the number of groups and N; P (``wide``) and N (``deep``) in whole vectors."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    wide: int
    deep: int


class Inputs(NamedTuple):
    """Holds what is read: xbc ``[T, H P + 2 groups N]``, dt ``[T, H]``, flat, their strides, ``[H]`` parameters."""

    xbc: Any
    xbc_stride: int
    dt: Any
    dt_stride: int
    decay_rate: Any
    dt_bias: Any
    dt_low: Any
    dt_high: Any
    skip: Any


class Memory(NamedTuple):
    """Holds what is read and written, flat: states ``[slots, H, N, P]``, and the tails of all sequences.

    x: ``[slots, H, C, P]``. b: ``[slots, tiles, C, N]``. steps, sums: ``[slots, H, C]``. block_state: as ``state``, of
    the last multiple of ``grid`` tokens; a ``grid`` of 0 is that of a call without memory.
    """

    state: Any
    block_state: Any
    x: Any
    b: Any
    steps: Any
    sums: Any
    grid: int


class Item(NamedTuple):
    """Names a work item: ``length`` rows from ``row`` on of a sequence that is at ``start``, and heads of a group.

    They are ``count`` heads from ``first`` on, in the memory from head ``at`` on; their B begins at element ``b_at``.
    """

    sequence: Any
    row: Any
    length: Any
    start: Any
    group: Any
    first: Any
    count: Any
    at: Any
    b_at: Any


class Span(NamedTuple):
    """Names ``many`` rows from ``row`` on, tokens of one chunk from its token ``inside`` on."""

    row: Any
    inside: Any
    many: Any


class Scratch(NamedTuple):
    """Holds what a chunk needs meanwhile, flat, P and N padded.

    queries: C ``[chunk, N]``. fed: ``[chunk, P]``, x as it enters the state. acc: ``[4, P]``. scores: ``[chunk,
    chunk]``. weights: ``[4, chunk]``.
    """

    queries: Any
    fed: Any
    acc: Any
    scores: Any
    weights: Any
