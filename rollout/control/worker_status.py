"""Say what a worker may do now.

Weights are incomplete without a cause when `sleep(level=2)` has discarded them, and with one when an update broke off.

Invariant: flags change under the worker's lock; those that make submissions fail change under `mutex` too,
so that a request is either refused, or queued before the change and dealt with by it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from samebit.rollout.errors import WorkerStateError

TAGS = ("weights", "kv_cache")
"""Names the parts of a worker's memory that can sleep."""


@dataclass
class WorkerStatus:
    """Holds the flags of one worker, and says what they allow.

    sleeping: the `TAGS` that sleep, in their order.
    incomplete: why the weights are, None for weights that may generate. broken: what ended the generation thread. It
        and incomplete_cause are there as long as the worker: see `guard.without_frames`.
    process: where the worker was built.
    """

    closed: bool = False
    paused: bool = False
    sleeping: tuple[str, ...] = ()
    incomplete: str | None = None
    broken: BaseException | None = None
    incomplete_cause: BaseException | None = None
    queue_while_asleep: bool = False
    process: int = field(default_factory=os.getpid, repr=False)
    mutex: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def may_step(self) -> bool:
        return not (self.closed or self.broken or self.paused or self.sleeping or self.incomplete)

    @property
    def ended(self) -> bool:
        """Return whether nothing will be computed any more."""
        return self.closed or self.broken is not None

    def end_pause(self) -> None:
        """Note that steps may run again. Under the worker's lock."""
        self.paused = False

    def set_asleep(self, tag: str, asleep: bool) -> None:
        with self.mutex:
            self.sleeping = tuple(one for one in TAGS if (asleep if one == tag else one in self.sleeping))

    def set_incomplete(self, reason: str | None, cause: BaseException | None = None) -> None:
        with self.mutex:
            self.incomplete = reason
            self.incomplete_cause = cause

    def check_usable(self) -> None:
        """Raise if the worker is closed or broken: no command makes sense any more."""
        self.check_process()
        if self.closed:
            raise WorkerStateError("the worker is closed")
        if self.broken is not None:
            raise broken_error(self.broken)

    def check_process(self) -> None:
        """Raise in a process that was forked from the worker's: no thread generates there, so none would answer."""
        if os.getpid() != self.process:
            raise WorkerStateError(
                f"this worker lives in process {self.process}, and this is process {os.getpid()}, a fork of it without "
                "the generation thread; build a worker in the new process (start it with spawn: OpenMP does not "
                "survive a fork either), or send it the requests"
            )

    def check_accepts_requests(self) -> None:
        self.check_usable()
        if self.queue_while_asleep and self.incomplete_cause is None:
            return
        if self.sleeping:
            raise WorkerStateError(f"the worker is asleep ({', '.join(self.sleeping)}); call wake_up() first")
        if self.incomplete is not None:
            raise WorkerStateError(
                f"weights incomplete: {self.incomplete}; a full load_state_dict() or receive_weights() is "
                "needed before the next token"
            ) from self.incomplete_cause


def broken_error(cause: BaseException) -> WorkerStateError:
    """Return a new error for each caller, with the one cause."""
    error = WorkerStateError(f"the worker is broken: {type(cause).__name__} in the generation thread: {cause}")
    error.__cause__ = cause
    return error
