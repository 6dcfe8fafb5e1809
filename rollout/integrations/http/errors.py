"""Answer errors as OpenAI's API does: `{"error": {"message", "type", "param", "code"}}` with the right status.

Invariants
----------
* What is the caller's fault is a 4xx that names the field; what is not is a 5xx, and the server goes on.
* An answer that must not be retried says so (`x-should-retry`), in the word of the `openai` client.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from samebit.rollout.checks import shown
from samebit.rollout.errors import NoTokenLeftError, RequestError, RequestIdInUseError, WorkerStateError
from samebit.weight_sync import SyncBrokenError, SyncRefusedError, WeightMismatchError, WeightSourceError

logger = logging.getLogger(__name__)

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_NO_RETRY = {"x-should-retry": "false"}
_KNOWN = (RequestError, WorkerStateError, NoTokenLeftError, SyncRefusedError, SyncBrokenError, ValueError, TypeError)
"""Lists the errors that are answered without a traceback in the log."""


class ErrorBody(BaseModel):
    """Describes one error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """Wraps an error as OpenAI's API does."""

    error: ErrorBody


class ApiError(Exception):
    """Ends a request with this status and message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def content(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = _KINDS.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


LONGEST_PARAM = 200
CHOICES = ".choices"
PIECE = 64
"""Counts the items of a list that are encoded in one call, which no other thread can interrupt."""


class JsonAnswer(Response):
    """Encodes its content as JSON in ASCII, and refuses numbers that JSON can not hold. Bytes are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else encoded(content)


def encoded(content: Any, where: str = "", first: int = 0) -> bytes:
    """Return JSON in ASCII: any string survives it, and any float comes back with its bits. where: the way to it, for
    an error; first: the number of the first item, of a piece of a list.

    Raises:
        ApiError: the content has a NaN or an infinity, which no JSON holds.
    """
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        found = _not_finite(content, where, first)
        raise ApiError(500, f"{found}, which JSON can not hold", code="not_finite", headers=_NO_RETRY) from error


def written(content: dict[str, Any]) -> bytes:
    """Return what `encoded` does, made of short pieces: in a thread, the other threads go on between them. The choices
    may be an iterator, which makes each when it is written: in Python one takes several times the memory of its JSON.

    Raises:
        ApiError: as `encoded` does.
    """
    return b"".join(_pieces(content))


def _pieces(content: Any, where: str = "") -> Iterator[bytes]:
    """Yield the pieces of what stands there. Choices are long, and the lists in them."""
    if isinstance(content, dict) and content:
        for number, (inner, value) in enumerate(content.items()):
            yield (b"," if number else b"{") + encoded(inner) + b":"
            yield from _pieces(value, f"{where}.{inner}")
        yield b"}"
    elif where == CHOICES:
        begun = b"["
        for number, choice in enumerate(content):
            yield begun
            yield from _pieces(choice, f"{where}.{number}")
            begun = b","
        yield b"]" if begun == b"," else b"[]"
    elif isinstance(content, list) and len(content) > PIECE:
        for begin in range(0, len(content), PIECE):
            yield (b"," if begin else b"[") + encoded(content[begin : begin + PIECE], where, begin)[1:-1]
        yield b"]"
    else:
        yield encoded(content, where)


def _not_finite(content: Any, where: str, first: int = 0) -> str | None:
    """Name the first value that JSON can not hold."""
    if isinstance(content, float) and (content != content or abs(content) == float("inf")):
        return f"{where.lstrip('.')} is {content}"
    listed = enumerate(content, first) if isinstance(content, list) else ()
    items = content.items() if isinstance(content, dict) else listed
    return next((found for name, value in items if (found := _not_finite(value, f"{where}.{name}"))), None)


def api_error(error: Exception) -> ApiError:
    """Return the HTTP error that an exception of the worker becomes."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NoTokenLeftError | RequestError | ValueError | TypeError):
        conflict = isinstance(error, RequestIdInUseError | SyncRefusedError | WeightMismatchError | WeightSourceError)
        return ApiError(409 if conflict else 400, str(error))
    if isinstance(error, SyncRefusedError):
        return ApiError(409, str(error))
    if isinstance(error, SyncBrokenError):
        return ApiError(502, f"the transfer broke off: {error}")
    if isinstance(error, WorkerStateError):
        return ApiError(503, str(error), code="unavailable", headers={"Retry-After": "1"})
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}", headers=_NO_RETRY)


def answer(error: ApiError) -> JsonAnswer:
    return JsonAnswer(error.content, error.status, error.headers)


def install(app: FastAPI) -> None:
    """Answer every error of this app in OpenAI's format."""

    async def ours(_: Request, error: Exception) -> Response:
        return answer(api_error(error))

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = _first(error.errors())
        return answer(ApiError(400, message, param=param))

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        why = "" if error.__cause__ is None else f": {' '.join(str(error.__cause__).split())}"
        return answer(ApiError(error.status_code, f"{error.detail}{why}", headers=error.headers))

    for kind in (ApiError, *_KNOWN, Exception):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _first(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Return message and field of the thing that is wrong, of several the deepest: of the forms that a field may have,
    the one that came nearest."""
    first = max(errors, key=lambda error: len(error["loc"]))
    param = _param(first)
    if first["type"] == "extra_forbidden":
        message = f"there is no field {shown(param)}; nothing that is passed is ignored"
    elif first["type"] == "json_invalid":
        return "the body is no JSON: " + str(first.get("ctx", {}).get("error", "")), None
    elif isinstance(first.get("input"), bytes):
        return "the body is JSON, and has to come as such: send the header Content-Type: application/json", None
    else:
        message = f"{param or 'the body'}: {_of_all_forms(first, errors)}, got {shown(first.get('input'))}"
    return message, param


def _param(error: Any) -> str | None:
    """Return the path of the field that an error is about; of a name that the client has made up, its beginning."""
    *inside, last = error["loc"][1:] or [None]
    path = [part for part in inside if isinstance(part, int) or _is_a_field(part)]
    if last is not None and (isinstance(last, int) or error["type"] == "extra_forbidden" or _is_a_field(last)):
        path.append(last)
    return ".".join(map(str, path))[:LONGEST_PARAM] if path else None


def _of_all_forms(first: Any, errors: Sequence[Any]) -> str:
    """Say what is allowed: of a field that may have several forms, what that asks for which the value has, or the names
    of all."""
    same = [one for one in errors if len(one["loc"]) == len(first["loc"]) and _param(one) == _param(first)]
    of_its_form = [one for one in same if not one["type"].endswith("_type")]
    said, *more = dict.fromkeys(one["msg"] for one in of_its_form or same)
    return ", or ".join((said, *(message.removeprefix("Input should be ") for message in more)))


def _is_a_field(part: str) -> bool:
    """Tell a field from the name of a form that it may have."""
    return not {"[", "-"} & set(part) and part not in ("str", "int", "float", "bool")
