"""Define the two ends of a link between two processes of a machine: a socket, and two buckets that both have open.

The sender listens at an `Endpoint`. The receiver connects and is given the open memory; messages about full and free
buckets go over the socket. What kind of memory that is, the subclasses say: `shared_memory` and `cuda_ipc`.

Invariants
----------
* A bucket belongs to one side at a time: to the sender until "full", to the receiver until "free".
* Messages carry the number of their sync; what is left over from one that broke off is dropped.
* A side that lost its peer can use its end again: the next sync makes a new connection. A closed end is not reusable.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.transports.channel import Channel
from samebit.weight_sync.transports.endpoint import Endpoint, connect
from samebit.weight_sync.transports.shared_buckets import NUM_BUCKETS
from samebit.weight_sync.wire.buckets import BucketHeader, RecordHeader, broken_off
from samebit.weight_sync.wire.link import (
    MOST_BYTES,
    Announcement,
    Answer,
    Outcome,
    PeerLostError,
    ReceiverLink,
    SenderLink,
    SyncTimeoutError,
    shortened,
)
from samebit.weight_sync.wire.patience import Patience

_LONGEST_REASON = 100_000
"""The most characters of a reason, which is cut; as JSON each has six bytes at most."""

Memory = TypeVar("Memory")


@dataclass(frozen=True)
class Full:
    """Says that the receiver may read a bucket. `records`: its headers, where they do not lie in the bucket itself."""

    sync: int
    bucket: int
    header: BucketHeader
    records: tuple[RecordHeader, ...]

    def __post_init__(self) -> None:
        _check_bucket(self.bucket)


@dataclass(frozen=True)
class Free:
    """Says that the sender may fill a bucket again."""

    sync: int
    bucket: int

    def __post_init__(self) -> None:
        _check_bucket(self.bucket)


@dataclass(frozen=True)
class Left:
    """Says that the receiver closes a line on which nothing was under way, and will call again for the next sync."""


_Said = Answer | Free | Outcome | Left
"""What a receiver says."""


@dataclass(frozen=True)
class NoMemory:
    """Comes in place of the memory, when the sender could not reserve any."""

    reason: str


class SocketSenderEnd(SenderLink, Generic[Memory]):
    """Sends over a socket; a subclass chooses the kind of memory."""

    def __init__(self, bucket_bytes: int, timeout: float) -> None:
        self.bucket_bytes = bucket_bytes
        self.patience = Patience(timeout)
        self._endpoint = Endpoint()
        self.address = self._endpoint.address
        self._memory: Memory | None = None
        self._channel: Channel | None = None
        self._sync = 0
        self._free: list[int] = []
        self._filling = 0
        self._outcome: Outcome | None = None

    def announce(self, announcement: Announcement) -> Answer:
        if self._endpoint.closed:
            raise PeerLostError("the link is closed")
        self.patience.begin()
        if self._memory is None:
            self._memory = self._reserve()
        self._sync += 1
        self._free = list(range(NUM_BUCKETS))
        self._outcome = None
        announced = replace(announcement, sync=self._sync)
        message = self._asked(announced, self._memory)
        if isinstance(message, Left):  # it was idle there, and comes again for this sync
            self._hang_up()
            message = self._asked(announced, self._memory)
        if not isinstance(message, Answer):
            raise self._misunderstood(message)
        self.patience.begin()
        return message

    def _asked(self, announcement: Announcement, memory: Memory) -> _Said:
        """Announce, and return what the receiver says to it."""
        self._call(announcement, memory)
        self.patience.begin()
        return self._next()

    def _reserve(self) -> Memory:
        """Reserve the memory; when there is no room for it, tell the receiver too."""
        try:
            return self._create_memory()
        except (OSError, RuntimeError) as error:
            with suppress(SyncTimeoutError):
                self._tell_no_memory(shortened(str(error), _LONGEST_REASON))
            raise

    def _tell_no_memory(self, reason: str) -> None:
        """Answer the next receiver that connects with `NoMemory`."""
        while True:
            with closing(self._accept()) as channel, suppress(PeerLostError):
                channel.send(NoMemory(reason))
                return

    @abstractmethod
    def _create_memory(self) -> Memory: ...

    @abstractmethod
    def _hand_over(self, memory: Memory, channel: Channel) -> None:
        """Let the other process open the memory."""

    def _free_bucket(self) -> tuple[Memory, int]:
        """Wait for a free bucket; return the memory, and the bucket's number."""
        while not self._free and self._outcome is None:
            self._take(self._next())
        if self._outcome is not None:
            raise SyncBrokenError(f"the receiver failed: {self._outcome.failed}")
        if self._memory is None:
            raise PeerLostError("the link is closed")
        self._filling = self._free.pop(0)
        return self._memory, self._filling

    def send_bucket(self, header: BucketHeader) -> None:
        self._publish(header)

    def _publish(self, header: BucketHeader, records: tuple[RecordHeader, ...] = ()) -> None:
        self._connected().send(Full(self._sync, self._filling, header, records))

    def outcomes(self) -> list[Outcome]:
        while self._outcome is None:
            self._take(self._next())
        return [self._outcome]

    def close(self) -> None:
        self._endpoint.close()
        self._hang_up()
        self._memory = None

    def _call(self, announcement: Announcement, memory: Memory) -> None:
        """Announce to the connected receiver, or to the next one that connects and is alive."""
        while True:
            if self._channel is not None:
                with suppress(PeerLostError):
                    self._channel.send(announcement)
                    return
                self._hang_up()
            self._channel = self._accept()
            with suppress(PeerLostError):
                self._hand_over(memory, self._channel)

    def _accept(self) -> Channel:
        try:
            with self.patience.waiting() as deadline:
                return Channel(self._endpoint.accept(deadline), self.patience)
        except TimeoutError as error:
            seconds = self.patience.seconds
            raise SyncTimeoutError(f"no receiver connected to {self.address} in {seconds:g} seconds") from error
        except OSError as error:
            if self._endpoint.closed:
                raise PeerLostError("the link was closed before a receiver connected") from error
            raise PeerLostError(f"no receiver can connect: {error}") from error

    def _next(self) -> _Said:
        """Wait for the next message of this sync, or the last of the line."""
        while True:
            message: _Said = self._connected().receive(Answer, Free, Outcome, Left)
            if isinstance(message, Left) or message.sync == self._sync:
                return message

    def _take(self, message: _Said) -> None:
        if isinstance(message, Free) and message.bucket not in self._free:
            self._free.append(message.bucket)
            self.patience.begin()
        elif isinstance(message, Outcome):
            self._outcome = message
        else:
            raise self._misunderstood(message)

    def _misunderstood(self, message: object) -> SyncBrokenError:
        self._hang_up()
        return SyncBrokenError(f"the receiver said {type(message).__name__} out of turn")

    def _connected(self) -> Channel:
        if self._channel is None:
            raise PeerLostError("no receiver is connected")
        return self._channel

    def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class SocketReceiver(ReceiverLink, Generic[Memory]):
    """Receives over a socket; a subclass chooses the kind of memory."""

    def __init__(self, address: str, timeout: float) -> None:
        if not isinstance(address, str):
            raise TypeError(f"address is SharedMemorySender.address, a string; got {type(address).__name__}")
        self.address = address
        self.patience = Patience(timeout)
        self._mutex = threading.Lock()
        self._closed = False
        self._channel: Channel | None = None
        self._memory: Memory | None = None
        self._sync = 0
        self._most_bytes = MOST_BYTES
        self._held: int | None = None

    def listen(self, most_bytes: int = MOST_BYTES) -> Announcement:
        self.patience.begin()
        self._most_bytes = most_bytes
        reused = self._channel is not None
        try:
            return self._listen()
        except PeerLostError:
            if not reused:
                raise
        return self._listen()  # the sender had hung up after an earlier sync: connect again

    def answer(self, answer: Answer) -> Answer:
        self._say(replace(answer.shortened(_LONGEST_REASON), sync=self._sync))
        return answer

    @abstractmethod
    def _open_memory(self, channel: Channel) -> Memory:
        """Open the memory that the sender's `_hand_over` gives."""

    def _next_full(self) -> tuple[Full, Memory]:
        """Wait for the next bucket; return its message and the memory in which it lies."""
        if self._held is not None:
            self._say(Free(self._sync, self._held))
            self._held = None
        while True:
            message, memory = self._receive()
            if isinstance(message, Announcement):
                self._hang_up()
                raise SyncBrokenError("the sender began another sync in the middle of this one")
            if message.sync == self._sync:
                self.patience.progress(message.header.used)
                self._held = message.bucket
                return message, memory

    def tell_outcome(self, outcome: Outcome) -> None:
        self._held = None
        self._say(replace(outcome.shortened(_LONGEST_REASON), sync=self._sync))

    def leave(self) -> None:
        self.patience.begin()
        with suppress(SyncBrokenError):  # also the sender may have hung up
            self._say(Left())
        self.close()

    def close(self) -> None:
        with self._mutex:
            self._closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        with self._mutex:
            channel, self._channel = self._channel, None
            self._memory = None
            self._held = None
        if channel is not None:
            channel.close()

    def _listen(self) -> Announcement:
        self._connect()
        while True:
            message, _ = self._receive()
            if isinstance(message, Announcement):
                self._sync = message.sync
                self.patience.begin(message.most_payload)
                return message

    def _connect(self) -> None:
        with self._mutex:
            if self._closed:
                raise PeerLostError("the link is closed")
            if self._channel is not None:
                return
            try:
                self._channel = Channel(connect(self.address, self.patience.seconds), self.patience)
            except (OSError, ValueError) as error:
                raise PeerLostError(f"no sender at {self.address}: {error}") from error

    def _receive(self) -> tuple[Announcement | Full, Memory]:
        try:
            channel, memory = self._connected(), self._memory
            if memory is None:
                memory = self._memory = self._open_memory(channel)
            message: Announcement | Full = channel.receive(Announcement, Full, most_bytes=self._most_bytes)
            return message, memory
        except SyncBrokenError:
            self._hang_up()
            raise

    def _say(self, message: _Said) -> None:
        try:
            self._connected().send(message)
        except SyncBrokenError:
            self._hang_up()
            raise

    def _connected(self) -> Channel:
        with self._mutex:
            if self._channel is None:
                raise PeerLostError("the link is closed")
            return self._channel


def handed_over(channel: Channel, kind: type[Memory]) -> Memory:
    """Return the message that hands the memory over. Raises `SyncBrokenError` when the sender has none."""
    message: Memory | NoMemory = channel.receive(kind, NoMemory)
    if isinstance(message, NoMemory):
        raise broken_off(message.reason.encode())
    return message


def _check_bucket(number: int) -> None:
    if number >= NUM_BUCKETS:
        raise ValueError(f"there is no bucket {number}")
