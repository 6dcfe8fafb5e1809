"""A fair lock: whoever asks first gets it first.

Invariants
----------
* `release` hands the lock to the first in the queue; nobody can overtake, so a holder that releases and
  asks again stands behind everyone who was waiting.
* `requeue` gives it up and asks again in one act: nobody who asks later comes first.
* A thread that holds it and asks again gets an error, never a deadlock.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class TicketLock:
    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queue: deque[_Ticket] = deque()
        self._holder: int | None = None

    @property
    def held_by_me(self) -> bool:
        return self._holder == threading.get_ident()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def acquire(self) -> None:
        me = threading.get_ident()
        with self._mutex:
            if self._holder == me:
                raise RuntimeError("this thread holds the lock already")
            if self._holder is None:
                self._holder = me
                return
            ticket = self._take_ticket()
        self._wait(ticket)

    def requeue(self) -> None:
        """Let everyone who waits go first, then hold it again."""
        with self._mutex:
            self._check_holder()
            if not self._queue:
                return
            ticket = self._take_ticket()
            self._pass_on()
        self._wait(ticket)

    def release(self) -> None:
        with self._mutex:
            self._check_holder()
            self._pass_on()

    def _check_holder(self) -> None:
        if self._holder != threading.get_ident():
            raise RuntimeError("this thread does not hold the lock")

    def _take_ticket(self) -> _Ticket:
        ticket = _Ticket(threading.get_ident())
        self._queue.append(ticket)
        return ticket

    def _wait(self, ticket: _Ticket) -> None:
        got_it = False
        try:
            ticket.gate.acquire()
            got_it = True
        finally:
            if not got_it:
                self._withdraw(ticket)

    def _pass_on(self) -> None:
        if not self._queue:
            self._holder = None
            return
        ticket = self._queue.popleft()
        self._holder = ticket.owner
        ticket.gate.release()

    def _withdraw(self, ticket: _Ticket) -> None:
        """The wait was interrupted (Ctrl-C): leave the queue, or pass on a lock that came meanwhile."""
        with self._mutex:
            if ticket in self._queue:
                self._queue.remove(ticket)
            else:
                self._pass_on()

    def __enter__(self) -> TicketLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class _Ticket:
    """A place in the queue; `gate` opens when the lock is handed over."""

    __slots__ = ("gate", "owner")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.gate = threading.Lock()
        self.gate.acquire()
