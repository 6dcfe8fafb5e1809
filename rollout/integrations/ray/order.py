"""Queue what one client submits in the order in which it did: Ray executes the calls of coroutines in any order.

Invariants
----------
* A submission is queued after all that its client sent before it, but for those that are lost (`arrivals`).
* Nobody waits for another client's submissions.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import ray

from samebit.rollout.fleet.arrivals import Arrivals

MOST_CLIENTS = 10_000
"""The most clients that are known; of more that one is forgotten which has been silent for longest. If it submits
again, it waits once in vain."""
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Says which of a client's submissions a call is; the first has number 0."""

    client: str
    number: int


class Submissions:
    """Numbers the submissions of one client. Any thread may call it."""

    def __init__(self) -> None:
        self._client = uuid.uuid4().hex
        self._sending = threading.Lock()
        self._sent = 0
        self._settled = 0

    def send(self, call: Callable[[Place], ray.ObjectRef[T]]) -> ray.ObjectRef[T]:
        """Send the next submission. If that raises, its number is given again, so that nobody waits for it."""
        with self._sending:
            reference = call(Place(self._client, self._sent))
            self._sent += 1
        return reference

    def settle(self, wait_until_queued: Callable[[Place], None]) -> None:
        """Let the caller wait until all that was sent is queued, unless it has seen that already."""
        last = self._sent - 1
        if last >= self._settled:
            wait_until_queued(Place(self._client, last))
            self._settled = last + 1


class Lines:
    """Lets the submissions of each client be queued one after the other. On one event loop."""

    def __init__(self) -> None:
        self._lines: dict[str, Arrivals] = {}

    def of(self, client: str) -> Arrivals:
        """Return the line of a client."""
        line = self._lines.pop(client) if client in self._lines else Arrivals()
        self._lines[client] = line
        if len(self._lines) > MOST_CLIENTS:
            del self._lines[next(iter(self._lines))]
        return line
