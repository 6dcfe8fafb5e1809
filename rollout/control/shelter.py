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
from typing import Any, Generic, TypeVar

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
        """Return what was given, or raise the error, once: it is nobody's afterwards but its catcher's, as a circle of
        it and this frame would keep all that its traceback leads to."""
        if self._error is None:
            return self._value[0]
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error


@dataclass(frozen=True)
class _Leaving:
    """Says how the block was left."""

    kind: type[BaseException] | None
    error: BaseException | None
    trace: TracebackType | None


class _Statement(Generic[T]):
    """Stands for one `with` statement: what passes between its caller and the clerk.

    caller: the thread inside of it, if it has a clerk. inside: its block has begun.
    """

    def __init__(self) -> None:
        self.gate: Gate = SimpleQueue()
        self.entered: _Report[T] = _Report()
        self.ended: _Report[None] = _Report()
        self.in_place: AbstractContextManager[T] | None = None
        self.caller = 0
        self.inside = False
        self._leave: weakref.ref[Callable[..., None]] | None = None

    def watch(self, leave: Callable[..., None]) -> None:
        """Let the clerk know when Python drops `leave`, the `__exit__` of the statement."""
        self._leave = weakref.ref(leave, self.gate.put)

    @property
    def alive(self) -> bool:
        return self._leave is None or self._leave() is not None


class _Exit:
    """Gives `Hold` its `__exit__`, made anew for each `with` statement, which alone holds it.

    A partial, since Python takes a bound method apart before it calls it.
    """

    def __get__(self, hold: Hold[T] | None, owner: type[Hold[T]]) -> Callable[..., None]:
        if hold is None:
            return owner.leave
        statement = _Statement[T]()
        leave = partial(owner.leave, hold, statement=statement)
        statement.watch(leave)
        hold.begin(statement)
        return leave


class Hold(Generic[T]):
    """Runs a `with` block in the caller's thread, inside a context manager that the clerk enters and leaves.

    Any number of statements may use it, but none inside another.

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
        self._begun: dict[int, _Statement[T]] = {}
        self._open: _Statement[T] | None = None

    def __enter__(self) -> T:
        statement = self._take_begun()
        self._announce(self)
        if not in_main_thread() or not self._has_clerk(statement):
            statement.in_place = self._make(statement.gate)
            return self._entered(statement, statement.in_place.__enter__())
        try:
            statement.entered.wait()
        except BaseException:
            statement.gate.put(_LEFT)
            statement.entered.wait()  # for what has begun; who interrupts again does not wait for that
            raise
        value = statement.entered.get()
        statement.caller = threading.get_ident()
        return self._entered(statement, value)

    def _entered(self, statement: _Statement[T], value: T) -> T:
        """Note that the block of a statement has begun."""
        self._open = statement
        statement.inside = True
        return value

    def begin(self, statement: _Statement[T]) -> None:
        """Note the statement that the calling thread is about to enter."""
        self._begun[threading.get_ident()] = statement

    def leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        statement: _Statement[T] | None = None,
    ) -> None:
        """End the block of a statement; raises what its end raises.

        Whoever calls `__exit__` outside of a statement means the block that was entered last.
        """
        if statement is None or not statement.inside:
            statement = self._open
        if statement is None:
            raise RuntimeError("this block was left before it was entered")
        try:
            self._conclude()
        except BaseException as own:  # then the block has failed, whatever it did
            if error is None:
                kind, error, trace = type(own), own, own.__traceback__
            _end(statement, _Leaving(kind, error, trace))
            raise
        _end(statement, _Leaving(kind, error, trace))

    @property
    def open_here(self) -> bool:
        """Return whether the calling thread is inside the block, which the clerk holds for it."""
        return self._open is not None and self._open.caller == threading.get_ident() and self._open.alive

    def _take_begun(self) -> _Statement[T]:
        """Return the statement that was begun here. `ExitStack` begins none: it asks the class for `__exit__`."""
        begun = self._begun.pop(threading.get_ident(), None)
        return begun if begun is not None and begun.alive else _Statement()

    def _has_clerk(self, statement: _Statement[T]) -> bool:
        """Start the clerk; tell whether there could be one.

        `Thread.is_alive` of the main thread does not tell whether the interpreter ends: an interrupt within it makes
        Python take that thread for one that has ended.
        """
        if sys.is_finalizing():  # before 3.12 one would be started, and never run
            return False
        try:
            start_new_thread(self._serve, (statement,))
        except RuntimeError as error:
            if "new thread" not in str(error):
                raise  # by a signal handler, and the clerk has begun
            return False
        return True

    def _serve(self, statement: _Statement[T]) -> None:
        """Enter and leave for the caller, as the clerk."""
        try:
            self._prepare()
            inner = self._make(statement.gate)
            statement.entered.give(inner.__enter__())
        except BaseException as error:
            statement.entered.fail(error)
            return
        left = _how_it_was_left(statement)
        try:
            inner.__exit__(left.kind, left.error, left.trace)
        except BaseException as error:
            statement.ended.fail(error)
        else:
            statement.ended.give(None)


def _end(statement: _Statement[Any], left: _Leaving) -> None:
    if statement.in_place is not None:
        statement.in_place.__exit__(left.kind, left.error, left.trace)
        return
    statement.gate.put(left)
    statement.caller = 0
    statement.ended.wait()
    statement.ended.get()


def _how_it_was_left(statement: _Statement[Any]) -> _Leaving:
    """Wait until the block is over; say how it ended."""
    word = statement.gate.get()
    if isinstance(word, _Leaving):
        return word
    error = KeyboardInterrupt("interrupted at the end of the block") if statement.inside else CallerLeftError()
    return _Leaving(type(error), error, None)
