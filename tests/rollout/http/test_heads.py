"""Paths and headers are bounded, before anybody has shown a key."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from samebit.rollout.integrations.http.middleware import MOST_HEAD_BYTES

from ...patience import HANG
from .served import Served

BEGIN = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
ENDLESS = {
    "headers": (BEGIN, b"X-A: b\r\n"),
    "one-header": (BEGIN + b"X-A: ", b"bbbbbbbb"),
    "a-name": (BEGIN, b"xxxxxxxx"),
    "a-path": (b"GET /", b"aaaaaaaa"),
}


def until_refused(port: int, begin: bytes, again: bytes) -> bytes:
    """Send the beginning and then 1 MB of the other, if the server takes it; return what it said when it has closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG) as raw:
        with suppress(OSError):
            raw.sendall(begin + again * ((1 << 20) // len(again)))
        return said(raw)


def said(raw: socket.socket) -> bytes:
    """Return what comes until the connection ends."""
    found = b""
    with suppress(ConnectionError):
        while piece := raw.recv(1 << 16):
            found += piece
    return found


@pytest.mark.parametrize(("begin", "again"), ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("listener", ["base", "control"])
def test_a_head_without_an_end_is_refused(served: Served, listener: str, begin: bytes, again: bytes) -> None:
    answer = until_refused(int(vars(served)[listener].rpartition(":")[2]), begin, again)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.endswith(b"the path and the headers have more than 65536 bytes")
    assert served.http.get(f"{served.base}/health").status_code == 200


@pytest.mark.parametrize(("over", "status"), [(0, 200), (1, 431)])
def test_a_head_has_as_many_bytes_as_it_may(served: Served, over: int, status: int) -> None:
    """A head of the most bytes that are allowed is taken, and one of a byte more is not, in whatever pieces."""
    known = len("/health") + len("Host: localhost\r\n") + len("Connection: close\r\n") + len("X-A: \r\n")
    value = b"b" * (MOST_HEAD_BYTES - known + over)
    head = BEGIN + b"Connection: close\r\nX-A: " + value + b"\r\n\r\n"
    for size in (len(head), 10_000):
        with socket.create_connection(("127.0.0.1", served.server.port), timeout=HANG) as raw:
            for piece in (head[at : at + size] for at in range(0, len(head), size)):
                raw.sendall(piece)
            assert said(raw).startswith(b"HTTP/1.1 %d " % status)


def test_headers_behind_a_body_are_bounded(served: Served) -> None:
    """Headers that come behind a body, which nothing reads, end the connection too."""
    begin = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    for again in (b"X-A: b\r\n", b"xxxxxxxx"):
        until_refused(served.server.port, begin, again)
    assert served.http.get(f"{served.base}/health").status_code == 200


def test_a_body_in_small_pieces_is_no_head(served: Served) -> None:
    """A body may come in chunks of one byte: what stands between them is more than a head may have."""

    def pieces() -> Iterator[bytes]:
        yield BODY[:-1]
        yield from (b" " for _ in range(MOST_HEAD_BYTES // 4))
        yield BODY[-1:]

    headers = {"Content-Type": "application/json"}
    for _ in range(2):  # on one connection
        answer = served.http.post(f"{served.base}/v1/completions", content=pieces(), headers=headers)
        assert answer.status_code == 200, answer.text


def test_a_long_name_of_a_conversation_is_refused(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = served.post("/v1/chat/completions", body, headers={"X-Session-ID": "a" * 257})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Session-ID")
    assert "at most 256 characters, got 257" in answer.json()["error"]["message"]
