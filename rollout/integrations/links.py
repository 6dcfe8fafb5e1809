"""Name where a worker behind calls gets weights from, in a few words that travel; the weights go over the link."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from samebit.weight_sync import (
    BroadcastReceiver,
    CudaIpcReceiver,
    ReceiverLink,
    SharedMemoryReceiver,
    connected_store,
    gloo_group,
)
from samebit.weight_sync.wire.link import DEFAULT_TIMEOUT


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


Link = SharedMemoryAt | CudaIpcAt | BroadcastFrom | BroadcastGroup


class Sources:
    """Opens the links that calls name. A link stays open for the next update. Any thread may call it."""

    def __init__(self) -> None:
        self._links: dict[Link, ReceiverLink] = {}
        self._mutex = threading.Lock()

    @contextmanager
    def opened(self, source: object) -> Iterator[object]:
        """Open the source of one update: a link, or a folder as it is, or None; no weights come with a call.

        A link is closed after a failure, so that the next update opens it anew, and when its group was for this one.
        """
        try:
            yield self._open(source)
        except BaseException:
            self._forget(source)
            raise
        if isinstance(source, BroadcastGroup):
            self._forget(source)

    def _open(self, source: object) -> object:
        if isinstance(source, Link):
            with self._mutex:
                if source not in self._links:
                    self._links[source] = source.open()
                return self._links[source]
        if source is None or isinstance(source, str | Path):
            return source
        raise TypeError(
            "a worker behind calls takes weights from SharedMemoryAt, CudaIpcAt, BroadcastFrom, BroadcastGroup or a "
            f"folder with *.safetensors, not from {type(source).__name__}"
        )

    def _forget(self, source: object) -> None:
        if isinstance(source, Link):
            with self._mutex:
                link = self._links.pop(source, None)
            if link is not None:
                link.close()

    def close(self) -> None:
        with self._mutex:
            for link in self._links.values():
                link.close()
            self._links.clear()
