"""Send weights from one process to another on one GPU, through two buckets of its memory (CUDA IPC).

Only messages go through the host. On the device, the sender copies into a bucket and scans it; the receiver scans it
and copies it into the model while the other bucket is filled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samebit.weight_sync.manifest import TensorSpec
from samebit.weight_sync.transports.channel import Channel
from samebit.weight_sync.transports.cuda.buckets import DeviceDestination, DeviceWriter, placed
from samebit.weight_sync.transports.cuda.memory import CudaBuckets, MemoryHandle, cuda_device
from samebit.weight_sync.transports.cuda.scan import device_bytes
from samebit.weight_sync.transports.unix_socket import SocketReceiver, SocketSenderEnd, handed_over
from samebit.weight_sync.wire.buckets import (
    BucketHeader,
    Ending,
    Kind,
    Record,
    RecordHeader,
    broken_off,
    check_bucket,
    check_bucket_bytes,
    sealed_records,
)
from samebit.weight_sync.wire.link import DEFAULT_TIMEOUT
from samebit.weight_sync.wire.sender import WeightSender

CUDA_BUCKET = 64 << 20


class CudaIpcSender(WeightSender):
    """Sends to one receiver. Give `address` to the process that makes the `CudaIpcReceiver`.

    Args:
        device: The GPU that both models are on; "cuda" is the one that is current in the thread that makes this.
        bucket_bytes: As for `SharedMemorySender`.
        timeout: As for `SharedMemorySender`.

    Raises:
        ValueError: The device is not a GPU.
        RuntimeError: torch sees no GPU.
    """

    no_deltas = "CUDA IPC always sends all weights and takes no delta=True; use shared memory or a broadcast"

    def __init__(
        self,
        device: str | torch.device = "cuda",
        *,
        bucket_bytes: int = CUDA_BUCKET,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        link = DeviceSenderEnd(cuda_device(device), check_bucket_bytes(bucket_bytes), timeout)
        super().__init__(link)
        self.address = link.address


class DeviceSenderEnd(SocketSenderEnd[CudaBuckets]):
    def __init__(self, device: torch.device, bucket_bytes: int, timeout: float) -> None:
        super().__init__(bucket_bytes, timeout)
        self._device = device
        self._writer: DeviceWriter | None = None

    def open_bucket(self) -> DeviceWriter:
        memory, number = self._free_bucket()
        self._writer = DeviceWriter(memory.bucket(number))
        return self._writer

    def readable(self, tensor: Tensor) -> Tensor:
        return device_bytes(tensor)

    def send_bucket(self, header: BucketHeader) -> None:
        self._publish(header, () if self._writer is None else tuple(self._writer.records))

    def _create_memory(self) -> CudaBuckets:
        return CudaBuckets.create(self.bucket_bytes, self._device)

    def _hand_over(self, memory: CudaBuckets, channel: Channel) -> None:
        channel.send(memory.handle())


class CudaIpcReceiver(SocketReceiver[CudaBuckets]):
    """Receives for `receive_weights`: the other end of a `CudaIpcSender`, by its `address`.

    Args:
        address: `CudaIpcSender.address`.
        device: The GPU that the model is on, the same as the sender's; "cuda" is the one that is current in the thread
            that makes this.
        timeout: The longest wait for the sender, in seconds.
    """

    def __init__(self, address: str, device: str | torch.device = "cuda", *, timeout: float = DEFAULT_TIMEOUT) -> None:
        super().__init__(address, timeout)
        self._device = cuda_device(device)
        self._records: tuple[RecordHeader, ...] = ()

    def next_bucket(self) -> tuple[BucketHeader, Tensor]:
        full, memory = self._next_full()
        self._records = full.records
        return full.header, memory.bucket(full.bucket)

    def next_records(
        self, *, sequence: int, sizes: Sequence[int], kinds: frozenset[Kind]
    ) -> tuple[BucketHeader, list[Record]]:
        header, buffer = self.next_bucket()
        check_bucket(header, buffer.numel(), sequence=sequence)
        if header.ending is Ending.BROKEN:
            raise broken_off(buffer[: header.used].cpu().numpy().tobytes())
        return header, sealed_records(header, placed(self._records, header), buffer, sizes=sizes, kinds=kinds)

    def destination(self, spec: TensorSpec, target: Tensor) -> DeviceDestination:
        return DeviceDestination(spec, target)

    def _open_memory(self, channel: Channel) -> CudaBuckets:
        return CudaBuckets.attach(handed_over(channel, MemoryHandle), self._device)
