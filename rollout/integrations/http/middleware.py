"""Guard the server's doors, before a request is read: its size, where it comes from, and who asks.

Plain ASGI: a layer that wraps every piece of a stream would cost more than the stream.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samebit.rollout.integrations.http.errors import ApiError, answer

OPEN_PATHS = frozenset(("/health", "/liveness", "/readiness", "/metrics"))
"""Names what answers without a token: probes and Prometheus have none."""


class BodyLimit:
    """Refuses bodies of more bytes than `most`, declared or sent."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or len(declared) > 18 or int(declared) > self._most:
            await answer(self._error())(scope, receive, send)
            return
        left = self._most

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, self._error().message)  # what FastAPI hands on while it reads a body
            return message

        await self._app(scope, counted, send)

    def _error(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._most} bytes", headers={"Connection": "close"})


class Bearer:
    """Asks for a bearer token where `wanted` says so. Tokens are compared in constant time."""

    def __init__(self, app: ASGIApp, token: str, wanted: Callable[[str], bool]) -> None:
        self._app = app
        self._token = token.encode()
        self._wanted = wanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._wanted(scope["path"]):
            given = Headers(scope=scope).get("authorization", "")
            kind, _, token = given.partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token):
                error = ApiError(
                    401, "a bearer token is needed here", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
                await answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class LoopbackOnly:
    """Lets programs of this machine in, and no pages of a browser: the host is a name of this machine's own, and there
    is no origin."""

    NAMES = ("127.0.0.1", "localhost", "[::1]")

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host = headers.get("host", "")
            name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
            if name not in self.NAMES or "origin" in headers:
                error = ApiError(403, f"this listener answers programs of this machine only, got the host {host!r}")
                await answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
