"""What `buckets` and `destination` do, for buckets that lie on a GPU: filled and emptied without the host.

Invariants
----------
* A bucket holds payloads alone, each on a multiple of 64 bytes; the headers of its records go over the control
  channel. The seal covers them as it does on the host.
* A piece is copied within the device and scanned there. `Writer.copy` and `Destination.put` return when both are
  done, so a bucket that was published or freed is no longer in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from samebit.weight_sync.buckets import ALIGN, HEADER_WORDS, BucketHeader, Ending, Kind, padded, sealed
from samebit.weight_sync.checksum import WORD, Bytes, Lanes, Scan
from samebit.weight_sync.destination import Destination
from samebit.weight_sync.device_scan import device_bytes, scan_device_bytes
from samebit.weight_sync.report import SyncBrokenError


class DeviceWriter:
    """Fills one bucket. `records`: the header words of what is in it."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._used = 0
        self.records: list[tuple[int, ...]] = []

    @property
    def room(self) -> int:
        return (self._buffer.numel() - self._used) // ALIGN * ALIGN

    def copy(self, tensor: int, offset: int, source: Any, lanes: Lanes) -> Scan:
        place = self._buffer[self._used : self._used + len(source)]
        place.copy_(source)
        scanned = scan_device_bytes(place, lanes, offset=offset)
        self.records.append((tensor, int(Kind.DENSE), offset, len(source), scanned.digest))
        self._used += padded(len(source))
        return scanned

    def add(self, tensor: int, kind: Kind, offset: int, parts: Sequence[Bytes]) -> None:
        raise NotImplementedError("a delta does not go through buckets on a device")

    def seal(self, sequence: int, ending: Ending, total: int) -> BucketHeader:
        return sealed(sequence, self._used, ending, total, self.records)

    def reason(self, sequence: int, text: str) -> BucketHeader:
        content = bytearray(text.encode()[: self._buffer.numel()])
        self._buffer[: len(content)].copy_(torch.frombuffer(content, dtype=torch.uint8))
        self.records = []
        return sealed(sequence, len(content), Ending.BROKEN, 0, [])


class DeviceDestination(Destination):
    """Of a tensor on a device."""

    def _in_place(self, target: Tensor) -> bool:
        return target.is_contiguous() and target.storage_offset() * target.element_size() % WORD == 0

    def _bytes_of(self, tensor: Tensor) -> Tensor:
        return device_bytes(tensor)

    def _copy(self, offset: int, piece: Any) -> Scan:
        place = self._memory[offset : offset + len(piece)]
        piece = piece.to(place.device)
        changed = not torch.equal(place, piece)
        place.copy_(piece)
        found = scan_device_bytes(place, self._lanes, offset=offset)
        return Scan(found.digest, found.finite, changed)

    def _cast(self, offset: int, payload: Any) -> int:
        sent = scan_device_bytes(payload, self._sent_lanes, offset=offset)
        value = payload.view(self.spec.dtype).to(self.target.dtype)
        self._write(offset // self.spec.dtype.itemsize * self.target.element_size(), device_bytes(value))
        return sent.digest


def record_words(given: object, header: BucketHeader) -> list[tuple[int, tuple[int, ...]]]:
    """From a message: where each payload of a bucket begins, and its header. Raises `SyncBrokenError`."""
    if not isinstance(given, list) or not all(_is_record(words) for words in given):
        raise SyncBrokenError(f"records of bucket {header.sequence} that are not valid")
    begins = list(accumulate((padded(words[3]) for words in given), initial=0))
    if begins.pop() != header.used:
        raise SyncBrokenError(f"a record of bucket {header.sequence} is cut off")
    return [(begin, tuple(words)) for begin, words in zip(begins, given, strict=True)]


def _is_record(words: object) -> bool:
    return (
        isinstance(words, list)
        and len(words) == HEADER_WORDS
        and all(type(word) is int and 0 <= word < 1 << 64 for word in words)
    )
