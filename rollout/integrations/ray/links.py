"""Where an actor gets weights from, said in a few words that travel; the weights themselves go over the link."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from samebit.weight_sync import BroadcastReceiver, ReceiverLink, SharedMemoryReceiver, gloo_group
from samebit.weight_sync.link import DEFAULT_TIMEOUT


@dataclass(frozen=True)
class SharedMemoryAt:
    """The `SharedMemorySender` of this address, on the actor's machine."""

    address: str
    timeout: float = DEFAULT_TIMEOUT

    def open(self) -> ReceiverLink:
        return SharedMemoryReceiver(self.address, timeout=self.timeout)


@dataclass(frozen=True)
class BroadcastFrom:
    """The `BroadcastSender` at this rank of the group that the actor has joined (`join_group`)."""

    sender: int
    timeout: float = DEFAULT_TIMEOUT

    def open(self) -> ReceiverLink:
        return BroadcastReceiver(self.sender, timeout=self.timeout)


@dataclass(frozen=True)
class BroadcastGroup:
    """Rank 0 of a group made for one update, in which the actor is `rank`; its `listening_store` is at host, port."""

    host: str
    port: int
    rank: int
    size: int
    timeout: float = DEFAULT_TIMEOUT

    def open(self) -> ReceiverLink:
        store = TCPStore(self.host, self.port, timeout=timedelta(seconds=self.timeout))
        return BroadcastReceiver(0, gloo_group(store, self.rank, self.size, timeout=self.timeout), timeout=self.timeout)


Link = SharedMemoryAt | BroadcastFrom | BroadcastGroup


class Sources:
    """What a call names, opened. A link stays open for the next update."""

    def __init__(self) -> None:
        self._links: dict[Link, ReceiverLink] = {}

    def open(self, source: object) -> object:
        """A link or a folder; None stands for itself. No weights come with a call."""
        if isinstance(source, Link):
            if source not in self._links:
                self._links[source] = source.open()
            return self._links[source]
        if source is None or isinstance(source, str | Path):
            return source
        raise TypeError(
            "an actor takes weights from SharedMemoryAt, BroadcastFrom, BroadcastGroup or a folder with *.safetensors, "
            f"not from {type(source).__name__}"
        )

    def forget(self, source: object) -> None:
        """After a failure: the next update opens the link anew."""
        if isinstance(source, Link) and source in self._links:
            self._links.pop(source).close()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
