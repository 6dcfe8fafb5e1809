"""Look for the longest match of a text's end, in chains of the places that have the same n-gram before them.

The search of Lempel and Ziv's coder of 1977 as its successors do it: a table has the last place of each n-gram by its
hash, and each place links to the one before it. A token costs the same whatever stands before it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.part import inlined_part

_MOST_TRIES = 16
"""Places of a chain that are looked at."""


@inlined_part
def _place_in_table(tokens: Any, end: int, gram: int, size: int) -> Any:
    """Return where the table has the n-gram before ``end``; its size is a power of two."""
    mixed = np.uint64(0)
    for at in range(end - gram, end):
        mixed = (mixed ^ np.uint64(tokens[at])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return np.int64(mixed & np.uint64(size - 1))


def _find_match(tokens: Any, context: Any, gram: int, known: int, table: Any, links: Any, found: Any) -> None:
    """Link the places from ``known`` on, and write the length of the match and the place behind it to ``found``."""
    for place in range(max(known, gram), len(tokens)):
        at = _place_in_table(tokens, place, gram, len(table))
        links[place] = table[at]
        table[at] = place
    found[0], found[1] = 0, 0
    end = len(context)
    if end < gram:
        return
    place = np.int64(table[_place_in_table(context, end, gram, len(table))])
    for _ in range(_MOST_TRIES):
        if place == 0 or found[0] == end:
            return
        length = 0
        while length < min(place, end) and tokens[place - 1 - length] == context[end - 1 - length]:
            length += 1
        if length >= gram and length > found[0]:
            found[0], found[1] = length, place
        place = np.int64(links[place])


_kernel = compile_kernel(_find_match)


def find_match(
    tokens: npt.NDArray[np.int64], context: npt.NDArray[np.int64], gram: int, known: int,
    table: npt.NDArray[np.int32], links: npt.NDArray[np.int32],
) -> tuple[int, int]:  # fmt: skip
    """Implement `dispatch.find_match`."""
    found = np.empty(2, np.int64)
    _kernel(tokens, context, gram, known, table, links, found)
    length, place = found.tolist()
    return length, place
