"""Guard the server's doors, before a request is read: its size, that of its head, where it comes from, and who asks.

Plain ASGI: a layer that wraps every piece of a stream would cost more than the stream.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from samebit.rollout.integrations.http.errors import ApiError, answer

OPEN_PATHS = frozenset(("/health", "/liveness", "/readiness", "/metrics"))
"""Names what answers without a token: probes and Prometheus have none."""


MOST_HEAD_BYTES = 1 << 16
"""Limits what a request says before its body and behind it: its path and its headers."""
_TOO_LARGE = f"the path and the headers have more than {MOST_HEAD_BYTES} bytes".encode()
_TOO_LARGE_ANSWER = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_TOO_LARGE), _TOO_LARGE)
)


class BoundedHead(HttpToolsProtocol):
    """Reads requests as uvicorn does, and none of a larger head: everything below comes after it, the API key too."""

    _head = 0
    """Counts the bytes of the request's path and headers."""
    _since = 0
    """Counts the bytes that have come since the parser made something of one: a header that does not end."""

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._since += len(data)
        super().data_received(data)
        if self._since > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def send_400_response(self, msg: str) -> None:
        if self._head > MOST_HEAD_BYTES:
            self._refuse()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        self._head = self._since = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._since = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._since = 0
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._since = 0
        self._head += size
        if self._head > MOST_HEAD_BYTES:
            raise ValueError(_TOO_LARGE)  # to the parser, which ends in `send_400_response`

    def _refuse(self) -> None:
        """Answer, where no answer has begun that this would be in the middle of; close."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_TOO_LARGE_ANSWER)
        self.transport.close()


class JsonSize:
    """Counts the commas, lists and objects of a JSON text that comes in pieces, but for those that stand in strings: a
    text has at most one value more."""

    def __init__(self) -> None:
        self.count = 0
        self._in_string = False
        self._escape = b""
        """Holds the backslash of an escape that a piece ends in."""

    def push(self, piece: bytes) -> None:
        """Count the next piece."""
        piece = self._escape + piece
        cut = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        self._escape = piece[len(piece) - cut :]
        parts = piece[: len(piece) - cut].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        wide = b"\0" in piece  # UTF-16 or UTF-32, whose quotes are other bytes: there what stands in strings counts too
        outside = piece if wide else b"".join(parts[self._in_string :: 2])
        self.count += sum(map(outside.count, (b",", b"[", b"{")))
        self._in_string ^= len(parts) % 2 == 0


class BodyLimit:
    """Refuses bodies of more bytes than `most`, declared or sent, and those of more values than `most_values` before
    any is made of them: the parser lets nothing else run."""

    def __init__(self, app: ASGIApp, most: int, most_values: int) -> None:
        self._app = app
        self._most = most
        self._most_values = most_values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or len(declared) > 18 or int(declared) > self._most:
            await answer(self._error())(scope, receive, send)
            return
        left, values = self._most, JsonSize()

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            piece = message.get("body", b"")
            left -= len(piece)
            values.push(piece)
            if left < 0:
                raise HTTPException(413, self._error().message)  # what FastAPI hands on while it reads a body
            if values.count > self._most_values:
                raise HTTPException(
                    413, f"the body has more than {self._most_values} values: numbers, texts, lists and objects"
                )
            return message

        await self._app(scope, counted, send)

    def _error(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._most} bytes", headers={"Connection": "close"})


class Bearer:
    """Asks for a bearer token at all paths but some."""

    def __init__(self, app: ASGIApp, token: str, open_paths: frozenset[str]) -> None:
        self._app = app
        self._token = token
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _path_inside(scope) not in self._open:
            try:
                _check_token(Headers(scope=scope), self._token)
            except ApiError as error:
                await answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def guarded_route(token: str) -> type[APIRoute]:
    """Return a kind of route that asks for a bearer token before it reads a body, under whatever path it is found."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                _check_token(request.headers, token)
                return await handler(request)

            return guarded

    return GuardedRoute


def _path_inside(scope: Scope) -> str:
    """Return the path below the one that the application is mounted at, as its router reads it."""
    path: str = scope["path"]
    mount: str = scope.get("root_path", "")
    return path[len(mount) :] if path.startswith(f"{mount}/") else path


def _check_token(headers: Headers, token: str) -> None:
    """Raise `ApiError` 401 where the headers do not hold this bearer token. It is compared in constant time."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise ApiError(
            401, "a bearer token is needed here", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )


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
