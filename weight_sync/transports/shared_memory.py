"""Send weights from one process to another on the same machine, through two buckets of shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from samebit.weight_sync.digest import Bytes
from samebit.weight_sync.transports.channel import Channel
from samebit.weight_sync.transports.shared_buckets import SharedBuckets
from samebit.weight_sync.transports.unix_socket import SocketReceiver, SocketSenderEnd, handed_over
from samebit.weight_sync.wire.buckets import BucketHeader, BucketWriter, check_bucket_bytes
from samebit.weight_sync.wire.link import DEFAULT_BUCKET, DEFAULT_TIMEOUT
from samebit.weight_sync.wire.sender import WeightSender


class SharedMemorySender(WeightSender):
    """Sends to one receiver. Give `address` to the process that makes the `SharedMemoryReceiver`.

    Args:
        bucket_bytes: The size of each of the two buckets, a multiple of 64.
        timeout: How long to wait for a receiver that takes no weights, in seconds; with `in_flight="wait"` that
            includes the requests that the worker finishes first.
    """

    def __init__(self, *, bucket_bytes: int = DEFAULT_BUCKET, timeout: float = DEFAULT_TIMEOUT) -> None:
        link = _SenderEnd(check_bucket_bytes(bucket_bytes), timeout)
        super().__init__(link)
        self.address = link.address


@dataclass(frozen=True)
class SharedFile:
    """Brings the buckets, as an open file."""


class _SenderEnd(SocketSenderEnd[SharedBuckets]):
    def open_bucket(self) -> BucketWriter:
        memory, number = self._free_bucket()
        return BucketWriter(memory.bucket(number))

    def _create_memory(self) -> SharedBuckets:
        return SharedBuckets.create(self.bucket_bytes)

    def _hand_over(self, memory: SharedBuckets, channel: Channel) -> None:
        channel.send(SharedFile(), memory.descriptor)


class SharedMemoryReceiver(SocketReceiver[SharedBuckets]):
    """Receives for `receive_weights`: the other end of a `SharedMemorySender`, by its `address`.

    Args:
        address: `SharedMemorySender.address`.
        timeout: How long to wait for the sender while no weights come, in seconds. A sender that stalls in the middle
            stops generation for as long.
    """

    def __init__(self, address: str, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        super().__init__(address, timeout)

    def next_bucket(self) -> tuple[BucketHeader, Bytes]:
        full, memory = self._next_full()
        return full.header, memory.bucket(full.bucket)

    def _open_memory(self, channel: Channel) -> SharedBuckets:
        handed_over(channel, SharedFile)
        return SharedBuckets.attach(channel.take_descriptor())
