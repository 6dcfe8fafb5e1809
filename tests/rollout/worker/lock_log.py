"""Log what a worker's lock did: who asked for it, who got it, in which order. Counts, no clocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samebit.rollout.control.turn_lock import Ticket, TurnLock


@dataclass
class Wait:
    """Holds a command's stay in the queue.

    queued: the commands that stood before it; commands: those that came in before it; turns: those of generation, with
    the one that was under way.
    """

    queued: int
    turns: int
    commands: int = 0


class LockLog(TurnLock):
    """Takes the place of a worker's lock, and looks on under the lock's own mutex; so the order is the true one."""

    def __init__(self, worker: Any) -> None:
        self._generation = worker._thread
        super().__init__(self._generation._owes_a_turn)
        self._waiting: dict[Ticket, Wait] = {}
        self._turn_due = False
        self.waits: list[Wait] = []
        self.commands = 0
        self.turns_due = 0
        self.turns_skipped = 0
        with self._generation.lock.turn():
            assert not self._generation.engine.has_work, "attach the log before there is load"
            self._generation.lock = self

    def _stand_in_line(self, ticket: Ticket) -> None:
        self._waiting[ticket] = Wait(len(self._queue), int(self._holder == self._generation._thread.ident))
        super()._stand_in_line(ticket)

    def _pass_on(self) -> None:
        """Note, as a command ends, whether a turn of generation is due before the next."""
        self._turn_due = self._generation.status.may_step and self._generation.engine.has_work
        self.turns_due += self._turn_due
        super()._pass_on()

    def _give(self, ticket: Ticket) -> None:
        stepping = ticket.owner == self._generation._thread.ident
        if stepping:
            self._turn_due = False
        else:
            self.commands += 1
            self.turns_skipped += self._turn_due
            if ticket in self._waiting:
                self.waits.append(self._waiting.pop(ticket))
        for wait in self._waiting.values():
            wait.turns += stepping
            wait.commands += not stepping
        super()._give(ticket)

    def assert_fair(self) -> None:
        """Check that between two commands there is a step, where one was due; and that a command waited for those that
        were queued before it, a step after each of them, and the one that was under way.
        """
        assert self.turns_skipped == 0, "a command came before a step that was due"
        for wait in self.waits:
            assert wait.commands == wait.queued, "a command was overtaken"
            assert wait.turns <= wait.queued + 1, "a command waited for more than a step a command"
