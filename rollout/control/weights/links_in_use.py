"""Close, with a worker, the links over which it is receiving weights.

Invariant: after `close` no call waits for a sender, neither one that waited before nor one that comes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from samebit.rollout.errors import WorkerStateError
from samebit.weight_sync import ReceiverLink, SyncBrokenError


class LinksInUse:
    """Holds the links on which calls of one worker wait."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._links: list[ReceiverLink] = []
        self._closed = False

    @contextmanager
    def in_use(self, source: object) -> Iterator[None]:
        """Raise `WorkerStateError` once the worker is closed. Sources that are no links are passed over."""
        if not isinstance(source, ReceiverLink):
            yield
            return
        with self._mutex:
            if self._closed:
                raise WorkerStateError("the worker is closed")
            self._links.append(source)
        try:
            yield
        except SyncBrokenError as error:
            if self._closed:
                raise WorkerStateError("the worker was closed while it received weights") from error
            raise
        finally:
            with self._mutex:
                self._links.remove(source)

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            links = list(self._links)
        for link in links:
            link.close()
