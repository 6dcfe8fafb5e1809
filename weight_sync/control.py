"""Messages between two processes over a Unix socket: a length, then a JSON object.

Invariants
----------
* A message is received whole within the timeout, or an error says which of the two happened: the other side
  went away (`PeerLostError`) or was too slow (`SyncTimeoutError`).
* After an error the socket is closed: what comes next on it could be the middle of a message.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, TypeVar

from samebit.weight_sync.buckets import broken_off
from samebit.weight_sync.link import PeerLostError, SyncTimeoutError, parse_object
from samebit.weight_sync.report import SyncBrokenError

_LENGTH = struct.Struct(">I")
_MOST_BYTES = 64 << 20
_DESCRIPTOR = b"descriptor"
_EXCUSE = b"no memory!"
_MOST_AT_ONCE = 1 << 16
T = TypeVar("T")


class Channel:
    """One connected socket, which it owns."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        self._socket = connected
        self._timeout = timeout
        self._unread = bytearray()

    def send(self, kind: str, **body: object) -> None:
        message = json.dumps({"kind": kind, **body}).encode()
        self._guarded(lambda deadline: self._send(_LENGTH.pack(len(message)) + message, deadline))

    def receive(self) -> dict[str, Any]:
        return self._guarded(self._receive)

    def send_descriptor(self, descriptor: int) -> None:
        """Give the other process a file that is open here."""
        self._guarded(lambda deadline: self._send_descriptor(descriptor, deadline))

    def receive_descriptor(self) -> int:
        return self._guarded(self._receive_descriptor)

    def send_excuse(self, reason: str) -> None:
        """Say why there is no file, in its stead."""
        message = json.dumps({"reason": reason}).encode()
        self._guarded(lambda deadline: self._send(_EXCUSE + _LENGTH.pack(len(message)) + message, deadline))

    def close(self) -> None:
        self._socket.close()

    def _guarded(self, act: Callable[[float], T]) -> T:
        """Do it by the deadline; whatever goes wrong closes the socket."""
        try:
            return act(time.monotonic() + self._timeout)
        except TimeoutError as error:
            self.close()
            raise SyncTimeoutError(f"the other side did nothing for {self._timeout:g} seconds") from error
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

    def _send(self, data: bytes, deadline: float) -> None:
        self._wait_until(deadline)
        self._socket.sendall(data)

    def _receive(self, deadline: float) -> dict[str, Any]:
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if size > _MOST_BYTES:
            raise SyncBrokenError(f"a message of {size} bytes; at most {_MOST_BYTES} are allowed")
        return parse_object(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        while len(self._unread) < size:
            self._wait_until(deadline)
            data = self._socket.recv(_MOST_AT_ONCE)
            if not data:
                raise PeerLostError("the other side closed the connection")
            self._unread += data
        found = bytes(self._unread[:size])
        del self._unread[:size]
        return found

    def _send_descriptor(self, descriptor: int, deadline: float) -> None:
        self._wait_until(deadline)
        socket.send_fds(self._socket, [_DESCRIPTOR], [descriptor])

    def _receive_descriptor(self, deadline: float) -> int:
        self._wait_until(deadline)
        data, descriptors, _, _ = socket.recv_fds(self._socket, len(_DESCRIPTOR), 1)
        if data == _DESCRIPTOR and len(descriptors) == 1:
            return descriptors[0]
        if data == _EXCUSE:
            raise broken_off(str(self._receive(deadline).get("reason")).encode())
        for descriptor in descriptors:
            os.close(descriptor)
        if not data:
            raise PeerLostError("the other side closed the connection")
        raise SyncBrokenError(f"an open file was expected, got {data!r}")
