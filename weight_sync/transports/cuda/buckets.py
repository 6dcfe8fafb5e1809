"""Fill and empty buckets on a GPU without the host, as `buckets` and `destination` do there.

Invariants
----------
* A bucket holds payloads alone, each on a multiple of 64 bytes; the headers of its records go over the control
  channel. The seal covers them as it does on the host.
* A piece is copied within the device and scanned there. `Writer.copy` and `Destination.put` return when both are
  done, so a bucket that was sent or freed is no longer in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from samebit.weight_sync.digest import WORD, Bytes, Lanes, Scan
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.transports.cuda.scan import device_bytes, scan_device_bytes
from samebit.weight_sync.wire.buckets import (
    ALIGN,
    BucketHeader,
    Ending,
    Kind,
    RecordHeader,
    encoded_reason,
    padded,
    sealed,
)
from samebit.weight_sync.wire.destination import Destination


class DeviceWriter:
    """Fills one bucket. `records`: the headers of its records."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._used = 0
        self.records: list[RecordHeader] = []

    @property
    def room(self) -> int:
        return (self._buffer.numel() - self._used) // ALIGN * ALIGN

    def copy(self, tensor: int, offset: int, source: Any, lanes: Lanes) -> Scan:
        place = self._buffer[self._used : self._used + len(source)]
        place.copy_(source)
        scanned = scan_device_bytes(place, lanes, offset=offset)
        self.records.append(RecordHeader(tensor, Kind.DENSE, offset, len(source), scanned.digest))
        self._used += padded(len(source))
        return scanned

    def add(self, tensor: int, kind: Kind, offset: int, parts: Sequence[Bytes]) -> None:
        raise NotImplementedError("a delta does not go through buckets on a device")

    def seal(self, sequence: int, ending: Ending, total: int) -> BucketHeader:
        return sealed(sequence, self._used, ending, total, self.records)

    def reason(self, sequence: int, text: str) -> BucketHeader:
        content = bytearray(encoded_reason(text, self._buffer.numel()))
        self._buffer[: len(content)].copy_(torch.frombuffer(content, dtype=torch.uint8))
        self.records = []
        return sealed(sequence, len(content), Ending.BROKEN, 0, [])


class DeviceDestination(Destination):
    """Writes a tensor that is on a device."""

    def _in_place(self, target: Tensor) -> bool:
        return target.is_contiguous() and target.storage_offset() * target.element_size() % WORD == 0

    def _copy_of(self, target: Tensor) -> Tensor:
        return target.clone(memory_format=torch.contiguous_format)

    def _bytes_of(self, tensor: Tensor) -> Tensor:
        return device_bytes(tensor)

    def _copy(self, offset: int, piece: Any) -> Scan:
        place = self._opened()[offset : offset + len(piece)]
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


def placed(records: Sequence[RecordHeader], header: BucketHeader) -> list[tuple[int, RecordHeader]]:
    """Return where the payload of each record begins, and the record. Raises `SyncBrokenError`."""
    begins = list(accumulate((padded(record.size) for record in records), initial=0))
    if begins.pop() != header.used:
        raise SyncBrokenError(f"a record of bucket {header.sequence} is cut off")
    return list(zip(begins, records, strict=True))
