"""Run commands where no signal handler breaks them off.

Python runs signal handlers in the main thread, between any two calls: also between the one that takes a lock and the
`try` that would give it back. One that raises (Ctrl-C) is met by this:

Invariants
----------
* The main thread never holds the worker's lock. A caller that enters a `Hold` there has it entered and left by a thread
  of its own, the clerk, which no handler interrupts: what it has begun it brings to its end.
* The clerk learns by one call into C that the caller's `with` statement is over, in whatever way it ended: Python
  drops the statement's `__exit__`, and a weak reference to it puts word of that into the gate. Not even an interrupt
  between the statement and the first line of `__exit__` is missed.
* A caller that goes away before its block began has changed nothing; what it waited for is given up.
* In other threads there are no handlers, and no clerk: everything runs in place. So it does in the main thread once the
  interpreter ends, and runs no new thread any more.
"""

from __future__ import annotations

import sys
import threading
import weakref
from _thread import start_new_thread  # one call into C: done or not done, where Thread.start() may be half done
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
Gate = SimpleQueue[object]
"""A caller's clerk waits at this box: for `GO`, or for another word, which says that the caller left."""

GO = object()
_LEFT = object()


class CallerLeftError(Exception):
    """The caller of this command went away, and its block never began."""


def wait_at(gate: Gate) -> None:
    """Wait at a gate for `GO`.

    Raises:
        CallerLeftError: the caller went away first.
    """
    if gate.get() is not GO:
        raise CallerLeftError("interrupted before it began")


def in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class _Report(Generic[T]):
    """Tells the caller that the clerk has entered, or left, and what it raised.

    Waiting takes nothing away: it may be interrupted and done again.
    """

    def __init__(self) -> None:
        self._pending = threading.Lock()
        self._pending.acquire()
        self._value: list[T] = []
        self._error: BaseException | None = None

    def give(self, value: T) -> None:
        self._value.append(value)
        self._pending.release()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._pending.release()

    def wait(self) -> None:
        with self._pending:
            pass

    def get(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value[0]


@dataclass(frozen=True)
class _Leaving:
    """Says how the block was left."""

    kind: type[BaseException] | None
    error: BaseException | None
    trace: TracebackType | None


class _Exit:
    """Gives `Hold` its `__exit__`, made anew for each `with` statement, which alone holds it.

    A partial, since Python takes a bound method apart before it calls it.
    """

    def __get__(self, hold: Hold[T] | None, owner: type[Hold[T]]) -> Callable[..., None]:
        if hold is None:
            return owner.leave
        leave = partial(owner.leave, hold)
        hold.watch(leave)
        return leave


class Hold(Generic[T]):
    """Runs a `with` block in the caller's thread, inside a context manager that the clerk enters and leaves.

    make: the context manager; given the gate at which it waits. prepare: called first in the clerk's thread. announce:
    called first in the caller's; may raise. conclude: called there when the block is over, before what ends it.
    """

    __exit__ = _Exit()

    def __init__(
        self,
        make: Callable[[Gate], AbstractContextManager[T]],
        prepare: Callable[[], None],
        announce: Callable[[Hold[T]], None],
        conclude: Callable[[], None],
    ) -> None:
        self._make = make
        self._prepare = prepare
        self._announce = announce
        self._conclude = conclude
        self._gate: Gate = SimpleQueue()
        self._entered: _Report[T] = _Report()
        self._ended: _Report[None] = _Report()
        self._in_place: AbstractContextManager[T] | None = None
        self._statement: weakref.ref[Callable[..., None]] | None = None
        self._caller = 0
        self._inside = False

    def __enter__(self) -> T:
        self._announce(self)
        if not in_main_thread() or not self._has_clerk():
            self._in_place = self._make(self._gate)
            return self._in_place.__enter__()
        try:
            self._entered.wait()
        except BaseException:
            self._gate.put(_LEFT)
            self._entered.wait()  # for what has begun; who interrupts again does not wait for that
            raise
        value = self._entered.get()
        self._caller = threading.get_ident()
        self._inside = True
        return value

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the block; raises what its end raises."""
        try:
            self._conclude()
        except BaseException as own:  # then the block has failed, whatever it did
            if error is None:
                kind, error, trace = type(own), own, own.__traceback__
            self._end(kind, error, trace)
            raise
        self._end(kind, error, trace)

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._in_place is not None:
            self._in_place.__exit__(kind, error, trace)
            return
        self._gate.put(_Leaving(kind, error, trace))
        self._caller = 0
        self._ended.wait()
        self._ended.get()

    def watch(self, leave: Callable[..., None]) -> None:
        """Let the clerk know when Python drops `leave`, the `__exit__` of the statement."""
        self._statement = weakref.ref(leave, self._gate.put)

    @property
    def open_here(self) -> bool:
        """Return whether the calling thread is inside the block, which the clerk holds for it."""
        alive = self._statement is None or self._statement() is not None
        return self._caller == threading.get_ident() and alive

    def _has_clerk(self) -> bool:
        """Start the clerk; tell whether there could be one.

        `Thread.is_alive` of the main thread does not tell whether the interpreter ends: an interrupt within it makes
        Python take that thread for one that has ended.
        """
        if sys.is_finalizing():  # before 3.12 one would be started, and never run
            return False
        try:
            start_new_thread(self._serve, ())
        except RuntimeError as error:
            if "new thread" not in str(error):
                raise  # by a signal handler, and the clerk has begun
            return False
        return True

    def _serve(self) -> None:
        """Enter and leave for the caller, as the clerk."""
        try:
            self._prepare()
            inner = self._make(self._gate)
            self._entered.give(inner.__enter__())
        except BaseException as error:
            self._entered.fail(error)
            return
        left = self._how_it_was_left(self._gate.get())
        try:
            inner.__exit__(left.kind, left.error, left.trace)
        except BaseException as error:
            self._ended.fail(error)
        else:
            self._ended.give(None)

    def _how_it_was_left(self, word: object) -> _Leaving:
        if isinstance(word, _Leaving):
            return word
        error = KeyboardInterrupt("interrupted at the end of the block") if self._inside else CallerLeftError()
        return _Leaving(type(error), error, None)
