"""Run an event loop in a thread of its own, and let other threads wait for what happens there.

Invariants
----------
* Who waits for a coroutine is woken once, with what it returned or raised; one that was cancelled, because the fleet
  closes, gives a `WorkerStateError`.
* The loop never waits for a lock of other threads: `in_turn` takes one beside it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from samebit.rollout.errors import WorkerStateError
from samebit.rollout.requests.ending import Ending

T = TypeVar("T")


class Doing(Ending, Generic[T]):
    """Stands for a coroutine on the fleet's loop, at the caller that waits for it."""

    def take(self, task: asyncio.Task[T]) -> None:
        """Take the outcome. On the loop."""
        if task.cancelled():
            self.finish(WorkerStateError("the fleet was closed"))
            return
        error = task.exception()
        if error is None:
            self._value = task.result()
        self.finish(error)

    def result(self) -> T:
        """Wait for the end. Raises what the coroutine raises, or `WorkerStateError` if the fleet is closed first."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._value


class Background:
    """Runs an event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it."""
        return self.spawn(work).result()

    def spawn(self, work: Coroutine[Any, Any, T]) -> Doing[T]:
        """Run a coroutine on the loop."""
        if self.closed:
            work.close()
            raise WorkerStateError("the fleet is closed")
        doing: Doing[T] = Doing()
        self.loop.call_soon_threadsafe(lambda: self.keep(work).add_done_callback(doing.take))
        return doing

    def keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine beside the others. On the loop."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def end(self) -> None:
        """Stop the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@asynccontextmanager
async def in_turn(lock: threading.Lock) -> AsyncIterator[None]:
    """Hold a lock of other threads, without holding up the loop until it is free."""
    taking: Future[None] = Future()

    def take() -> None:
        lock.acquire()
        if taking.set_running_or_notify_cancel():
            taking.set_result(None)
        else:
            lock.release()  # nobody waits any more: the fleet closes

    threading.Thread(target=take, name="samebit-fleet-turn", daemon=True).start()
    try:
        await asyncio.wrap_future(taking)
    except asyncio.CancelledError:
        if not taking.cancel():
            lock.release()  # it was taken, and the cancellation came before the answer
        raise
    try:
        yield
    finally:
        lock.release()


def heard(answer: asyncio.Future[Any]) -> None:
    """Take note of the error of an answer that may not be awaited any more."""
    if not answer.cancelled():
        answer.exception()
