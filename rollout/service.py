"""The generation thread, its queue, and the lock that serialises it against commands.

Invariants
----------
* The engine is touched only under `lock`, by the generation thread or by a command.
* Submissions and aborts need no lock: they go through the inbox, in order, and the thread takes them in
  before its next step.
* Between two commands there is a step, as long as there is work: a command that ends leaves the lock to the thread.
* No command, and nothing after the thread's end, meets a step in flight: it is committed before.
* Every delivery in `_live` ends: with its request, with the error that broke the worker, or with "closed". The broad
  `except` of the thread is that boundary, and that of `_settle`, since a command commits the step in flight itself.
* The thread has ended before the interpreter is torn down: a kernel that runs on then aborts the process.
* With nothing to do the thread sleeps on `_wake`; whatever could give it work sets that event.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from samebit.kernels.openmp import release_idle_threads
from samebit.rollout.engine import Engine
from samebit.rollout.errors import RequestError, WorkerStateError
from samebit.rollout.handle import Delivery
from samebit.rollout.request import Request
from samebit.rollout.stats import StatsLog
from samebit.rollout.ticket_lock import TicketLock
from samebit.rollout.worker_state import WorkerState, broken_error

logger = logging.getLogger(__name__)

EXIT_SECONDS = 30.0


@dataclass(frozen=True)
class _Abort:
    request_ids: tuple[str, ...]


class GenerationService:
    def __init__(self, engine: Engine, state: WorkerState, on_start: Callable[[], None]) -> None:
        self.engine = engine
        self.state = state
        self.lock = TicketLock(self._owes_a_turn)
        self._on_start = on_start
        self._inbox: deque[Request | _Abort] = deque()
        self._live: dict[str, Delivery] = {}
        self._streams: set[Delivery] = set()
        self._wake = threading.Event()
        self._closures = 0
        self._drain = threading.Condition()
        self._drain_signals = 0
        self._next_ordinal = 0
        self._log = StatsLog(engine)
        self._thread = threading.Thread(target=self._main, name="samebit-generation", daemon=True)
        self._thread.start()
        self._at_exit = functools.partial(_stop_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def num_unstarted(self) -> int:
        return len(self._inbox)

    def check_thread(self) -> None:
        """Refuse calls that would wait for the thread while holding its lock."""
        if self.lock.held_by_me:
            raise WorkerStateError("this call was made inside weight_update(): finish that block first")

    def submit(self, make_requests: Callable[[int], list[Request]]) -> list[Delivery]:
        """Queue requests, all or none. `make_requests` gets the ordinal of the first one."""
        with self.state.mutex:
            self.state.check_accepts_requests()
            requests = make_requests(self._next_ordinal)
            self._check_ids(requests)
            deliveries = [Delivery(request, self._streams) for request in requests]
            self._next_ordinal += len(requests)
            for delivery in deliveries:
                self._live[delivery.request.request_id] = delivery
            self._inbox.extend(requests)
        self._wake.set()
        return deliveries

    def abort(self, request_ids: Iterable[str]) -> None:
        self._inbox.append(_Abort(tuple(request_ids)))
        self._wake.set()

    @contextmanager
    def command(self) -> Iterator[Engine]:
        """Hold the engine between two steps."""
        self.check_thread()
        with self.lock:
            self.state.check_usable()
            self._settle()
            try:
                yield self.engine
            finally:
                self._signal_drain()

    @contextmanager
    def drained_command(self) -> Iterator[Engine]:
        """As `command`, but entered when every request that has started is finished.

        New ones wait meanwhile. Raises when the worker can not run them to their end.
        """
        self.check_thread()
        with self.lock:
            self.state.check_usable()
            self._close_admission(+1)
        try:
            self._wait_until_drained()
            try:
                self.state.check_usable()
                yield self.engine
            finally:
                self.lock.release()
        finally:
            with self.lock:
                self._close_admission(-1)

    def deliver(self, finished: Iterable[Request]) -> None:
        """Hand ended requests to their callers."""
        for request in finished:
            delivery = self._live.pop(request.request_id)
            self._streams.discard(delivery)
            delivery.finish(request.error)

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """Fail whatever is queued or in flight. Under the lock."""
        self._take_inbox()
        self.engine.abort(list(self.engine.requests))
        self._fail_deliveries(make_error)

    def close(self) -> None:
        """Stop the thread; pending requests fail. Returns when it has ended."""
        self.check_thread()
        with self.state.mutex:
            self.state.closed = True
        self._wake.set()
        self._thread.join()
        atexit.unregister(self._at_exit)

    def request_stop(self) -> None:
        """Ask the thread to end without waiting for it (for finalizers: takes no lock)."""
        self.state.closed = True
        self._wake.set()

    def stop_at_exit(self) -> None:
        """Let the step that runs now finish, and end the thread."""
        self.request_stop()
        self._thread.join(EXIT_SECONDS)

    # -- the generation thread ---------------------------------------------------------------------

    def _main(self) -> None:
        """Boundary: whatever goes wrong in this thread reaches everyone who waits for it."""
        try:
            self._on_start()
            self._serve()
        except BaseException as error:
            logger.exception("the generation thread failed")
            self._end(error)
        else:
            self._end(None)

    def _serve(self) -> None:
        while not self.state.closed:
            self._wake.wait()
            self._wake.clear()
            while self._turn():
                pass
            release_idle_threads()
        with self.lock.generation():
            self._settle()

    def _turn(self) -> bool:
        with self.lock.generation():
            return self._step()

    def _step(self) -> bool:
        """Take in the inbox and compute a step; whether there is more to do."""
        self._take_inbox()
        if not self.state.may_step:
            return False
        self._hand_over(self.engine.step())
        self._log.after_step()
        if self._closures and self.engine.drained:
            self._signal_drain()
        return self.engine.has_work

    def _hand_over(self, finished: list[Request]) -> None:
        """What a step gave: results to their callers, new tokens to the streams."""
        self.deliver(finished)
        for delivery in tuple(self._streams):
            delivery.notify()

    def _settle(self) -> None:
        """Commit the step that is in flight. Under the lock, in any thread.

        Boundary: what goes wrong breaks the worker, as in its own thread; an interrupt of the wait breaks nothing.
        """
        if self.state.broken is not None or not self.engine.in_flight:
            return
        try:
            self._hand_over(self.engine.settle())
        except BaseException as error:
            if isinstance(error, Exception) or not self.engine.in_flight:
                logger.exception("the step in flight failed")
                self._break(error)
            raise

    def _take_inbox(self) -> None:
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, _Abort):
                self.deliver(self.engine.abort(entry.request_ids))
            else:
                self.engine.add(entry)

    def _owes_a_turn(self) -> bool:
        """Whether a step is due after the command that is ending; then the thread is on its way."""
        due = self.state.may_step and (self.engine.has_work or bool(self._inbox))
        if due:
            self._wake.set()
        return due

    def _end(self, error: BaseException | None) -> None:
        with self.lock.generation():
            self._break(error)

    def _break(self, error: BaseException | None) -> None:
        """Nothing is computed any more; None: because the worker was closed. Under the lock."""
        with self.state.mutex:
            self.state.broken = error
        self._fail_deliveries(lambda: _end_error(error))
        self._signal_drain()

    def _fail_deliveries(self, make_error: Callable[[], Exception]) -> None:
        """The engine is not asked: it may be what broke."""
        for request_id in list(self._live):
            self._live.pop(request_id).finish(make_error())

    # -- draining ----------------------------------------------------------------------------------

    def _close_admission(self, change: int) -> None:
        self._closures += change
        self.engine.scheduler.open_admission(self._closures == 0)

    def _wait_until_drained(self) -> None:
        """Returns holding the lock."""
        while True:
            self.lock.acquire()
            signals = self._drain_signals
            if self.engine.drained:
                return
            stuck = not self.state.may_step
            self.lock.release()
            if stuck:
                self.state.check_usable()
                raise WorkerStateError(
                    'in_flight="wait" needs a worker that generates, and this one is paused, asleep or without '
                    "weights while requests are in flight"
                )
            with self._drain:
                while self._drain_signals == signals:
                    self._drain.wait()

    def _signal_drain(self) -> None:
        with self._drain:
            self._drain_signals += 1
            self._drain.notify_all()

    def _check_ids(self, requests: list[Request]) -> None:
        seen: set[str] = set()
        for request in requests:
            if request.request_id in self._live or request.request_id in seen:
                raise RequestError(
                    f"request id {request.request_id!r} is in use by a request that has not finished; allowed: any "
                    "other non-empty string, or None for a new one"
                )
            seen.add(request.request_id)


def _stop_at_exit(service: weakref.ref[GenerationService]) -> None:
    alive = service()
    if alive is not None:
        alive.stop_at_exit()


def _end_error(cause: BaseException | None) -> WorkerStateError:
    if cause is None:
        return WorkerStateError("the worker was closed before this request finished")
    return broken_error(cause)
