"""The two ends of a link between two processes of a machine: a socket, and two buckets that both have open.

The sender listens at an address, a socket in a folder that only its owner may enter. The receiver connects
and is given the open memory; messages about full and free buckets go over the socket. What kind of memory that is, the
subclasses say: `shared_memory` and `cuda_ipc`.

Invariants
----------
* A bucket belongs to one side at a time: to the sender until "full", to the receiver until "free".
* Messages carry the number of their sync; what is left over from one that broke off is dropped.
* A side that lost its peer can use its end again: the next sync makes a new connection.
"""

from __future__ import annotations

import socket
import tempfile
import time
from abc import abstractmethod
from contextlib import closing, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar

from samebit.weight_sync.buckets import BucketHeader, Ending
from samebit.weight_sync.control import Channel
from samebit.weight_sync.link import (
    Announcement,
    Answer,
    Outcome,
    PeerLostError,
    ReceiverLink,
    SenderLink,
    SyncTimeoutError,
    check_timeout,
)
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.shared_buckets import NUM_BUCKETS

Memory = TypeVar("Memory")


class SocketSenderEnd(SenderLink, Generic[Memory]):
    """The sender's end over a socket; what kind of memory the buckets are is up to its subclass."""

    def __init__(self, bucket_bytes: int, timeout: float) -> None:
        self.bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="samebit-link-")
        self.address = str(Path(self._folder.name) / "link")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen()
        self._memory: Memory | None = None
        self._channel: Channel | None = None
        self._sync = 0
        self._free: list[int] = []
        self._filling = 0
        self._outcome: Outcome | None = None

    def announce(self, announcement: Announcement) -> Answer:
        if self._listener.fileno() < 0:
            raise PeerLostError("the link is closed")
        if self._memory is None:
            self._memory = self._reserve()
        self._sync += 1
        self._free = list(range(NUM_BUCKETS))
        self._outcome = None
        self._call(announcement.to_json(), self._memory)
        message = self._next()
        if message.get("kind") != "answer":
            raise self._misunderstood(message)
        return Answer.from_json(str(message.get("body")))

    def _reserve(self) -> Memory:
        """The memory; where there is no room for it, the receiver hears so too."""
        try:
            return self._create_memory()
        except (OSError, RuntimeError) as error:
            with suppress(SyncTimeoutError):
                self._excuse(str(error))
            raise

    def _excuse(self, reason: str) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            with closing(self._accept(deadline)) as channel, suppress(PeerLostError):
                self._tell(reason, channel)
                return

    @abstractmethod
    def _create_memory(self) -> Memory: ...

    @abstractmethod
    def _tell(self, reason: str, channel: Channel) -> None:
        """Why there is no memory, where the other process waits for it."""

    @abstractmethod
    def _hand_over(self, memory: Memory, channel: Channel) -> None:
        """Let the other process open the memory."""

    def _free_bucket(self) -> tuple[Memory, int]:
        """Where the next bucket lies, and which it is, once it is free."""
        while not self._free and self._outcome is None:
            self._take(self._next())
        if self._outcome is not None:
            raise SyncBrokenError(f"the receiver failed: {self._outcome.failed}")
        if self._memory is None:
            raise PeerLostError("the link is closed")
        self._filling = self._free.pop(0)
        return self._memory, self._filling

    def publish(self, header: BucketHeader) -> None:
        self._publish(header)

    def _publish(self, header: BucketHeader, **more: object) -> None:
        self._connected().send("full", sync=self._sync, bucket=self._filling, header=list(astuple(header)), **more)

    def outcomes(self) -> list[Outcome]:
        while self._outcome is None:
            self._take(self._next())
        return [self._outcome]

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends a wait for a receiver, which closing alone does not
        self._hang_up()
        self._listener.close()
        self._folder.cleanup()
        self._memory = None

    def _call(self, announcement: str, memory: Memory) -> None:
        """Announce to the receiver there is, or to the next one that connects and is alive."""
        deadline = time.monotonic() + self._timeout
        while True:
            if self._channel is not None:
                with suppress(PeerLostError):
                    self._channel.send("announce", sync=self._sync, body=announcement)
                    return
                self._hang_up()
            self._channel = self._accept(deadline)
            with suppress(PeerLostError):
                self._hand_over(memory, self._channel)

    def _accept(self, deadline: float) -> Channel:
        try:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            connected, _ = self._listener.accept()
        except TimeoutError as error:
            raise SyncTimeoutError(f"no receiver connected to {self.address} in {self._timeout:g} seconds") from error
        except OSError as error:
            raise PeerLostError("the link was closed before a receiver connected") from error
        return Channel(connected, self._timeout)

    def _next(self) -> dict[str, Any]:
        """The next message of this sync."""
        while True:
            message = self._connected().receive()
            if message.get("sync") == self._sync:
                return message

    def _take(self, message: dict[str, Any]) -> None:
        bucket = message.get("bucket")
        if message.get("kind") == "free" and _is_bucket(bucket) and bucket not in self._free:
            self._free.append(bucket)
        elif message.get("kind") == "outcome":
            self._outcome = Outcome.from_json(str(message.get("body")))
        else:
            raise self._misunderstood(message)

    def _misunderstood(self, message: dict[str, Any]) -> SyncBrokenError:
        self._hang_up()
        return SyncBrokenError(f"the receiver said {message['kind']!r} out of turn")

    def _connected(self) -> Channel:
        if self._channel is None:
            raise PeerLostError("no receiver is connected")
        return self._channel

    def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class SocketReceiver(ReceiverLink, Generic[Memory]):
    """The receiver's end over a socket; what kind of memory the buckets are is up to its subclass."""

    def __init__(self, address: str, timeout: float) -> None:
        if not isinstance(address, str):
            raise TypeError(f"address is SharedMemorySender.address, a string; got {type(address).__name__}")
        self.address = address
        self._timeout = check_timeout(timeout)
        self._channel: Channel | None = None
        self._memory: Memory | None = None
        self._sync = 0
        self._held: int | None = None

    def listen(self) -> Announcement:
        reused = self._channel is not None
        try:
            return self._listen()
        except PeerLostError:
            if not reused:
                raise
        return self._listen()  # the sender had hung up after an earlier sync: connect again

    def answer(self, answer: Answer) -> Answer:
        self._say("answer", body=answer.to_json())
        return answer

    @abstractmethod
    def _open_memory(self, channel: Channel) -> Memory:
        """What `_hand_over` of the sender gives."""

    def _next_full(self) -> tuple[BucketHeader, Memory, int, dict[str, Any]]:
        """The next bucket's header, where it lies, which it is, and the message that says so."""
        if self._held is not None:
            self._say("free", bucket=self._held)
            self._held = None
        while True:
            message = self._receive()
            if message.get("sync") == self._sync and message.get("kind") == "full":
                return self._open(message)
            if message.get("kind") == "announce":
                self.close()
                raise SyncBrokenError("the sender began another sync in the middle of this one")

    def finish(self, outcome: Outcome) -> None:
        self._held = None
        self._say("outcome", body=outcome.to_json())

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._memory = None
        self._held = None

    def _listen(self) -> Announcement:
        self._connect()
        while True:
            message = self._receive()
            if message.get("kind") == "announce" and isinstance(message.get("sync"), int):
                self._sync = message["sync"]
                return self._parse(str(message.get("body")))

    def _parse(self, body: str) -> Announcement:
        try:
            return Announcement.from_json(body)
        except SyncBrokenError:
            self.close()
            raise

    def _connect(self) -> None:
        if self._channel is not None:
            return
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(self._timeout)
        try:
            connected.connect(self.address)
        except OSError as error:
            connected.close()
            if isinstance(error, ConnectionRefusedError):
                _clear(Path(self.address))
            raise PeerLostError(f"no sender at {self.address}: {error}") from error
        self._channel = Channel(connected, self._timeout)

    def _receive(self) -> dict[str, Any]:
        try:
            channel = self._connected()
            if self._memory is None:
                self._memory = self._open_memory(channel)
            return channel.receive()
        except SyncBrokenError:
            self.close()
            raise

    def _say(self, kind: str, **body: object) -> None:
        try:
            self._connected().send(kind, sync=self._sync, **body)
        except SyncBrokenError:
            self.close()
            raise

    def _open(self, message: dict[str, Any]) -> tuple[BucketHeader, Memory, int, dict[str, Any]]:
        bucket, header = message.get("bucket"), message.get("header")
        if self._memory is None or not _is_bucket(bucket):
            raise SyncBrokenError(f"there is no bucket {bucket!r}")
        self._held = bucket
        return _header(header), self._memory, bucket, message

    def _connected(self) -> Channel:
        if self._channel is None:
            raise PeerLostError("the link is closed")
        return self._channel


def _is_bucket(number: object) -> TypeGuard[int]:
    return type(number) is int and 0 <= number < NUM_BUCKETS


def _header(words: object) -> BucketHeader:
    if not isinstance(words, list) or len(words) != 5 or not all(type(word) is int and word >= 0 for word in words):
        raise SyncBrokenError(f"a bucket header that is not valid: {words!r}")
    sequence, used, ending, total, seal = words
    if ending not in list(Ending) or max(words) >= 1 << 64:
        raise SyncBrokenError(f"a bucket header that is not valid: {words!r}")
    return BucketHeader(sequence, used, Ending(ending), total, seal)


def _clear(address: Path) -> None:
    """Remove the socket that a dead sender left, and its folder."""
    with suppress(OSError):
        address.unlink()
        address.parent.rmdir()
