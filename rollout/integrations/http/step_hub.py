"""Wake the streams of an event loop when a step of the worker has given them tokens.

Invariants
----------
* A step costs the generation thread at most one call into the loop, however many streams there are, and none while
  no caller streams.
* A stream that is not read for `stall_seconds` is ended; what it has not read costs no memory beside its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from samebit.rollout.integrations.http.served import Reader, ServedHandle
from samebit.rollout.outputs import StreamChunk


class StepHub:
    """Holds the streams that wait for tokens. Everything but `stepped` happens on the loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[asyncio.Future[None], Reader] = {}
        self._called = False

    def stepped(self) -> None:
        """Note that a step has ended. In the thread that commits it."""
        if self._waiting and not self._called and self._loop is not None:
            self._called = True
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._called = False
        for future, reader in list(self._waiting.items()):
            if reader.ready and not future.done():
                future.set_result(None)

    async def chunks(self, handle: ServedHandle) -> AsyncIterator[list[StreamChunk]]:
        """Yield what comes, until the request ends. Raises what failed it."""
        loop = self._loop = asyncio.get_running_loop()
        reader = handle.reader()
        handle.when_done(self.stepped)
        while not reader.ended:
            if not reader.ready:
                future = loop.create_future()
                self._waiting[future] = reader
                try:
                    if not reader.ready:  # it may have come before the hub knew of this stream
                        await future
                finally:
                    del self._waiting[future]
            yield reader.read()


class StallWatch:
    """Ends the tasks whose client does not read."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: dict[asyncio.Task[object], float] = {}
        self._watching: asyncio.Task[None] | None = None

    def sending(self, task: asyncio.Task[object], now: float) -> None:
        """Note that a task hands something to its client now."""
        self._since[task] = now
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    def sent(self, task: asyncio.Task[object]) -> None:
        """Note that the client has taken what was handed to it."""
        self._since.pop(task, None)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._since:
            await asyncio.sleep(min(1.0, self._seconds / 2))
            for task, since in list(self._since.items()):
                if loop.time() - since > self._seconds:
                    task.cancel("the client does not read")
