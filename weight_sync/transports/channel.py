"""Send and receive messages between two processes over a Unix socket; an open file may come along.

A message is a length, then JSON. Which messages there are, `wire/link.py` and `unix_socket.py` say.

Invariants
----------
* A message is received whole before patience ends, or an error says which of the two happened: the other side
  went away (`PeerLostError`) or was too slow (`SyncTimeoutError`).
* After an error the socket is closed: the next bytes could be the middle of a message.
* Closing it ends what another thread waits for.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.wire.decoding import decode, encode
from samebit.weight_sync.wire.link import MOST_BYTES, PeerLostError, SyncTimeoutError
from samebit.weight_sync.wire.patience import Patience

_LENGTH = struct.Struct(">I")
_MOST_AT_ONCE = 1 << 16
T = TypeVar("T")


class Channel:
    """Owns a connected socket, and the last open file that came over it and was not taken."""

    def __init__(self, connected: socket.socket, patience: Patience) -> None:
        self._socket = connected
        self._patience = patience
        self._unread = bytearray()
        self._descriptors: list[int] = []
        self._busy = threading.RLock()

    def send(self, message: object, *descriptors: int) -> None:
        """Send a dataclass, and files that are open here for the other process to use."""
        content = encode(message)
        data = _LENGTH.pack(len(content)) + content
        self._guarded(lambda deadline: self._send(data, descriptors, deadline))

    def receive(self, *kinds: type[Any], most_bytes: int = MOST_BYTES) -> Any:
        """Wait for a message of one of these dataclasses, and return it."""
        return self._guarded(lambda deadline: decode(self._receive(most_bytes, deadline), *kinds))

    def take_descriptor(self) -> int:
        """Return the open file that came with the message."""
        if not self._descriptors:
            raise SyncBrokenError("the other side was to hand over an open file, and did not")
        return self._descriptors.pop()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._busy:
            self._socket.close()
            self._drop_descriptors()

    def _guarded(self, act: Callable[[float], T]) -> T:
        """Call `act` with the deadline; close the socket on any error."""
        try:
            with self._busy, self._patience.waiting() as deadline:
                return act(deadline)
        except TimeoutError as error:
            self.close()
            seconds = self._patience.seconds
            raise SyncTimeoutError(f"the other side moved no weights for {seconds:g} seconds") from error
        except OSError as error:
            self.close()
            raise PeerLostError(f"the other side went away: {error}") from error
        except BaseException:
            self.close()
            raise

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _send(self, data: bytes, descriptors: tuple[int, ...], deadline: float) -> None:
        self._wait_until(deadline)
        if descriptors:
            data = data[socket.send_fds(self._socket, [data], descriptors) :]
        if data:
            self._socket.sendall(data)

    def _receive(self, most_bytes: int, deadline: float) -> bytes:
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if size > most_bytes:
            raise SyncBrokenError(f"a message of {size} bytes; at most {most_bytes} are allowed")
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        while len(self._unread) < size:
            self._wait_until(deadline)
            data, descriptors, flags, _ = socket.recv_fds(self._socket, _MOST_AT_ONCE, 1, socket.MSG_CMSG_CLOEXEC)
            if flags & socket.MSG_CTRUNC and not descriptors:
                raise SyncBrokenError("the open file of the other side did not fit: this process has too many open")
            if descriptors:
                self._drop_descriptors()
                self._descriptors = descriptors
            if not data:
                raise PeerLostError("the other side closed the connection")
            self._unread += data
        found = bytes(self._unread[:size])
        del self._unread[:size]
        return found

    def _drop_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
