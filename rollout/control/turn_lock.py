"""Share a lock between commands and the generation thread: a step lies between any two commands.

Invariants
----------
* Commands get it in the order in which they asked; none overtakes.
* A command that gives it back leaves it to generation, whether that asks already or not, as long as there is work:
  `owed()` says so, asked by the thread that holds the lock. With no work it goes to the next command.
* Generation gives it back to the command that has waited longest.
* A thread that holds it and asks again gets an error, never a deadlock.
* It is not taken in a thread where a signal handler may raise: see `shelter`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from samebit.rollout.control.shelter import GO, CallerLeftError, Gate, wait_at


class TurnLock:
    """Gives turns: `with lock.turn():` to a command, `with lock.generation():` to generation, which is one thread.

    owed: whether generation wants a turn now. Once it has said yes, generation must come: no command gets the lock
    before.
    """

    def __init__(self, owed: Callable[[], bool]) -> None:
        self._owed = owed
        self._mutex = threading.Lock()
        self._queue: deque[Ticket] = deque()
        self._first: Ticket | None = None
        self._reserved = False
        self._holder: int | None = None

    @property
    def held_by_me(self) -> bool:
        return self._holder == threading.get_ident()

    @contextmanager
    def turn(self, gate: Gate | None = None) -> Iterator[None]:
        """Hold the lock for a command's turn, which is waited for at `gate`.

        Raises:
            CallerLeftError: the caller of the command went away meanwhile; the place in the queue is given up.
        """
        ticket = Ticket(threading.get_ident(), gate)
        with self._mutex:
            self._check_not_holder()
            if self._holder is None and not self._reserved:
                self._give(ticket)
            else:
                self._stand_in_line(ticket)
        self._wait(ticket)
        try:
            yield
        finally:
            with self._mutex:
                self._pass_on()

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Hold the lock for a turn of generation, before every command that waits; after it, the next of them."""
        ticket = Ticket(threading.get_ident())
        with self._mutex:
            self._check_not_holder()
            if self._holder is None:
                self._give(ticket)
            else:
                self._first = ticket
        self._wait(ticket)
        try:
            yield
        finally:
            with self._mutex:
                self._give_to_next()

    def end_generation(self) -> None:
        """Owe nothing any more, and forget whom to ask: generation has ended."""
        self._owed = _nothing

    def _check_not_holder(self) -> None:
        if self._holder == threading.get_ident():
            raise RuntimeError("this thread holds the lock already")

    def _pass_on(self) -> None:
        """Pass the lock on: a command is done."""
        if self._first is not None:
            self._give(self._first)
        elif self._owed():
            self._holder = None
            self._reserved = True
        else:
            self._give_to_next()

    def _stand_in_line(self, ticket: Ticket) -> None:
        self._queue.append(ticket)

    def _give_to_next(self) -> None:
        if self._queue:
            self._give(self._queue.popleft())
        else:
            self._holder = None

    def _give(self, ticket: Ticket) -> None:
        """Give the lock to the owner of a ticket: it is given nowhere else."""
        self._first = None
        self._reserved = False
        self._holder = ticket.owner
        ticket.gate.put(GO)

    def _wait(self, ticket: Ticket) -> None:
        """Wait for the lock. A caller that goes away leaves the queue, or passes on a lock that came meanwhile."""
        try:
            wait_at(ticket.gate)
        except CallerLeftError:
            with self._mutex:
                if ticket in self._queue:
                    self._queue.remove(ticket)
                else:
                    self._pass_on()
            raise


class Ticket:
    """Holds a place in the queue; `GO` comes to `gate` when the lock is handed over."""

    __slots__ = ("gate", "owner")

    def __init__(self, owner: int, gate: Gate | None = None) -> None:
        self.owner = owner
        self.gate: Gate = SimpleQueue() if gate is None else gate


def _nothing() -> bool:
    return False
