"""One weight update: what holds the lock, decides the version, and deals with the requests in flight.

Invariants
----------
* From entry to exit of a transaction no step runs. The version goes up only on a clean exit.
* A transaction that is left by an exception makes the weights incomplete, with that exception as the
  cause, and fails what is in flight: a mixture of weights never generates.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from samebit.rollout.engine import Engine
from samebit.rollout.errors import WorkerStateError
from samebit.rollout.service import GenerationService
from samebit.rollout.weights import WorkerWeights
from samebit.rollout.worker_state import WorkerState
from samebit.weight_sync import SyncReport

IN_FLIGHT = ("keep", "recompute", "wait", "abort")


class Transaction(AbstractContextManager["Transaction"]):
    """Set `complete` inside the block when every weight was written."""

    def __init__(self, service: GenerationService, state: WorkerState, version: int | None, in_flight: str) -> None:
        check_update_args(version, in_flight)
        self._service = service
        self._state = state
        self._asked = version
        self._in_flight = in_flight
        self._stack = ExitStack()
        self._engine: Engine | None = None
        self.version = 0
        self.complete = False

    def __enter__(self) -> Transaction:
        with ExitStack() as stack:
            wait = self._in_flight == "wait"
            hold = self._service.drained_command() if wait else self._service.command()
            engine = stack.enter_context(hold)
            if self._state.weights_asleep:
                raise WorkerStateError('the weights are asleep; call wake_up("weights") first')
            self.version = self._next_version(engine.weight_version)
            if self._in_flight == "recompute":
                engine.preempt_all()
            elif self._in_flight == "abort":
                self._service.deliver(engine.abort_started())
            self._engine = engine
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            if error is not None:
                self._break_off(error)
            elif self._engine is not None:
                self._engine.weights_changed(self.version)
                if self.complete:
                    self._state.set_incomplete(None)

    def _next_version(self, current: int) -> int:
        if self._asked is None:
            return current + 1
        if self._asked <= current:
            raise ValueError(f"version must be above the current {current}, got {self._asked}")
        return self._asked

    def _break_off(self, error: BaseException) -> None:
        reason = f"an update broke off ({type(error).__name__}: {error})"
        self._state.set_incomplete(reason, error)
        self._service.fail_all(lambda: _incomplete_error(reason, error))
        if self._engine is not None:
            self._engine.clear_prefix_cache()


class WeightUpdate(AbstractContextManager["WeightUpdate"]):
    """The block in which the trainer changes shared parameters; `report` is there after it."""

    def __init__(self, transaction: Transaction, weights: WorkerWeights, state: WorkerState) -> None:
        self._transaction = transaction
        self._weights = weights
        self._state = state
        self._began = 0.0
        self.report: SyncReport | None = None

    def __enter__(self) -> WeightUpdate:
        if self._state.incomplete is not None:
            self._state.check_accepts_requests()
        self._began = time.monotonic()
        self._transaction.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._transaction.__exit__(kind, error, trace)
            return
        with ExitStack() as stack:
            stack.push(self._transaction)
            seconds = time.monotonic() - self._began
            self.report = self._weights.accept_in_place(self._transaction.version, seconds)


def check_update_args(version: object, in_flight: object) -> None:
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise ValueError(f"version must be an int, got {version!r}")
    if in_flight not in IN_FLIGHT:
        raise ValueError(f"in_flight must be one of {', '.join(IN_FLIGHT)}, got {in_flight!r}")


def _incomplete_error(reason: str, cause: BaseException) -> WorkerStateError:
    error = WorkerStateError(f"weights incomplete: {reason}")
    error.__cause__ = cause
    return error
