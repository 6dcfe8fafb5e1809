"""Queue what one client submits in the order in which it did: Ray executes the calls of coroutines in any order.

Invariants
----------
* A submission is queued after all that its client sent before it. One that does not come within `PATIENCE` is lost, and
  is waited for no longer.
* Nobody waits for another client's submissions.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import ray

logger = logging.getLogger(__name__)

PATIENCE = 30.0
"""How long a submission may come after one that was sent later, in seconds; Ray loses one when a connection breaks."""
MOST_CLIENTS = 10_000
"""The most clients that are known; of more the oldest is forgotten, and if it submits again, waits once in vain."""
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
        self._lines: dict[str, Line] = {}

    def of(self, client: str) -> Line:
        """Return the line of a client."""
        if client not in self._lines and len(self._lines) == MOST_CLIENTS:
            del self._lines[next(iter(self._lines))]
        return self._lines.setdefault(client, Line())


class Line:
    """Holds the submissions of one client that wait for earlier ones."""

    def __init__(self) -> None:
        self._next = 0  # all below are over
        self._come: set[int] = set()
        self._over: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Wait until all submissions before this one are over; this one is at the end of the block."""
        self._come.add(number)
        try:
            await self.until_over(number - 1)
            yield
        finally:
            self._come.discard(number)
            self._end(number)

    async def until_over(self, number: int) -> None:
        """Wait until a submission and all before it are queued, refused or lost."""
        while number >= self._next:
            missing = self._next
            over = self._waiting.setdefault(number, asyncio.get_running_loop().create_future())
            try:
                await asyncio.wait_for(asyncio.shield(over), PATIENCE)
            except asyncio.TimeoutError:
                if missing == self._next and missing not in self._come:
                    logger.warning("a request has not come for %g s, and those after it wait no longer", PATIENCE)
                    self._end(missing)

    def _end(self, number: int) -> None:
        if number < self._next:  # it came after it was taken for lost, or twice
            return
        self._over.add(number)
        while self._next in self._over:
            self._over.remove(self._next)
            waiting = self._waiting.pop(self._next, None)
            if waiting is not None:
                waiting.set_result(None)
            self._next += 1
