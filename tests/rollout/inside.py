"""Look inside a worker for what its calls do not say: the one place where tests do."""

from __future__ import annotations

from typing import Any

from samebit.rollout.control.turn_lock import TurnLock
from samebit.rollout.engine.engine import Engine


def engine_of(worker: Any) -> Engine:
    """Return the engine that the worker steps."""
    return worker._engine


def num_waiting(worker: Any) -> int:
    """Return how many commands wait for the worker's lock."""
    return num_queued(worker._thread.lock)


def num_queued(lock: TurnLock) -> int:
    """Return how many commands wait for this lock."""
    return len(lock._queue)


def is_asked(worker: Any) -> bool:
    """Return whether something waits for the end of a step: a command, a request that was submitted, an abort."""
    return bool(num_waiting(worker) or worker._thread._inbox)


def spill_file(worker: Any) -> int:
    """Return the descriptor of the file in which the worker's weights sleep."""
    return worker._weights.memory._copy._file.fileno()
