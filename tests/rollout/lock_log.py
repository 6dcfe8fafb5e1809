"""What a worker's lock did: who asked for it, who got it, in which order. Counts, no clocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

GENERATION = "generation"


@dataclass
class Wait:
    """A stay in the queue: what went before, as counted when it began and when it ended.

    queued: commands that stood before it; commands: those that came in between; steps: those that were under way or
    came in between.
    """

    owner: int
    queued: int
    steps: int
    commands: int = 0


class LockLog(deque[Any]):
    """The queue of a `TicketLock`, which changes it under its own mutex only; so the order is the true one."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        service = worker._service
        self._lock = service.lock
        self._generation = service._thread.ident
        self._engine = service.engine
        self._state = service.state
        self._waiting: dict[int, Wait] = {}
        self.waits: list[Wait] = []
        self.turns: list[object] = []
        self.left_with_work = 0
        with self._lock:
            assert not self._lock._queue, "attach the log before there is load"
            self._lock._queue = self

    def append(self, ticket: Any) -> None:
        if ticket.owner != self._generation:
            queued = sum(other.owner != self._generation for other in self)
            self._waiting[ticket.owner] = Wait(ticket.owner, queued, int(self._lock._holder == self._generation))
        super().append(ticket)

    def popleft(self) -> Any:
        if self._lock._holder == self._generation and self._state.may_step and self._engine.has_work:
            self.left_with_work += all(ticket.owner != self._generation for ticket in self)
        ticket = super().popleft()
        stepping = ticket.owner == self._generation
        self.turns.append(GENERATION if stepping else ticket.owner)
        if not stepping:
            self.waits.append(self._waiting.pop(ticket.owner))
        for wait in self._waiting.values():
            wait.steps += stepping
            wait.commands += not stepping
        return ticket

    def assert_fair(self) -> None:
        """A command waited a step at most, and for the commands that were queued before it; and generation stood in the
        queue whenever it handed the lock over with work left."""
        assert self.left_with_work == 0, "generation was not in the queue"
        for wait in self.waits:
            assert wait.steps <= 1, "a command waited for two steps"
            assert wait.commands == wait.queued, "a command was overtaken"

    def most_turns_between_steps(self) -> int:
        """Of one commander, while generation had work."""
        most = 0
        counts: dict[object, int] = {}
        for turn in self.turns:
            if turn == GENERATION:
                counts = {}
            else:
                counts[turn] = counts.get(turn, 0) + 1
                most = max(most, counts[turn])
        return most
