"""Share two buckets on a GPU between two processes, and define the message that hands them over.

The memory is made and opened by torch's own CUDA IPC (`torch.multiprocessing.reductions`); what it would pickle goes
as plain fields instead, each checked before use.

Invariants
----------
* The memory belongs to the process that made it, and lives as long as its `CudaBuckets`.
* A handle is opened on the GPU that it is of, known by its UUID: indices differ between processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.transports.shared_buckets import NUM_BUCKETS

_LONGEST_HANDLE = 1024


@dataclass(frozen=True)
class MemoryHandle:
    """Carries what the other process opens the memory with. Its fields are torch's; bytes are hexadecimal."""

    gpu: str
    num_bytes: int
    storage_handle: str
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: str
    ref_counter_offset: int
    event_handle: str
    event_sync_required: bool

    def __post_init__(self) -> None:
        texts = (self.gpu, self.storage_handle, self.ref_counter_handle, self.event_handle)
        if not all(0 < len(text) <= _LONGEST_HANDLE for text in texts):
            raise ValueError(f"a text of it is empty or has more than {_LONGEST_HANDLE} characters")
        for text in texts[1:]:
            bytes.fromhex(text)
        if max(self.storage_size_bytes, self.storage_offset_bytes, self.ref_counter_offset) >= 1 << 63:
            raise ValueError("a size of it needs more than 63 bits")
        if not 0 < self.num_bytes <= self.storage_size_bytes or self.num_bytes % NUM_BUCKETS:
            raise ValueError(f"{self.num_bytes} bytes of {self.storage_size_bytes}")


class CudaBuckets:
    """Holds the two buckets, in the process that made them and in the one that opened them."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    @classmethod
    def create(cls, bucket_bytes: int, device: torch.device) -> CudaBuckets:
        return cls(torch.empty(NUM_BUCKETS * bucket_bytes, dtype=torch.uint8, device=device))

    @classmethod
    def attach(cls, handle: MemoryHandle, device: torch.device) -> CudaBuckets:
        """Open the sender's buckets. Raises `SyncBrokenError` when they are on a GPU other than `device`."""
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
            device.index,
            bytes.fromhex(handle.storage_handle),
            handle.storage_size_bytes,
            handle.storage_offset_bytes,
            False,
            bytes.fromhex(handle.ref_counter_handle),
            handle.ref_counter_offset,
            bytes.fromhex(handle.event_handle),
            handle.event_sync_required,
        )
        return cls(memory)

    def handle(self) -> MemoryHandle:
        """Return a handle for one process: torch counts the processes that have opened the memory."""
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
    """Return a GPU by its number. Raises `ValueError` for any other device, `RuntimeError` where torch sees no GPU."""
    found = torch.device(device)
    if found.type != "cuda":
        raise ValueError(f"device={str(device)!r} can not use CUDA IPC; on the CPU take SharedMemorySender/Receiver")
    if not torch.cuda.is_available():
        raise RuntimeError(f"device={str(device)!r} needs a GPU, and this torch ({torch.__version__}) sees none")
    return numbered(found)


def numbered(device: torch.device) -> torch.device:
    """Return the device with the number that it has in this thread: "cuda" alone is another GPU in another thread."""
    if device.type != "cuda":
        return device
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def gpu_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
