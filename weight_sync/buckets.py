"""How tensors lie in a bucket, the memory of a set size in which they travel.

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
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch

from samebit.weight_sync.checksum import Bytes, Lanes, Scan, chain_digests, copy_bytes, scan_bytes
from samebit.weight_sync.report import SyncBrokenError

ALIGN = 64
HEADER_WORDS = 5
MIN_BUCKET = 1024
_PLAIN = Lanes.of(torch.uint8)


class Ending(IntEnum):
    """What follows a bucket. The payload of a BROKEN one is the reason, in UTF-8."""

    MORE = 0
    LAST = 1
    BROKEN = 2


class Kind(IntEnum):
    """How the payload of a record stands for a piece of a tensor; see `delta` for the latter two."""

    DENSE = 0
    SPARSE = 1
    BITMAP = 2


@dataclass(frozen=True)
class BucketHeader:
    """`total` is the digest of all weights of the update, in the last bucket; `seal` covers the rest."""

    sequence: int
    used: int
    ending: Ending
    total: int
    seal: int


@dataclass(frozen=True)
class Record:
    """`payload`: bytes of the host; over CUDA IPC a uint8 tensor on the GPU."""

    tensor: int
    kind: Kind
    offset: int
    digest: int
    payload: Any


class Writer(Protocol):
    """Fills one bucket. `room`: bytes of payload that one more record can take, a multiple of 64."""

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
        """Discard what is in the bucket, and say why no other follows."""
        ...


class BucketWriter:
    """A `Writer` for memory of the host."""

    def __init__(self, buffer: Bytes) -> None:
        self._buffer = buffer
        self._headers: list[tuple[int, ...]] = []
        self.used = 0

    @property
    def room(self) -> int:
        return max(0, (self._buffer.size - self.used) // ALIGN * ALIGN - ALIGN)

    def copy(self, tensor: int, offset: int, source: Bytes, lanes: Lanes) -> Scan:
        begin = self.used + ALIGN
        scanned = copy_bytes(source, self._buffer[begin : begin + source.size], lanes, offset=offset)
        self._close(tensor, Kind.DENSE, offset, source.size, scanned.digest)
        return scanned

    def add(self, tensor: int, kind: Kind, offset: int, parts: Sequence[Bytes]) -> None:
        begin = self.used + ALIGN
        size = 0
        for part in parts:
            self._buffer[begin + size : begin + size + part.size] = part
            size += part.size
        self._close(tensor, kind, offset, size, encoded_digest(self._buffer[begin : begin + size]))

    def seal(self, sequence: int, ending: Ending, total: int) -> BucketHeader:
        return sealed(sequence, self.used, ending, total, self._headers)

    def reason(self, sequence: int, text: str) -> BucketHeader:
        content = np.frombuffer(text.encode()[: self._buffer.size], np.uint8)
        self._buffer[: content.size] = content
        return sealed(sequence, content.size, Ending.BROKEN, 0, [])

    def _close(self, tensor: int, kind: Kind, offset: int, size: int, digest: int) -> None:
        header = (tensor, int(kind), offset, size, digest)
        words = self._buffer[self.used : self.used + HEADER_WORDS * 8].view(np.uint64)
        words[:] = np.array(header, np.uint64)
        self._headers.append(header)
        self.used += ALIGN + padded(size)


def open_records(
    header: BucketHeader, buffer: Bytes, *, sequence: int, sizes: Sequence[int], kinds: frozenset[Kind]
) -> list[Record]:
    """The records of a bucket; `sizes` are the bytes of each announced tensor.

    Raises `SyncBrokenError` when the bucket says that the sender broke off, or is not what was announced.
    """
    check_bucket(header, buffer.size, sequence=sequence)
    if header.ending is Ending.BROKEN:
        raise broken_off(buffer[: header.used].tobytes())
    return sealed_records(header, _record_words(header, buffer), buffer, sizes=sizes, kinds=kinds)


def check_bucket(header: BucketHeader, size: int, *, sequence: int) -> None:
    """Whether this is the bucket that comes next."""
    if header.sequence != sequence or not 0 <= header.used <= size:
        raise SyncBrokenError(f"expected bucket {sequence}, got {header.sequence} with {header.used} bytes")


def broken_off(reason: bytes) -> SyncBrokenError:
    return SyncBrokenError(f"the sender broke off: {reason.decode(errors='replace')}")


def sealed_records(
    header: BucketHeader,
    words: Sequence[tuple[int, tuple[int, ...]]],
    buffer: Any,
    *,
    sizes: Sequence[int],
    kinds: frozenset[Kind],
) -> list[Record]:
    """The records, if they are those that the bucket was sealed with. `words`: where a payload begins, its header."""
    records = [record for _, record in words]
    if sealed(header.sequence, header.used, header.ending, header.total, records) != header:
        raise SyncBrokenError(f"wrong checksum of the headers of bucket {header.sequence}")
    return [_record(begin, record, buffer, sizes, kinds) for begin, record in words]


def sealed(sequence: int, used: int, ending: Ending, total: int, records: Sequence[tuple[int, ...]]) -> BucketHeader:
    """The header of a bucket with these records."""
    fixed = (sequence, used, ending, total)
    seal = chain_digests([*fixed, *(word for record in records for word in record)])
    return BucketHeader(sequence, used, ending, total, seal)


def check_bucket_bytes(bucket_bytes: int) -> int:
    whole = isinstance(bucket_bytes, int) and not isinstance(bucket_bytes, bool)
    if not whole or bucket_bytes < MIN_BUCKET or bucket_bytes % ALIGN:
        raise ValueError(f"bucket_bytes must be a multiple of {ALIGN} and at least {MIN_BUCKET}, got {bucket_bytes!r}")
    return bucket_bytes


def encoded_digest(payload: Bytes) -> int:
    """The digest of a payload that is not the piece itself."""
    return scan_bytes(payload, _PLAIN).digest


def _record_words(header: BucketHeader, buffer: Bytes) -> list[tuple[int, tuple[int, ...]]]:
    """Where each payload begins, and the header before it."""
    found: list[tuple[int, tuple[int, ...]]] = []
    position = 0
    while position < header.used:
        begin = position + ALIGN
        if begin > header.used:
            raise SyncBrokenError(f"a record of bucket {header.sequence} is cut off")
        words = tuple(int(word) for word in buffer[position : position + HEADER_WORDS * 8].view(np.uint64))
        found.append((begin, words))
        position = begin + padded(words[3])
    if position != header.used:
        raise SyncBrokenError(f"a record of bucket {header.sequence} is cut off")
    return found


def _record(begin: int, words: tuple[int, ...], buffer: Any, sizes: Sequence[int], kinds: frozenset[Kind]) -> Record:
    tensor, kind, offset, size, digest = words
    if tensor >= len(sizes) or kind not in list(kinds) or offset % ALIGN or begin + size > len(buffer):
        raise SyncBrokenError(f"a record that was not announced: tensor {tensor}, kind {kind}, byte {offset}")
    if offset >= sizes[tensor] or (kind == Kind.DENSE and offset + size > sizes[tensor]):
        raise SyncBrokenError(f"{size} bytes at {offset} of tensor {tensor}, which has {sizes[tensor]}")
    return Record(tensor, Kind(kind), offset, digest, buffer[begin : begin + size])


def padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
