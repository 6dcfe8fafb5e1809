"""Lay tensors out in buckets, the memory of a set size in which they travel.

    bucket:  record, record, ...                     each begins on a multiple of 64 bytes
    record:  tensor, kind, offset, bytes, digest     five 64-bit words, padded to 64 bytes; then the payload

Invariants
----------
* A record holds a piece of one tensor: `offset` is where it begins there, a multiple of 64 bytes. A tensor
  that does not fit into the rest of a bucket goes on in the next.
* The digest of a record covers its payload. The seal of a bucket covers its header and those of its records.
  `open_records` returns records that lie within the bucket and within their tensors, or raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from samebit.weight_sync.digest import Bytes, Lanes, Scan, chain_digests, copy_bytes, scan_bytes
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.wire.decoding import build

ALIGN = 64
HEADER_WORDS = 5
MIN_BUCKET = 1024
_LONGEST_REASON = 1 << 16
_PLAIN = Lanes.of(torch.uint8)
T = TypeVar("T")


class Ending(IntEnum):
    """Says how a bucket ends: more follow, it was the last, or the sync broke, with the reason in UTF-8 as payload."""

    MORE = 0
    LAST = 1
    BROKEN = 2


class Kind(IntEnum):
    """Says how a piece of a tensor is encoded in a record's payload; `delta` describes SPARSE and BITMAP."""

    DENSE = 0
    SPARSE = 1
    BITMAP = 2


@dataclass(frozen=True)
class BucketHeader:
    """Holds the head of a bucket. `total`, in the last one, is the digest of all weights; `seal` covers the rest."""

    sequence: int
    used: int
    ending: Ending
    total: int
    seal: int

    @property
    def words(self) -> tuple[int, ...]:
        return (self.sequence, self.used, self.ending, self.total, self.seal)


@dataclass(frozen=True)
class RecordHeader:
    """Holds the head of a payload of `size` bytes with this `digest`: the piece at `offset` of a tensor."""

    tensor: int
    kind: Kind
    offset: int
    size: int
    digest: int

    @property
    def words(self) -> tuple[int, ...]:
        return (self.tensor, self.kind, self.offset, self.size, self.digest)


@dataclass(frozen=True)
class Record:
    """Holds a record as it is read. `payload`: bytes of the host; over CUDA IPC, a uint8 tensor on the GPU."""

    tensor: int
    kind: Kind
    offset: int
    digest: int
    payload: Any


class Writer(Protocol):
    """Fills one bucket. `room`: the bytes of payload that fit into one more record, a multiple of 64."""

    @property
    def room(self) -> int: ...

    def copy(self, tensor: int, offset: int, source: Any, lanes: Lanes) -> Scan:
        """Add a dense piece and scan it on the way."""
        ...

    def add(self, tensor: int, kind: Kind, offset: int, parts: Sequence[Bytes]) -> None:
        """Add an encoded piece: `parts` one behind the other, each but the last a multiple of 8 bytes."""
        ...

    def seal(self, sequence: int, ending: Ending, total: int) -> BucketHeader: ...

    def reason(self, sequence: int, text: str) -> BucketHeader:
        """Discard the bucket's records, and say why no other bucket follows."""
        ...


