"""Carry one weight update out: hold the lock, decide the version, and deal with the requests in flight.

Invariants
----------
* From entry to exit of a transaction no step runs, in any worker on these weights. The version goes up only on a clean
  exit: that of the worker that was asked as it was told, every other by one.
* The locks of several workers are taken in the order in which these came to the module, so that two transactions never
  wait for each other.
* A transaction that is left by an exception makes the weights incomplete, with a copy of that exception as the
  cause, which holds nothing of what ran, and fails what is in flight: a mixture of weights never generates. (But for a
  caller that went away before the block began: nothing was written.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from samebit.rollout.control.generation_thread import GenerationThread
from samebit.rollout.control.shelter import CallerLeftError, Gate
from samebit.rollout.control.weights.worker_weights import OpenedUpdate, WorkerWeights
from samebit.rollout.control.worker_status import WorkerStatus
from samebit.rollout.errors import WorkerStateError
from samebit.rollout.guard import described, without_frames
from samebit.weight_sync import SyncBrokenError, SyncReport

IN_FLIGHT = ("keep", "recompute", "wait", "abort")
MOST_VERSION = (1 << 63) - 1


@dataclass(frozen=True, eq=False)
class WeightUser:
    """Stands for one worker in updates of weights that several workers may share."""

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


@dataclass(eq=False)
class Transaction:
    """Stands for an update while it is written. version: the new one. complete: set once all weights are written."""

    version: int
    complete: bool = False


@contextmanager
def transaction(
    user: WeightUser, version: int | None, in_flight: str, gate: Gate, source: OpenedUpdate | None = None
) -> Iterator[Transaction]:
    """Let all workers on these weights stand still for the block of an update. In a shelter; waits at `gate`.

    version: as of `UpdateOptions`, like `in_flight`. source: what is to be written.

    Raises:
        SyncBrokenError: the weights are not those that the source was checked against; nothing was written.
    """
    user.thread.check_thread()
    with ExitStack() as stack:
        held = _hold_all(user, in_flight, gate, stack)
        if "weights" in user.status.sleeping:
            raise WorkerStateError('the weights are asleep; call wake_up("weights") first')
        if source is not None:
            user.weights.check_ties(source)
            _check_base(source.prepared.base_version, user)
        update = Transaction(_next_version(version, user.thread.engine.weight_version))
        for one in held:
            one.preempt_or_abort(in_flight)
        try:
            yield update
        except CallerLeftError:
            raise
        except BaseException as error:
            reason, cause = f"an update broke off ({described(error)})", without_frames(error)
            for one in held:
                one.break_off(reason, cause)
            raise
        user.take_new_weights(update.version, complete=update.complete)
        for other in (one for one in held if one is not user):
            other.weights.accept()
            other.take_new_weights(other.thread.engine.weight_version + 1, complete=update.complete)


def _hold_all(user: WeightUser, in_flight: str, gate: Gate, stack: ExitStack) -> list[WeightUser]:
    """Let all workers on the weights of one stand still until the end; one may come while others are waited for."""
    users, holds = user.weights.users, dict[WeightUser, bool]()
    while new := [one for one in users.in_order() if one not in holds]:
        holds |= {one: _hold(one, user, in_flight, gate, stack) for one in new}
    user.status.check_usable()  # one that is not among them was closed before
    return [one for one, held in holds.items() if held]


def _hold(one: WeightUser, user: WeightUser, in_flight: str, gate: Gate, stack: ExitStack) -> bool:
    """Let a worker stand still until the end; False where another than `user` has ended, and needs no new weights."""
    thread = one.thread
    try:
        hold = thread.drained_command if in_flight == "wait" else thread.command
        stack.enter_context(hold(gate))
        thread.share_block(user.thread)
    except WorkerStateError:
        if one is user or not thread.status.ended:
            raise
        return False
    return True


def _check_base(base: int | None, user: WeightUser) -> None:
    """Check that the weights are still those of a delta that was agreed to before the lock was there."""
    now, incomplete = user.thread.engine.weight_version, user.status.incomplete
    if base is None or (now == base and incomplete is None):
        return
    why = f"version {base} -> {now}" if incomplete is None else incomplete
    raise SyncBrokenError(f"the weights changed ({why}) while this delta waited, nothing was written: send them again")


def _next_version(asked: int | None, current: int) -> int:
    if asked is None:
        return current + 1
    if asked <= current:
        raise ValueError(f"version must be above the current {current}, got {asked}")
    return asked


@dataclass(eq=False)
class WeightUpdate:
    """Stands for a block in which the trainer changes shared parameters; `report` is there after it."""

    report: SyncReport | None = None


@contextmanager
def weight_update(user: WeightUser, version: int | None, in_flight: str, gate: Gate) -> Iterator[WeightUpdate]:
    """Let the trainer change shared parameters in the block, as a `transaction`."""
    if user.status.incomplete is not None:
        user.status.check_accepts_requests()
    began = time.monotonic()
    update = WeightUpdate()
    with transaction(user, version, in_flight, gate) as written:
        yield update
        update.report = user.weights.accept_in_place(written.version, time.monotonic() - began)


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
