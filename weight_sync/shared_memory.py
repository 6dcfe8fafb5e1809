"""Weights from one process to another on the same machine, through two buckets of shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from samebit.weight_sync.buckets import BucketHeader, BucketWriter, Kind, Record, check_bucket_bytes, open_records
from samebit.weight_sync.checksum import Bytes
from samebit.weight_sync.control import Channel
from samebit.weight_sync.link import DEFAULT_BUCKET, DEFAULT_TIMEOUT, check_timeout
from samebit.weight_sync.sender import WeightSender
from samebit.weight_sync.shared_buckets import SharedBuckets
from samebit.weight_sync.sockets import SocketReceiver, SocketSenderEnd


class SharedMemorySender(WeightSender):
    """Sends to one receiver. Give `address` to the process that makes the `SharedMemoryReceiver`.

    bucket_bytes: size of each of the two buckets, a multiple of 64. timeout: the longest wait for the receiver, in
    seconds; with `in_flight="wait"` that includes the requests that the worker finishes first.
    """

    def __init__(self, *, bucket_bytes: int = DEFAULT_BUCKET, timeout: float = DEFAULT_TIMEOUT) -> None:
        link = _SenderEnd(check_bucket_bytes(bucket_bytes), check_timeout(timeout))
        super().__init__(link)
        self.address = link.address


class _SenderEnd(SocketSenderEnd[SharedBuckets]):
    def open_bucket(self) -> BucketWriter:
        memory, number = self._free_bucket()
        return BucketWriter(memory.bucket(number))

    def _create_memory(self) -> SharedBuckets:
        return SharedBuckets.create(self.bucket_bytes)

    def _tell(self, reason: str, channel: Channel) -> None:
        channel.send_excuse(reason)

    def _hand_over(self, memory: SharedBuckets, channel: Channel) -> None:
        channel.send_descriptor(memory.descriptor)


class SharedMemoryReceiver(SocketReceiver[SharedBuckets]):
    """A source for `receive_weights`: the other end of a `SharedMemorySender`, by its `address`.

    timeout: the longest wait for the sender, in seconds.
    """

    def __init__(self, address: str, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        super().__init__(address, timeout)

    def next_records(
        self, *, sequence: int, sizes: Sequence[int], kinds: frozenset[Kind]
    ) -> tuple[BucketHeader, list[Record]]:
        header, buffer = self.next_bucket()
        return header, open_records(header, buffer, sequence=sequence, sizes=sizes, kinds=kinds)

    def next_bucket(self) -> tuple[BucketHeader, Bytes]:
        """Wait for a bucket, valid until the next call."""
        header, memory, number, _ = self._next_full()
        return header, memory.bucket(number)

    def _open_memory(self, channel: Channel) -> SharedBuckets:
        return SharedBuckets.attach(channel.receive_descriptor())
