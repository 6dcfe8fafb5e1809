"""Encode the difference between two versions of a tensor: lossless, bit for bit, piece by piece.

    SPARSE  count, elements, uint16 index of each changed element, padded to 8 bytes; then the new elements
    BITMAP  count, elements, one bit an element, padded to 8 bytes; then the new elements
    DENSE   the piece itself

Invariants
----------
* A piece has at most 65,536 elements and is encoded in the smallest of the three ways; an unchanged one is not sent.
* Elements are compared and moved as integers: -0.0, and any bits, arrive as they are.
* `apply_encoded` checks counts and indices before it writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from samebit.weight_sync.digest import Bytes, compiled
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.wire.buckets import ALIGN, Kind

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
    """Encodes what differs from a base, and brings the base up to date. Pieces fit into `room` bytes."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._indices = np.empty(MAX_ELEMENTS + 1, np.uint16)
        self._values = np.empty((MAX_ELEMENTS + 1) * 8, np.uint8)

    def pieces(self, new: Bytes, element: int) -> list[tuple[int, int]]:
        """Return where each piece of a tensor of this element size begins and ends, in bytes."""
        size = min(MAX_ELEMENTS * element, self._room // ALIGN * ALIGN)
        return [(begin, min(begin + size, new.size)) for begin in range(0, new.size, size)]

    def encode(self, new: Bytes, base: Bytes, element: int) -> Encoded | None:
        """Return the change of one piece, valid until the next call; None for an unchanged piece."""
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


def apply_encoded(kind: Kind, payload: Bytes, target: Bytes, element: int) -> int:
    """Write the changed elements of a piece that begins where `target` begins; return the bytes of the piece.

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
    return whole


def _indices(kind: Kind, places: Bytes, count: int, elements: int) -> Any:
    indices: npt.NDArray[Any] = places[: 2 * count].view(np.uint16).copy()  # the sender could change what is shared
    if kind is Kind.BITMAP:
        indices = np.flatnonzero(np.unpackbits(places, count=elements, bitorder="little"))
    if indices.size != count or int(indices.max()) >= elements:
        raise SyncBrokenError(f"a piece of a delta with places beyond its {elements} elements")
    return indices


def _padded(size: int) -> int:
    return -(-size // 8) * 8


@compiled
def _collect(now: Any, before: Any, indices: Any, values: Any) -> Any:
    """Write places and values of elements that differ; return their count. Branchless: arrays have a spare element."""
    count = 0
    for i in range(now.size):
        indices[count] = i
        values[count] = now[i]
        count += now[i] != before[i]
    return count
