"""The difference between two versions of a tensor: lossless, bit for bit, piece by piece.

    SPARSE  count, elements, uint16 index of each changed element, padded to 8 bytes; then the new elements
    BITMAP  count, elements, one bit an element, padded to 8 bytes; then the new elements
    DENSE   the piece itself

Invariants
----------
* A piece has at most 65,536 elements and is coded in whichever way is smallest; an unchanged one is not sent.
* Elements are compared and moved as integers: -0.0, and any bits, arrive as they are.
* `apply_encoded` checks counts and indices before it writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from samebit.weight_sync.buckets import ALIGN, Kind
from samebit.weight_sync.checksum import Bytes
from samebit.weight_sync.report import SyncBrokenError

MAX_ELEMENTS = 1 << 16
_PREFIX = 16
_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Encoded:
    kind: Kind
    parts: tuple[Bytes, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


class DeltaEncoder:
    """Compares with `base`, and brings it up to date on the way. Its pieces fit into `room` bytes."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._indices = np.empty(MAX_ELEMENTS + 1, np.uint16)
        self._values = np.empty((MAX_ELEMENTS + 1) * 8, np.uint8)

    def pieces(self, new: Bytes, element: int) -> list[tuple[int, int]]:
        """Begin and end of each piece of a tensor of this element size, in bytes."""
        size = min(MAX_ELEMENTS * element, self._room // ALIGN * ALIGN)
        return [(begin, min(begin + size, new.size)) for begin in range(0, new.size, size)]

    def encode(self, new: Bytes, base: Bytes, element: int) -> Encoded | None:
        """The change of one piece, None if there is none. `parts` are valid until the next call."""
        word = _WORDS[element]
        now, before = new.view(word), base.view(word)
        values = self._values.view(word)[: now.size + 1]
        count = int(_collect(now, before, self._indices, values))
        if not count:
            return None
        base[:] = new
        sparse, bitmap, dense = _padded(2 * count), _padded(-(-now.size // 8)), new.size
        changed = count * element
        if dense <= _PREFIX + min(sparse, bitmap) + changed:
            return Encoded(Kind.DENSE, (new,))
        prefix = np.array([count, now.size], np.uint64).view(np.uint8)
        elements = values[:count].view(np.uint8)
        places = np.zeros(min(sparse, bitmap), np.uint8)
        if sparse <= bitmap:
            places[: 2 * count] = self._indices[:count].view(np.uint8)
            return Encoded(Kind.SPARSE, (prefix, places, elements))
        flags = np.zeros(now.size, np.bool_)
        flags[self._indices[:count]] = True
        packed = np.packbits(flags, bitorder="little")
        places[: packed.size] = packed
        return Encoded(Kind.BITMAP, (prefix, places, elements))


def apply_encoded(kind: Kind, payload: Bytes, target: Bytes, element: int) -> None:
    """Write the changed elements of a piece that begins where `target` begins.

    Raises `SyncBrokenError` when the payload is not one that `DeltaEncoder` makes; nothing is written then.
    """
    if payload.size < _PREFIX:
        raise SyncBrokenError(f"a piece of a delta of {payload.size} bytes")
    count, elements = (int(value) for value in payload[:_PREFIX].view(np.uint64))
    whole = elements * element
    if not 0 < count <= elements <= MAX_ELEMENTS or whole > target.size:
        raise SyncBrokenError(f"a piece of a delta with {count} of {elements} elements")
    places = _padded(2 * count if kind is Kind.SPARSE else -(-elements // 8))
    if payload.size != _PREFIX + places + count * element:
        raise SyncBrokenError(f"a piece of a delta of {payload.size} bytes with {count} of {elements} elements")
    indices = _indices(kind, payload[_PREFIX : _PREFIX + places], count, elements)
    word = _WORDS[element]
    target[:whole].view(word)[indices] = payload[_PREFIX + places :].view(word)


def _indices(kind: Kind, places: Bytes, count: int, elements: int) -> Any:
    indices: npt.NDArray[Any] = places[: 2 * count].view(np.uint16)
    if kind is Kind.BITMAP:
        indices = np.flatnonzero(np.unpackbits(places, count=elements, bitorder="little"))
    if indices.size != count or int(indices.max()) >= elements:
        raise SyncBrokenError(f"a piece of a delta with places beyond its {elements} elements")
    return indices


def _padded(size: int) -> int:
    return -(-size // 8) * 8


@njit(cache=True, nogil=True, error_model="numpy")
def _collect(now: Any, before: Any, indices: Any, values: Any) -> Any:
    """Places and values of the elements that differ; without a branch, so the arrays have one element to spare."""
    count = 0
    for i in range(now.size):
        indices[count] = i
        values[count] = now[i]
        count += now[i] != before[i]
    return count
