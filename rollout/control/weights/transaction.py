"""Carry one weight update out: hold the lock, decide the version, and deal with the requests in flight.

Invariants
----------
* From entry to exit of a transaction no step runs, in any worker on these weights. The version goes up only on a clean
  exit: that of the worker that was asked as it was told, every other by one.
* The locks of several workers are taken in the order in which these came to the module, so that two transactions never
  wait for each other.
* A transaction that is left by an exception makes the weights incomplete, with that exception as the
  cause, and fails what is in flight: a mixture of weights never generates. (But for a caller that went away before
  the block began: nothing was written.)
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType

from samebit.rollout.control.generation_thread import GenerationThread
from samebit.rollout.control.shelter import CallerLeftError, Gate
from samebit.rollout.control.weights.worker_weights import WorkerWeights
from samebit.rollout.control.worker_status import WorkerStatus
from samebit.rollout.errors import WorkerStateError
from samebit.weight_sync import SyncReport

IN_FLIGHT = ("keep", "recompute", "wait", "abort")
MOST_VERSION = (1 << 63) - 1


@dataclass(frozen=True, eq=False)
class Member:
    """Is a worker's part in the updates of its weights, which several workers may share."""

    thread: GenerationThread
    weights: WorkerWeights

    @property
    def status(self) -> WorkerStatus:
        return self.thread.status

    def preempt_or_abort(self, in_flight: str) -> None:
        """Deal with the requests in flight before the weights change. Under the lock."""
        if in_flight == "recompute":
            self.thread.engine.preempt_all()
        elif in_flight == "abort":
            self.thread.deliver(self.thread.engine.abort_started())

    def take_new_weights(self, version: int, *, complete: bool) -> None:
        """Go on with new weights. Under the lock."""
        self.thread.engine.weights_changed(version)
        if complete:
            self.status.set_incomplete(None)

    def break_off(self, reason: str, cause: BaseException) -> None:
        """Fail what is in flight: the weights are a mixture. Under the lock."""
        self.status.set_incomplete(reason, cause)
        self.thread.fail_all(lambda: _incomplete_error(reason, cause))
        self.thread.engine.clear_prefix_cache()


class Transaction(AbstractContextManager["Transaction"]):
    """Is the block of one update: set `complete` in it when all weights were written. In a shelter, waits at `gate`."""

    def __init__(self, member: Member, version: int | None, in_flight: str, gate: Gate) -> None:
        self._member = member
        self._others: list[Member] = []
        self._gate = gate
        self._asked = version
        self._in_flight = in_flight
        self._stack = ExitStack()
        self.version = 0
        self.complete = False

    def __enter__(self) -> Transaction:
        self._member.thread.check_thread()
        with ExitStack() as stack:
            held = self._hold_all(stack)
            if "weights" in self._member.status.sleeping:
                raise WorkerStateError('the weights are asleep; call wake_up("weights") first')
            self.version = self._next_version(self._member.thread.engine.weight_version)
            for member in held:
                member.preempt_or_abort(self._in_flight)
            self._others = [member for member in held if member is not self._member]
            self._stack = stack.pop_all()
        return self

    def _hold_all(self, stack: ExitStack) -> list[Member]:
        """Let all workers on these weights stand still until the end; one may come while others are waited for."""
        users, holds = self._member.weights.users, dict[Member, bool]()
        while new := [member for member in users.in_order() if member not in holds]:
            holds |= {member: self._hold(member, stack) for member in new}
        self._member.status.check_usable()  # one that is not among them was closed before
        return [member for member, held in holds.items() if held]

    def _hold(self, member: Member, stack: ExitStack) -> bool:
        """Let a worker stand still until the end; False where another one has ended, which needs no new weights."""
        thread = member.thread
        try:
            hold = thread.drained_command if self._in_flight == "wait" else thread.command
            stack.enter_context(hold(self._gate))
            thread.share_block(self._member.thread)
        except WorkerStateError:
            if member is self._member or not thread.status.ended:
                raise
            return False
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            if isinstance(error, CallerLeftError):
                return
            if error is not None:
                reason = f"an update broke off ({type(error).__name__}: {error})"
                for member in (self._member, *self._others):
                    member.break_off(reason, error)
                return
            self._member.take_new_weights(self.version, complete=self.complete)
            for other in self._others:
                other.weights.accept()
                other.take_new_weights(other.thread.engine.weight_version + 1, complete=self.complete)

    def _next_version(self, current: int) -> int:
        if self._asked is None:
            return current + 1
        if self._asked <= current:
            raise ValueError(f"version must be above the current {current}, got {self._asked}")
        return self._asked


class WeightUpdate(AbstractContextManager["WeightUpdate"]):
    """Is the block in which the trainer changes shared parameters; `report` is there after it."""

    def __init__(self, transaction: Transaction, member: Member) -> None:
        self._transaction = transaction
        self._member = member
        self._began = 0.0
        self.report: SyncReport | None = None

    def __enter__(self) -> WeightUpdate:
        if self._member.status.incomplete is not None:
            self._member.status.check_accepts_requests()
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
            self.report = self._member.weights.accept_in_place(self._transaction.version, seconds)


def check_update_args(version: object, in_flight: object) -> None:
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise ValueError(f"version must be an int, got {version!r}")
    if version is not None and version > MOST_VERSION:
        raise ValueError(f"version must be at most {MOST_VERSION}, got a number of {version.bit_length()} bits")
    if in_flight not in IN_FLIGHT:
        raise ValueError(f"in_flight must be one of {', '.join(IN_FLIGHT)}, got {in_flight!r}")


def _incomplete_error(reason: str, cause: BaseException) -> WorkerStateError:
    error = WorkerStateError(f"weights incomplete: {reason}")
    error.__cause__ = cause
    return error
