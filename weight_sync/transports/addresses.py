"""Name where a worker behind calls gets weights from, in a few words that travel; the weights go over the link."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from samebit.weight_sync.transports.broadcast import BroadcastReceiver
from samebit.weight_sync.transports.cuda.cuda_ipc import CudaIpcReceiver
from samebit.weight_sync.transports.groups import connected_store, gloo_group
from samebit.weight_sync.transports.shared_memory import SharedMemoryReceiver
from samebit.weight_sync.wire.link import DEFAULT_TIMEOUT, ReceiverLink


@dataclass(frozen=True)
class SharedMemoryAt:
    """Names the `SharedMemorySender` of this address, on the actor's machine."""

    address: str
    timeout: float = DEFAULT_TIMEOUT

    def open(self) -> ReceiverLink:
        return SharedMemoryReceiver(self.address, timeout=self.timeout)


@dataclass(frozen=True)
class CudaIpcAt:
    """Names the `CudaIpcSender` of this address, on the actor's GPU."""

    address: str
    timeout: float = DEFAULT_TIMEOUT

    def open(self) -> ReceiverLink:
        return CudaIpcReceiver(self.address, timeout=self.timeout)


@dataclass(frozen=True)
class BroadcastFrom:
    """Names the `BroadcastSender` at this rank of the group that the actor has joined (`join_group`).

    device: where the backend of the group wants its tensors, "cuda" for NCCL.
    """

    sender: int
    timeout: float = DEFAULT_TIMEOUT
    device: str = "cpu"

    def open(self) -> ReceiverLink:
        return BroadcastReceiver(self.sender, timeout=self.timeout, device=self.device)


@dataclass(frozen=True)
class BroadcastGroup:
    """Names rank 0 of a group made for one update, in which the actor is `rank`; its `listening_store` is at host,
    port."""

    host: str
    port: int
    rank: int
    size: int
    timeout: float = DEFAULT_TIMEOUT

    def open(self) -> ReceiverLink:
        store = connected_store(self.host, self.port, timeout=self.timeout)
        return BroadcastReceiver(0, gloo_group(store, self.rank, self.size, timeout=self.timeout), timeout=self.timeout)


OnMachine = SharedMemoryAt | CudaIpcAt
Link = OnMachine | BroadcastFrom | BroadcastGroup

MOST_IDLE = 2
"""The most links to senders of this machine that stay open, beside the one that is used next."""


@dataclass(eq=False)
class _Line:
    """Holds an open link, and how many updates use it."""

    link: ReceiverLink
    users: int = 0


class Sources:
    """Opens the links that calls name. Any thread may call it.

    A link stays open for the next update. Each to a sender of this machine takes memory and descriptors: of those that
    are idle only the last ones stay. A group waits for its ranks: it is made before the mutex is held.
    """

    def __init__(self) -> None:
        self._lines: dict[Link, _Line] = {}
        self._mutex = threading.Lock()

    @contextmanager
    def opened(self, source: object) -> Iterator[object]:
        """Open the source of one update: a link, or a folder as it is, or None; no weights come with a call.

        A link is closed after a failure, so that the next update opens it anew, and when its group was for this one.
        """
        if not isinstance(source, Link):
            yield _at_hand(source)
            return
        line, keep = self._take(source), False
        try:
            yield line.link
            keep = not isinstance(source, BroadcastGroup)
        finally:
            self._put_back(source, line, keep=keep)

    def forget(self, source: object) -> None:
        """Hang up, if this is a link that is open. An update that uses it ends with an error."""
        if isinstance(source, Link):
            with self._mutex:
                line = self._lines.pop(source, None)
            if line is not None:
                line.link.close()

    def close(self) -> None:
        with self._mutex:
            for line in self._lines.values():
                line.link.close()
            self._lines.clear()

    def _take(self, source: Link) -> _Line:
        own = _Line(source.open()) if isinstance(source, BroadcastGroup) else None  # for this update alone
        with self._mutex:
            line = own or self._lines.pop(source, None)
            if line is None:
                self._make_room(source)
                line = _Line(source.open())
            line.users += 1
            self._lines[source] = line  # the last one: they stand in the order of their use
            return line

    def _put_back(self, source: Link, line: _Line, *, keep: bool) -> None:
        with self._mutex:
            line.users -= 1
            if keep:
                return
            if self._lines.get(source) is line:
                del self._lines[source]
        line.link.close()

    def _make_room(self, source: Link) -> None:
        """Close the idle links to senders of this machine, but for the last ones."""
        if isinstance(source, OnMachine):
            idle = [one for one, line in self._lines.items() if isinstance(one, OnMachine) and not line.users]
            for one in idle[:-MOST_IDLE]:
                self._lines.pop(one).link.leave()


def _at_hand(source: object) -> str | Path | None:
    if source is None or isinstance(source, str | Path):
        return source
    raise TypeError(
        "a worker behind calls takes weights from SharedMemoryAt, CudaIpcAt, BroadcastFrom, BroadcastGroup or a "
        f"folder with *.safetensors, not from {type(source).__name__}"
    )
