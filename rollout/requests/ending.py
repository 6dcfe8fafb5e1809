"""Let callers wait for the end of a request or a command, or for what comes before it: `Ending`.

Invariants
----------
* It comes once: the first call of `finish` counts. The callers that wait are woken then.
* What a callback raises, in the thread that ends it, is logged and goes no further.
* An interrupt (Ctrl-C) of a caller that waits leaves nothing behind that the other side could wait for: each waits at a
  lock of its own. (Inside of `threading.Condition` it can leave the condition's lock taken.)
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from samebit.rollout.guard import contained


class Ending:
    """Wakes the callers that wait for a request or a command. error: what failed it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.done = False
        self._pending = [True]
        self._waiting: deque[threading.Lock] = deque()
        self._callbacks: deque[Callable[[], None]] = deque()

    def finish(self, error: BaseException | None = None) -> None:
        """Note that it ended, and with which error."""
        with suppress(IndexError):
            self._pending.pop()  # one step, whatever threads call: the first one counts
            self.error = error
            self.done = True
        self.notify()
        while self._callbacks:
            self._call_one()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once: in the thread that ends it, or here if it has ended. It must not wait."""
        self._callbacks.append(callback)
        if self.done:
            self._call_one()

    def notify(self) -> None:
        """Let the callers that wait look again."""
        with suppress(IndexError):  # a caller waits no longer
            for _ in range(len(self._waiting)):
                self._waiting.popleft().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; tell whether it has come."""
        return self.wait_for(lambda: self.done, timeout)

    def wait_for(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until it holds, which is looked at after each `notify`; tell whether it does."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not holds():
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
            left = -1 if deadline is None else min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
            if holds() or not gate.acquire(timeout=left):  # what changes after this look releases the gate
                with suppress(ValueError):
                    self._waiting.remove(gate)
                return holds()
        return True

    async def wait_async(self) -> None:
        """Wait for the end without holding up the event loop."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self.when_done(lambda: _wake(loop, ended))
        await ended.wait()

    def _call_one(self) -> None:
        """Call a callback, unless the other side has taken the last one meanwhile."""
        try:
            callback = self._callbacks.popleft()
        except IndexError:
            return
        with contained("a callback at the end of a request"):
            callback()


def _wake(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    """Set the event from another thread. A loop that was closed meanwhile (RuntimeError) has no caller that waits."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(ended.set)
