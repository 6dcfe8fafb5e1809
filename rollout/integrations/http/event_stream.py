"""Send server-sent events while a request runs.

Invariants
----------
* A client that goes away, or does not read, ends the stream; what ran for it is aborted by the source of the events.
* An error before the first event is an answer with its own status; one after it is the last event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from samebit.rollout.integrations.http.errors import ApiError, answer, api_error, encoded
from samebit.rollout.integrations.http.step_hub import StallWatch

DONE = b"data: [DONE]\n\n"
_encode: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


def event(content: dict[str, Any]) -> bytes:
    """Return an event with this content."""
    try:
        return b"data: %b\n\n" % _encode(content).encode()
    except ValueError:
        return b"data: %b\n\n" % encoded(content)


class EventStream(Response):
    """Answers with events, sent as they come. `deadline`: raised into the stream after that number of seconds."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        stalls: StallWatch,
        deadline: float | None,
        too_late: Callable[[], ApiError],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._stalls = stalls
        self._deadline = deadline
        self._too_late = too_late
        self._expired = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending: asyncio.Task[object] = asyncio.ensure_future(self._send_all(scope, receive, send))
        leaving = asyncio.ensure_future(_left(receive))
        timer = None
        if self._deadline is not None:
            timer = asyncio.get_running_loop().call_later(self._deadline, self._expire, sending)
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if timer is not None:
                timer.cancel()
            leaving.cancel()
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending

    def _expire(self, sending: asyncio.Task[object]) -> None:
        self._expired = True
        sending.cancel()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            began, error = await self._send_events(task, send)
            self._stalls.sending(task, asyncio.get_running_loop().time())
            if error is None:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                await self._fail(error, began, scope, receive, send)
        finally:
            self._stalls.sent(task)

    async def _send_events(self, task: asyncio.Task[object], send: Send) -> tuple[bool, ApiError | None]:
        """Send what comes. Returns whether anything was sent, and what has ended it; nothing runs for it any more."""
        loop, stalls = asyncio.get_running_loop(), self._stalls
        began = False
        try:
            async for content in self._events:
                stalls.sending(task, loop.time())
                if not began:
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    began = True
                await send({"type": "http.response.body", "body": content, "more_body": True})
                stalls.sent(task)
        except asyncio.CancelledError:
            if not self._expired:
                raise
            return began, self._too_late()
        except Exception as error:  # boundary: the client hears of it
            return began, api_error(error)
        finally:
            if isinstance(self._events, AsyncGenerator):
                await self._events.aclose()
        return began, None

    async def _fail(self, error: ApiError, began: bool, scope: Scope, receive: Receive, send: Send) -> None:
        if not began:
            await answer(error)(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": event(error.content) + DONE, "more_body": False})


async def _left(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
