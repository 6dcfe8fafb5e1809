"""The one place where tests look inside a worker for what its calls do not say."""

from __future__ import annotations

from typing import Any

from samebit.rollout.engine.engine import Engine


def engine_of(worker: Any) -> Engine:
    """Return the engine that the worker steps."""
    return worker._engine


def num_waiting(worker: Any) -> int:
    """Return how many commands wait for the worker's lock."""
    return worker._thread.lock.num_waiting


def spill_file(worker: Any) -> int:
    """Return the descriptor of the file in which the worker's weights sleep."""
    return worker._weights.memory._copy._file.fileno()
