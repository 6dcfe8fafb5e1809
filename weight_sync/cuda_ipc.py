"""Weights from one process to another on one GPU, through two buckets of its memory (CUDA IPC). Not run on a GPU yet.

Nothing goes through the host but the messages: the sender copies into a bucket and scans it on the device, the
receiver scans it and copies it into the model, while the other bucket is filled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samebit.weight_sync.buckets import (
    BucketHeader,
    Ending,
    Kind,
    Record,
    broken_off,
    check_bucket,
    check_bucket_bytes,
    sealed_records,
)
from samebit.weight_sync.control import Channel
from samebit.weight_sync.cuda_memory import CudaBuckets, MemoryHandle, cuda_device
from samebit.weight_sync.device_buckets import DeviceDestination, DeviceWriter, record_words
from samebit.weight_sync.device_scan import device_bytes
from samebit.weight_sync.link import DEFAULT_TIMEOUT, check_timeout
from samebit.weight_sync.manifest import TensorSpec
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.sender import SendReport, WeightSender
from samebit.weight_sync.sockets import SocketReceiver, SocketSenderEnd

CUDA_BUCKET = 64 << 20


class CudaIpcSender(WeightSender):
    """Sends to one receiver. Give `address` to the process that makes the `CudaIpcReceiver`.

    device: the GPU that both models are on. bucket_bytes, timeout: as of `SharedMemorySender`.

    Raises:
        ValueError: the device is no GPU.
        RuntimeError: there is none.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        *,
        bucket_bytes: int = CUDA_BUCKET,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        link = DeviceSenderEnd(cuda_device(device), check_bucket_bytes(bucket_bytes), check_timeout(timeout))
        super().__init__(link)
        self.address = link.address

    def send(self, weights: object, *, delta: bool = False, dtype: torch.dtype | None = None) -> SendReport:
        """As `WeightSender.send`, but for deltas: those are made on the host."""
        if delta:
            raise ValueError(
                "delta=True is not for CUDA IPC, which sends all weights; use shared memory or a broadcast"
            )
        return super().send(weights, dtype=dtype)


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

    def publish(self, header: BucketHeader) -> None:
        self._publish(header, records=[] if self._writer is None else self._writer.records)

    def _create_memory(self) -> CudaBuckets:
        return CudaBuckets.create(self.bucket_bytes, self._device)

    def _tell(self, reason: str, channel: Channel) -> None:
        channel.send("no memory", reason=reason)

    def _hand_over(self, memory: CudaBuckets, channel: Channel) -> None:
        channel.send("memory", **memory.handle().to_message())


class CudaIpcReceiver(SocketReceiver[CudaBuckets]):
    """A source for `receive_weights`: the other end of a `CudaIpcSender`, by its `address`.

    device: the GPU that the model is on, the sender's. timeout: the longest wait for the sender, in seconds.
    """

    def __init__(self, address: str, device: str | torch.device = "cuda", *, timeout: float = DEFAULT_TIMEOUT) -> None:
        super().__init__(address, timeout)
        self._device = cuda_device(device)

    def next_records(
        self, *, sequence: int, sizes: Sequence[int], kinds: frozenset[Kind]
    ) -> tuple[BucketHeader, list[Record]]:
        header, memory, number, message = self._next_full()
        buffer = memory.bucket(number)
        check_bucket(header, buffer.numel(), sequence=sequence)
        if header.ending is Ending.BROKEN:
            raise broken_off(buffer[: header.used].cpu().numpy().tobytes())
        words = record_words(message.get("records"), header)
        return header, sealed_records(header, words, buffer, sizes=sizes, kinds=kinds)

    def destination(self, spec: TensorSpec, target: Tensor) -> DeviceDestination:
        return DeviceDestination(spec, target)

    def _open_memory(self, channel: Channel) -> CudaBuckets:
        message = channel.receive()
        if message.get("kind") == "no memory":
            raise broken_off(str(message.get("reason")).encode())
        if message.get("kind") != "memory":
            raise SyncBrokenError(f"the sender said {message.get('kind')!r} where it hands over its memory")
        return CudaBuckets.attach(MemoryHandle.from_message(message), self._device)
