"""Two buckets on a GPU that two processes have open, and the message that hands them over.

The memory is made and opened by torch's own CUDA IPC (`torch.multiprocessing.reductions`); what it would pickle goes
as plain fields instead, each checked before use.

Invariants
----------
* The memory belongs to the process that made it, and lives as long as its `CudaBuckets`.
* A handle is opened on the GPU that it is of, known by its UUID: indices differ between processes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.shared_buckets import NUM_BUCKETS

_LONGEST_HANDLE = 1024


@dataclass(frozen=True)
class MemoryHandle:
    """What the other process needs to open the memory; bytes as hexadecimal. The fields are torch's."""

    gpu: str
    num_bytes: int
    storage_handle: str
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: str
    ref_counter_offset: int
    event_handle: str
    event_sync_required: bool

    def to_message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> MemoryHandle:
        """Raises `SyncBrokenError` for anything that `to_message` does not make."""
        texts = {name: message.get(name) for name in ("gpu", *_HANDLES)}
        counts = {name: message.get(name) for name in _COUNTS}
        flag = message.get("event_sync_required")
        if not all(isinstance(text, str) and 0 < len(text) <= _LONGEST_HANDLE for text in texts.values()):
            raise SyncBrokenError("a memory handle that is not valid: its handles are texts of bounded length")
        if not all(type(count) is int and 0 <= count < 1 << 63 for count in counts.values()) or type(flag) is not bool:
            raise SyncBrokenError("a memory handle that is not valid: its sizes are numbers from 0 up")
        handle = cls(**texts, **counts, event_sync_required=flag)  # type: ignore[arg-type]
        for name in _HANDLES:
            _bytes(str(texts[name]))
        if not 0 < handle.num_bytes <= handle.storage_size_bytes or handle.num_bytes % NUM_BUCKETS:
            raise SyncBrokenError(
                f"a memory handle that is not valid: {handle.num_bytes} bytes of {handle.storage_size_bytes}"
            )
        return handle


_HANDLES = ("storage_handle", "ref_counter_handle", "event_handle")
_COUNTS = ("num_bytes", "storage_size_bytes", "storage_offset_bytes", "ref_counter_offset")


class CudaBuckets:
    """The memory in either process."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    @classmethod
    def create(cls, bucket_bytes: int, device: torch.device) -> CudaBuckets:
        return cls(torch.empty(NUM_BUCKETS * bucket_bytes, dtype=torch.uint8, device=device))

    @classmethod
    def attach(cls, handle: MemoryHandle, device: torch.device) -> CudaBuckets:
        """Raises `SyncBrokenError` when the memory is on another GPU than `device`."""
        here = gpu_of(device)
        if handle.gpu != here:
            raise SyncBrokenError(
                f"the sender's buckets are on GPU {handle.gpu}, and this end is on {here}: CUDA IPC needs the same one"
            )
        memory: Tensor = rebuild_cuda_tensor(
            Tensor,
            (handle.num_bytes,),
            (1,),
            0,
            torch.storage.TypedStorage,
            torch.uint8,
            _index(device),
            _bytes(handle.storage_handle),
            handle.storage_size_bytes,
            handle.storage_offset_bytes,
            False,
            _bytes(handle.ref_counter_handle),
            handle.ref_counter_offset,
            _bytes(handle.event_handle),
            handle.event_sync_required,
        )
        return cls(memory)

    def handle(self) -> MemoryHandle:
        """For one process to open: torch counts how many have."""
        _, fields = reduce_tensor(self._memory)
        *_, handle, size, offset, _, counter, counter_offset, event, sync = fields
        return MemoryHandle(
            gpu_of(self._memory.device),
            self._memory.numel(),
            handle.hex(),
            size,
            offset,
            counter.hex(),
            counter_offset,
            event.hex(),
            sync,
        )

    def bucket(self, number: int) -> Tensor:
        size = self._memory.numel() // NUM_BUCKETS
        return self._memory[number * size : (number + 1) * size]


def cuda_device(device: str | torch.device) -> torch.device:
    """Raises `ValueError` for a device that is no GPU, `RuntimeError` where torch sees none."""
    found = torch.device(device)
    if found.type != "cuda":
        raise ValueError(f"device={str(device)!r} can not use CUDA IPC; on the CPU take SharedMemorySender/Receiver")
    if not torch.cuda.is_available():
        raise RuntimeError(f"device={str(device)!r} needs a GPU, and this torch ({torch.__version__}) sees none")
    return found


def gpu_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise SyncBrokenError("a memory handle that is not valid: not hexadecimal") from error
