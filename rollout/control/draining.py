"""Wait until every request that has started is finished, with no lock held meanwhile.

Invariants
----------
* While a caller waits, or is in its block, no request starts. Several may wait at once: admission opens after the last.
* The thread that ends a step, or a command, under the lock says so (`look_again`); a caller that waits looks then.
* A worker that does not compute can not drain: that raises instead of waiting for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from samebit.rollout.control.shelter import GO, Gate, wait_at
from samebit.rollout.control.turn_lock import TurnLock
from samebit.rollout.control.worker_status import WorkerStatus
from samebit.rollout.engine.engine import Engine
from samebit.rollout.errors import WorkerStateError


class Draining:
    """Counts the callers that wait for an engine to drain."""

    def __init__(self, engine: Engine, status: WorkerStatus) -> None:
        self._engine = engine
        self._status = status
        self._callers = 0
        self._waiting: list[Gate] = []

    @contextmanager
    def drained(self, lock: TurnLock, gate: Gate) -> Iterator[None]:
        """Hold the lock once every request that has started is finished; new ones wait until the end."""
        with lock.turn(gate):
            self._status.check_usable()
            self._count_caller(+1)
        try:
            while True:
                with lock.turn(gate):
                    if self._engine.drained:
                        self._status.check_usable()
                        yield
                        return
                    self._check_can_drain()
                    self._waiting.append(gate)
                wait_at(gate)
        finally:
            with lock.turn():
                self._count_caller(-1)

    @property
    def awaited(self) -> bool:
        """Return whether a caller waits, or is in its block."""
        return self._callers > 0

    def look_again(self) -> None:
        """Let the callers that wait see whether the engine is drained. Under the lock."""
        waiting, self._waiting = self._waiting, []
        for gate in waiting:
            gate.put(GO)

    def _count_caller(self, change: int) -> None:
        self._callers += change
        self._engine.scheduler.open_admission(self._callers == 0)

    def _check_can_drain(self) -> None:
        if not self._status.may_step:
            self._status.check_usable()
            raise WorkerStateError(
                'waiting for requests (in_flight="wait", pause("wait")) needs a worker that generates, and this one is '
                "paused, asleep or without weights while requests are in flight"
            )
