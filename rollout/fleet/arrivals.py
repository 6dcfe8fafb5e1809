"""Know which calls of a sender, numbered from 0 on, are queued: what carries them may bring them in any order.

Invariants
----------
* A call that is waited for, and does not come within `PATIENCE`, is lost, and waited for no longer.
* One that has come is waited for until it is over, and those behind it are missed from then on: a grammar may be
  compiled for minutes, with thousands of calls behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

logger = logging.getLogger(__name__)

PATIENCE = 30.0
"""How long a call may come after one that was sent later, in seconds; one is lost when a connection breaks."""


class Arrivals:
    """Holds how far the calls of one sender have come. On one event loop."""

    def __init__(self) -> None:
        self._next = 0  # all below are over
        self._come: set[int] = set()
        self._over: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @contextmanager
    def queueing(self, number: int) -> Iterator[None]:
        """Note that a call has come; at the end of the block it is queued or refused: over."""
        self._come.add(number)
        try:
            yield
        finally:
            self._come.discard(number)
            self._end(number)

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Do as `queueing`, once all calls before this one are over."""
        with self.queueing(number):
            await self.until_over(number - 1)
            yield

    async def until_over(self, number: int) -> None:
        """Wait until a call and all before it are queued, refused or lost."""
        while number >= self._next:
            missing = self._next
            over = self._waiting.setdefault(number, asyncio.get_running_loop().create_future())
            try:
                await asyncio.wait_for(asyncio.shield(over), PATIENCE)
            except asyncio.TimeoutError:
                if missing == self._next and missing not in self._come:
                    self._give_up(number)

    def _give_up(self, number: int) -> None:
        """Take what has not come, up to a number, for lost."""
        known = self._come | self._over
        lost = [one for one in range(self._next, number + 1) if one not in known]
        if lost:
            logger.warning("%d calls have not come for %g s, and those after them wait no longer", len(lost), PATIENCE)
        for one in lost:
            self._end(one)

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
