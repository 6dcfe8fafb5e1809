"""Write the pieces of an announced tensor straight into the model's memory.

Invariants
----------
* A piece is read once: copied, cast if need be, scanned. Its values are finite as sent and after the cast.
* Pieces come in order and do not overlap; those of a whole tensor leave nothing out.
* Only a tensor whose memory is not contiguous goes through a copy of its own size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebit.weight_sync.digest import (
    Lanes,
    Scan,
    add_digests,
    copy_bytes,
    in_place_bytes,
    readable_bytes,
    scan_bytes,
    writable_bytes,
)
from samebit.weight_sync.manifest import NonFiniteWeightError, TensorSpec
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.wire.buckets import Kind, Record, encoded_digest
from samebit.weight_sync.wire.delta import apply_encoded


class Destination:
    """Holds the memory that one tensor is written to.

    Once the tensor is whole, `sent_digest` is its digest as it came, and `digest` as it is now.
    """

    def __init__(self, spec: TensorSpec, target: Tensor) -> None:
        self.spec = spec
        self.target = target
        self.changed = False
        self._staging = None if self._in_place(target) else target.detach().contiguous().clone()
        self._memory = self._bytes_of(target if self._staging is None else self._staging)
        self._lanes = Lanes.of(target.dtype)
        self._sent_lanes = Lanes.of(spec.dtype)
        self._received = 0
        self._digests: list[int] = []
        self._sent_digests: list[int] = []

    @property
    def whole(self) -> bool:
        return self._received == self.spec.num_bytes

    @property
    def digest(self) -> int:
        return add_digests(self._digests)

    @property
    def sent_digest(self) -> int:
        return add_digests(self._sent_digests)

    def put_record(self, record: Record) -> None:
        """Write the next piece of a whole tensor. Raises `SyncBrokenError` for any other piece, or a damaged one."""
        if record.kind is not Kind.DENSE or record.offset != self._received or len(record.payload) % _size(self.spec):
            raise SyncBrokenError(f"a piece of {self.spec.name} that was not expected, at byte {record.offset}")
        if self.put(record.offset, record.payload) != record.digest:
            raise SyncBrokenError(f"wrong checksum of {self.spec.name} from byte {record.offset}")

    def put_change(self, record: Record) -> None:
        """Write a piece of a delta. Raises `SyncBrokenError` for a piece out of order, or a damaged one."""
        offset, payload = record.offset, record.payload
        if offset < self._received:
            raise SyncBrokenError(f"a change of {self.spec.name} that came before, at byte {offset}")
        if encoded_digest(payload) != record.digest:
            raise SyncBrokenError(f"wrong checksum of a change of {self.spec.name} from byte {offset}")
        if record.kind is Kind.DENSE:
            self._memory[offset : offset + payload.size] = payload
            self._received = offset + payload.size
        else:
            self._received = offset + apply_encoded(record.kind, payload, self._memory[offset:], _size(self.spec))
        self.changed = True

    def put(self, offset: int, payload: Any) -> int:
        """Write bytes of the announced dtype; return their digest as they came."""
        if self.spec.dtype == self.target.dtype:
            digest = self._write(offset, payload).digest
        else:
            digest = self._cast(offset, payload)
        self._sent_digests.append(digest)
        self._received = offset + len(payload)
        return digest

    def settle(self) -> None:
        """Make the writes visible, once all pieces are there."""
        if not self.changed:
            return
        with torch.no_grad():
            if self._staging is not None:
                self.target.copy_(self._staging)
            else:
                torch.autograd.graph.increment_version(self.target)

    def _in_place(self, target: Tensor) -> bool:
        return in_place_bytes(target) is not None

    def _bytes_of(self, tensor: Tensor) -> Any:
        return writable_bytes(tensor)

    def _copy(self, offset: int, piece: Any) -> Scan:
        return copy_bytes(piece, self._memory[offset : offset + len(piece)], self._lanes, offset=offset)

    def _write(self, offset: int, piece: Any) -> Scan:
        written = self._copy(offset, piece)
        if not written.finite:
            raise NonFiniteWeightError(f"{self.spec.name} holds NaN or infinity in the dtype of the model")
        self.changed |= written.changed
        self._digests.append(written.digest)
        return written

    def _cast(self, offset: int, payload: Any) -> int:
        sent = scan_bytes(payload, self._sent_lanes, offset=offset)
        value = torch.from_numpy(payload.copy()).view(self.spec.dtype).to(self.target.dtype)
        self._write(offset // _size(self.spec) * self.target.element_size(), readable_bytes(value))
        return sent.digest


def _size(spec: TensorSpec) -> int:
    return spec.dtype.itemsize