class BucketWriter:
    """Implements `Writer` for memory of the host."""

    def __init__(self, buffer: Bytes) -> None:
        self._buffer = buffer
        self._headers: list[RecordHeader] = []
        self.used = 0

    @property
    def room(self) -> int:
        return max(0, (self._buffer.size - self.used) // ALIGN * ALIGN - ALIGN)

    def copy(self, tensor: int, offset: int, source: Bytes, lanes: Lanes) -> Scan:
        begin = self.used + ALIGN
        scanned = copy_bytes(source, self._buffer[begin : begin + source.size], lanes, offset=offset)
        self._end_record(tensor, Kind.DENSE, offset, source.size, scanned.digest)
        return scanned

    def add(self, tensor: int, kind: Kind, offset: int, parts: Sequence[Bytes]) -> None:
        begin = self.used + ALIGN
        size = 0
        for part in parts:
            self._buffer[begin + size : begin + size + part.size] = part
            size += part.size
        self._end_record(tensor, kind, offset, size, encoded_digest(self._buffer[begin : begin + size]))

    def seal(self, sequence: int, ending: Ending, total: int) -> BucketHeader:
        return sealed(sequence, self.used, ending, total, self._headers)

    def reason(self, sequence: int, text: str) -> BucketHeader:
        content = np.frombuffer(encoded_reason(text, self._buffer.size), np.uint8)
        self._buffer[: content.size] = content
        return sealed(sequence, content.size, Ending.BROKEN, 0, [])

    def _end_record(self, tensor: int, kind: Kind, offset: int, size: int, digest: int) -> None:
        header = RecordHeader(tensor, kind, offset, size, digest)
        words = self._buffer[self.used : self.used + HEADER_WORDS * 8].view(np.uint64)
        words[:] = np.array(header.words, np.uint64)
        self._headers.append(header)
        self.used += ALIGN + padded(size)


def open_records(
    header: BucketHeader, buffer: Bytes, *, sequence: int, sizes: Sequence[int], kinds: frozenset[Kind]
) -> list[Record]:
    """Return the records of a bucket; `sizes` are the bytes of each announced tensor.

    Raises `SyncBrokenError` when the bucket says that the sender broke off, or is not what was announced.
    """
    check_bucket(header, buffer.size, sequence=sequence)
    if header.ending is Ending.BROKEN:
        raise broken_off(buffer[: header.used].tobytes())
    return sealed_records(header, _record_headers(header, buffer), buffer, sizes=sizes, kinds=kinds)


def check_bucket(header: BucketHeader, size: int, *, sequence: int) -> None:
    """Raise `SyncBrokenError` unless this is the bucket that comes next."""
    if header.sequence != sequence or not 0 <= header.used <= size:
        raise SyncBrokenError(f"expected bucket {sequence}, got {header.sequence} with {header.used} bytes")


def encoded_reason(text: str, room: int) -> bytes:
    """Return the payload of a BROKEN bucket."""
    return text.encode(errors="backslashreplace")[: min(room, _LONGEST_REASON)]


def broken_off(reason: bytes) -> SyncBrokenError:
    return SyncBrokenError(f"the sender broke off: {reason[:_LONGEST_REASON].decode(errors='replace')}")


def sealed_records(
    header: BucketHeader,
    headers: Sequence[tuple[int, RecordHeader]],
    buffer: Any,
    *,
    sizes: Sequence[int],
    kinds: frozenset[Kind],
) -> list[Record]:
    """Return the records, if the bucket was sealed with them. `headers`: where each payload begins, and its header."""
    if sealed(header.sequence, header.used, header.ending, header.total, [own for _, own in headers]) != header:
        raise SyncBrokenError(f"wrong checksum of the headers of bucket {header.sequence}")
    return [_record(begin, own, buffer, sizes, kinds) for begin, own in headers]


def sealed(sequence: int, used: int, ending: Ending, total: int, records: Sequence[RecordHeader]) -> BucketHeader:
    """Return the header of a bucket with these records."""
    fixed = (sequence, used, ending, total)
    seal = chain_digests([*fixed, *(word for record in records for word in record.words)])
    return BucketHeader(sequence, used, ending, total, seal)


def check_bucket_bytes(bucket_bytes: int) -> int:
    whole = isinstance(bucket_bytes, int) and not isinstance(bucket_bytes, bool)
    if not whole or bucket_bytes < MIN_BUCKET or bucket_bytes % ALIGN:
        raise ValueError(f"bucket_bytes must be a multiple of {ALIGN} and at least {MIN_BUCKET}, got {bucket_bytes!r}")
    return bucket_bytes


def encoded_digest(payload: Bytes) -> int:
    """Return the digest of a payload that is not the piece itself."""
    return scan_bytes(payload, _PLAIN).digest


def _record_headers(header: BucketHeader, buffer: Bytes) -> list[tuple[int, RecordHeader]]:
    """Return where each payload begins, and the header before it."""
    found: list[tuple[int, RecordHeader]] = []
    position = 0
    while position < header.used:
        begin = position + ALIGN
        if begin > header.used:
            raise SyncBrokenError(f"a record of bucket {header.sequence} is cut off")
        own = from_words(RecordHeader, buffer[position:begin])
        found.append((begin, own))
        position = begin + padded(own.size)
    if position != header.used:
        raise SyncBrokenError(f"a record of bucket {header.sequence} is cut off")
    return found


def from_words(kind: type[T], memory: Bytes) -> T:
    """Return the `RecordHeader` or `BucketHeader` in the first words of `memory`. Raises `SyncBrokenError`."""
    words = memory[: HEADER_WORDS * 8].view(np.uint64).tolist()
    return build(kind, dict(zip((field.name for field in fields(kind)), words, strict=True)))  # type: ignore[arg-type]


def _record(begin: int, own: RecordHeader, buffer: Any, sizes: Sequence[int], kinds: frozenset[Kind]) -> Record:
    if own.tensor >= len(sizes) or own.kind not in kinds or own.offset % ALIGN or begin + own.size > len(buffer):
        raise SyncBrokenError(f"a record that was not announced: {own}")
    size = sizes[own.tensor]
    if not own.size or own.offset >= size or (own.kind is Kind.DENSE and own.offset + own.size > size):
        raise SyncBrokenError(f"{own.size} bytes at {own.offset} of tensor {own.tensor}, which has {size}")
    return Record(own.tensor, own.kind, own.offset, own.digest, buffer[begin : begin + own.size])


def padded(size: int) -> int:
    """Return the bytes that a payload of this size takes in a bucket."""
    return -(-size // ALIGN) * ALIGN
