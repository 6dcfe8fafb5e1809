"""Write the pieces of an announced tensor straight into the model's memory.

Invariants
----------
* A piece is read once: copied, cast if need be, scanned. Its values are finite as sent and after the cast.
* Pieces come in order and do not overlap; those of a whole tensor leave nothing out.
* Only a tensor whose memory is not contiguous, or is on a GPU, goes through a copy of its own size. The copy is made
  when the first piece comes, and gone when the last has: a model on a GPU needs no room on the host for all of it.
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
        self._settled = False
        self._staging: Tensor | None = None
        self._memory: Any = self._bytes_of(target) if self._in_place(target) else None
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
        memory = self._opened()
        if record.kind is Kind.DENSE:
            memory[offset : offset + payload.size] = payload
            self._received = offset + payload.size
        else:
            self._received = offset + apply_encoded(record.kind, payload, memory[offset:], _size(self.spec))
        self.changed = True

    def put(self, offset: int, payload: Any) -> int:
        """Write bytes of the announced dtype; return their digest as they came."""
        if self.spec.dtype == self.target.dtype:
            digest = self._write(offset, payload).digest
        else:
            digest = self._cast(offset, payload)
        self._sent_digests.append(digest)
        self._received = offset + len(payload)
        if self.whole:
            self.settle()
        return digest

    def settle(self) -> None:
        """Make the writes visible, once all pieces are there; a second call does nothing."""
        if self.changed and not self._settled:
            with torch.no_grad():
                if self._staging is not None:
                    self.target.copy_(self._staging)
                else:
                    torch.autograd.graph.increment_version(self.target)
        self._settled, self._staging, self._memory = True, None, None

    def _opened(self) -> Any:
        """Return the memory that pieces are written to.

        Raises:
            SyncBrokenError: the tensor is settled: its pieces have to come one after the other.
        """
        if self._settled:
            raise SyncBrokenError(f"more of {self.spec.name} came after its end")
        if self._memory is None:
            self._staging = self._copy_of(self.target.detach())
            self._memory = self._bytes_of(self._staging)
        return self._memory

    def _in_place(self, target: Tensor) -> bool:
        return in_place_bytes(target) is not None

    def _copy_of(self, target: Tensor) -> Tensor:
        return torch.empty(target.shape, dtype=target.dtype, device="cpu").copy_(target)

    def _bytes_of(self, tensor: Tensor) -> Any:
        return writable_bytes(tensor)

    def _copy(self, offset: int, piece: Any) -> Scan:
        return copy_bytes(piece, self._opened()[offset : offset + len(piece)], self._lanes, offset=offset)

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
