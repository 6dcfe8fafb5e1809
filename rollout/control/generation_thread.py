"""Run the generation thread, its queue, and the lock that serialises it against commands.

Invariants
----------
* The engine is touched only under `lock`, by the generation thread or by a command.
* Submissions and aborts need no lock: they go through the inbox, in order, and the thread takes them in
  before its next step.
* Between two commands there is a step, as long as there is work: a command that ends leaves the lock to the thread.
* No command, and nothing after the thread's end, meets a step in flight: it is committed before.
* Every delivery ends: with its request, with the error that broke the worker, or with "closed". The broad
  `except` of the thread is that boundary, and that of `_settle`, since a command commits the step in flight itself.
* The thread has ended before the interpreter is torn down: a kernel that runs on then aborts the process.
* With nothing to do the thread sleeps on `_wake`; all that could give it work rings that bell.
* A signal handler may raise between any two calls of a submission (Ctrl-C). Then it is queued as a whole or not at
  all: one call into C is what queues it. Commands are sheltered from handlers (`shelter`).
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

from samebit.rollout.control.compute_threads import ComputeThreads
from samebit.rollout.control.deliveries import Deliveries
from samebit.rollout.control.delivery import Delivery
from samebit.rollout.control.draining import Draining
from samebit.rollout.control.intake import MakeRequests
from samebit.rollout.control.shelter import Gate, Hold, in_main_thread
from samebit.rollout.control.turn_lock import TurnLock
from samebit.rollout.control.worker_status import WorkerStatus, broken_error
from samebit.rollout.engine.engine import Engine
from samebit.rollout.errors import WorkerStateError
from samebit.rollout.guard import contained, without_frames
from samebit.rollout.requests.request import Request
from samebit.rollout.stats import StatsLog

logger = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_SECONDS = 30.0

LINGER_SECONDS = 0.005
"""The next request often follows at once: threads that had ended would have to start for it (.2 ms)."""

_Aborted = tuple[str | Request, ...]
"""Names requests that are to end: by the id that one has then, or by itself: a later one that took its id goes on."""


class GenerationThread:
    """Steps an engine until it is closed, between commands that hold `lock`."""

    def __init__(self, engine: Engine, status: WorkerStatus, threads: ComputeThreads) -> None:
        self.engine = engine
        self.status = status
        self.lock = TurnLock(self._owes_a_turn)
        self._threads = threads
        self._inbox: deque[Delivery | _Aborted] = deque()
        self._deliveries = Deliveries()
        self._draining = Draining(engine, status)
        self._wake = _Bell()
        self._hold: weakref.ref[Hold[Any]] | None = None
        self._listeners: tuple[Callable[[], None], ...] = (StatsLog(engine).after_step,)
        threads.follow_caller()
        self._thread = threading.Thread(target=self._main, name="samebit-generation", daemon=True)
        self._thread.start()
        self._at_exit = functools.partial(_stop_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def num_unstarted(self) -> int:
        """Count the samples that have not reached the engine."""
        queued = self._inbox.copy()  # at once: others add to it
        return sum(len(entry.request.sequences) for entry in queued if isinstance(entry, Delivery))

    def check_thread(self) -> None:
        """Refuse calls that would wait for the thread while holding its lock, and those of a forked process."""
        self.status.check_process()
        if threading.current_thread() is self._thread:
            raise WorkerStateError(
                "this call was made in a callback of when_done or after_steps, for which the worker's generation "
                "thread waits: make it in another thread"
            )
        hold = None if self._hold is None else self._hold()
        if self.lock.held_by_me or (hold is not None and hold.open_here):
            raise WorkerStateError("this call was made inside weight_update(): finish that block first")

    def submit(self, make_requests: MakeRequests, hand_out: Callable[[list[Delivery]], None]) -> None:
        """Queue requests, all or none. `hand_out` is given their deliveries before they are queued."""
        with self.status.mutex:
            self.status.check_accepts_requests()
            deliveries = self._deliveries.make(make_requests(self._deliveries.num_made, self._deliveries.new_id))
            hand_out(deliveries)
            self._inbox.extend(deliveries)
        self._wake.ring()

    def abort(self, requests: Iterable[str | Request]) -> None:
        """End these requests, each given by itself or by its id, with the tokens they have."""
        self.status.check_process()
        self._inbox.append(tuple(requests))
        self._wake.ring()

    def after_steps(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each step that committed tokens: in this thread, or that of a command which commits the
        step in flight. It must not wait."""
        self._listeners = (*self._listeners, listener)

    def abort_where(self, concerned: Callable[[Request], bool]) -> None:
        """End the requests that `concerned` picks, queued ones too, with the tokens they have. Under the lock."""
        self._take_inbox()
        self.deliver(self.engine.abort([i for i, request in self.engine.requests.items() if concerned(request)]))

    def run(self, act: Callable[[Engine], T]) -> T:
        """Call `act` with the engine between two steps."""

        def turn(gate: Gate) -> T:
            with self.command(gate) as engine:
                return act(engine)

        return self.shelter(turn)

    def shelter(self, work: Callable[[Gate], T]) -> T:
        """Call `work` where no signal handler breaks it off; it waits at the gate that it is given."""
        with self.hold(lambda gate: nullcontext(work(gate))) as result:
            return result

    def hold(self, make: Callable[[Gate], AbstractContextManager[T]]) -> Hold[T]:
        """Return a `with` block for the caller; `make` gives the context manager around it, for the gate to wait at."""
        return Hold(make, self._threads.set_up, self._begin_hold, self._threads.follow_caller)

    def _begin_hold(self, hold: Hold[T]) -> None:
        self.check_thread()
        self._threads.follow_caller()
        if in_main_thread():  # in other threads the lock itself knows its holder
            self._hold = weakref.ref(hold)

    def share_block(self, other: GenerationThread) -> None:
        """Count the block of another worker on the same weights as one that holds this worker too. Under the lock."""
        self._hold = other._hold

    def wait_a_turn(self) -> None:
        """Return when a command that was running has ended, whatever state the worker is in."""
        with self.hold(self.lock.turn):
            pass

    @contextmanager
    def command(self, gate: Gate) -> Iterator[Engine]:
        """Hold the engine between two steps. In a shelter."""
        with self.lock.turn(gate):
            self.status.check_usable()
            self._settle()
            try:
                yield self.engine
            finally:
                self._draining.look_again()

    def drained_command(self, gate: Gate) -> AbstractContextManager[None]:
        """Hold the engine as `command` does, but enter when every request that has started is finished.

        New ones wait meanwhile. Raises when the worker can not run them to their end.
        """
        return self._draining.drained(self.lock, gate)

    def deliver(self, ended: Iterable[Request]) -> None:
        """Hand ended requests to their callers. Under the lock."""
        self._deliveries.finish(ended)

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """Fail all that is queued or in flight. Under the lock."""
        self._take_inbox()
        self.engine.fail_all()
        self._fail_deliveries(make_error)

    def close(self) -> None:
        """Stop the thread; pending requests fail. Returns when it has ended."""
        self.check_thread()
        with self.status.mutex:
            self.status.closed = True
        self._wake.ring()
        self._thread.join()
        atexit.unregister(self._at_exit)

    def request_stop(self) -> None:
        """Ask the thread to end without waiting for it (for finalizers: takes no lock)."""
        self.status.closed = True
        self._wake.ring()

    def stop_at_exit(self) -> None:
        """Let the step that runs now finish, and end the thread."""
        self.request_stop()
        self._thread.join(EXIT_SECONDS)

    # -- the generation thread ---------------------------------------------------------------------

    def _main(self) -> None:
        """Serve until the end. Boundary: what goes wrong in this thread reaches every caller that waits for it."""
        broken: BaseException | None = None
        try:
            self._threads.set_up()
            self._serve()
        except BaseException as error:
            broken = without_frames(error)
            with contained("logging what failed the generation thread"):
                logger.exception("the generation thread failed")
        self._threads.end()
        with self.lock.generation():
            self._break(broken)
            self.lock.end_generation()  # or it would keep the engine, and its memory, of a worker that was dropped

    def _serve(self) -> None:
        while not self.status.closed:
            if not self._wake.wait(LINGER_SECONDS):
                self._threads.dismiss()
                self._wake.wait()
            while self._turn():
                pass
        with self.lock.generation():
            self._settle()

    def _turn(self) -> bool:
        """Take in the inbox and compute a step; tell whether more is to do."""
        with self.lock.generation():
            self._take_inbox()
            if not self.status.may_step:
                return False
            self._threads.gather()
            self._hand_over(self.engine.step())
            if self._draining.awaited and self.engine.drained:
                self._draining.look_again()
            return self.engine.has_work

    def _hand_over(self, finished: list[Request]) -> None:
        """Hand over what a step gave: results to their callers, new tokens to the streams."""
        self.deliver(finished)
        self._deliveries.notify_streams()
        for listener in self._listeners:
            with contained("a listener of the steps"):
                listener()

    def _settle(self) -> None:
        """Commit the step that is in flight. Under the lock, in any thread.

        Boundary: what goes wrong breaks the worker, as in its own thread; an interrupt of the wait breaks nothing.
        """
        if self.status.broken is not None or not self.engine.in_flight:
            return
        try:
            self._hand_over(self.engine.settle())
        except BaseException as error:
            if isinstance(error, Exception) or not self.engine.in_flight:
                self._break(without_frames(error))
                with contained("logging what failed the step in flight"):
                    logger.exception("the step in flight failed")
            raise

    def _take_inbox(self) -> None:
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, Delivery):
                self._deliveries.start(entry)
                self.engine.add(entry.request)
            else:
                known = self.engine.requests
                alive = [one for one in entry if isinstance(one, str) or known.get(one.request_id) is one]
                self.deliver(self.engine.abort(one if isinstance(one, str) else one.request_id for one in alive))

    def _owes_a_turn(self) -> bool:
        """Tell whether a step is due after the command that is ending; then the thread is on its way."""
        due = self.status.may_step and (self.engine.has_work or bool(self._inbox))
        if due:
            self._wake.ring()
        return due

    def _break(self, error: BaseException | None) -> None:
        """End all deliveries: nothing is computed any more (None: because the worker was closed). Under the lock."""
        with self.status.mutex:
            self.status.broken = error
        self._fail_deliveries(lambda: _end_error(error))
        self._draining.look_again()

    def _fail_deliveries(self, make_error: Callable[[], Exception]) -> None:
        """Fail what is queued or in flight without asking the engine: it may be what broke."""
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, Delivery):
                entry.finish(make_error())
        self._deliveries.fail_all(make_error)


class _Bell:
    """Wakes the one thread that waits; a bell that was rung before it waits wakes it at once.

    A bare lock: an interrupt inside of `threading.Event` can leave the event's own lock taken.
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        with suppress(RuntimeError):  # rung already
            self._silent.release()

    def wait(self, timeout: float = -1) -> bool:
        """Wait for the bell; return False when the timeout came first."""
        return self._silent.acquire(timeout=timeout)


def _stop_at_exit(generation: weakref.ref[GenerationThread]) -> None:
    alive = generation()
    if alive is not None:
        alive.stop_at_exit()


def _end_error(cause: BaseException | None) -> WorkerStateError:
    if cause is None:
        return WorkerStateError("the worker was closed before this request finished")
    return broken_error(cause)
