"""Holds the transports of the soak of control commands, both ends in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from samebit.weight_sync import (
    BroadcastReceiver,
    BroadcastSender,
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncBrokenError,
    connected_store,
    gloo_group,
    listening_store,
)

BUCKET = 1 << 14


class Link:
    """Holds both ends of a transport; one update at a time."""

    def __init__(self, name: str, sender: Any, end: Any, timeout: float) -> None:
        self.name = name
        self.free = threading.Lock()
        self._sender = sender
        self._end = end
        self._timeout = timeout
        self._sending = ThreadPoolExecutor(1)

    def update(self, weights: Any, receive: Callable[[Any], Any], *, delta: bool = False) -> tuple[Any, Any]:
        """Return what `receive` returns for the receiving end, and the sender's report. None: the worker has refused,
        and the sender has heard why.
        """
        sent = self._sending.submit(self._sender.send, weights, delta=delta)
        report = receive(self._end)
        if report is not None:
            return report, sent.result(self._timeout)
        with pytest.raises(SyncBrokenError, match="WorkerStateError"):
            sent.result(self._timeout)
        return None, None

    def close(self) -> None:
        self._end.close()
        self._sender.close()
        self._sending.shutdown()


def links(*, timeout: float) -> list[Link]:
    """Open links over shared memory and over gloo, through buckets that hold less than a tensor."""
    shm = SharedMemorySender(bucket_bytes=BUCKET, timeout=timeout)
    store = listening_store("127.0.0.1")
    with ThreadPoolExecutor(1) as other:
        joined = other.submit(gloo_group, connected_store("127.0.0.1", store.port), 1, 2)
        gloo = BroadcastSender(gloo_group(store, 0, 2), bucket_bytes=BUCKET, timeout=timeout)
        gloo_end = BroadcastReceiver(0, joined.result(), timeout=timeout)
    return [
        Link("shared memory", shm, SharedMemoryReceiver(shm.address, timeout=timeout), timeout),
        Link("gloo", gloo, gloo_end, timeout),
    ]
