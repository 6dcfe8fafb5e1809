"""Stand in for vLLM's server and samebit's, but compute nothing: it answers `/health` and completions.

    python stand_in_server.py PORT FAULT

FAULT: "none", "loses" (every answer has a token too few), "doubles" (one too many), "breaks" (a stream ends early),
"hangs" (no answer comes), "dies" (it does not start). Each token is 7, and its log-probability -1.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


class StandIn(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    fault: ClassVar[str] = "none"

    def do_GET(self) -> None:
        self._whole({})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"], "without it the lengths differ"
        if self.fault == "hangs":
            threading.Event().wait()
        count = asked["max_tokens"] + {"loses": -1, "doubles": 1}.get(self.fault, 0)
        if asked["stream"]:
            self._streamed([1] * count)
        else:
            self._whole(_answer(count))

    def _whole(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _streamed(self, counts: list[int]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for count in counts:
            self._chunk(f"data: {json.dumps(_answer(count))}\n\n")
            if self.fault == "breaks":
                self.close_connection = True
                return
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = 128


def _answer(count: int) -> dict[str, Any]:
    return {"choices": [{"token_ids": [7] * count, "logprobs": {"token_logprobs": [-1.0] * count}}]}


if __name__ == "__main__":
    StandIn.fault = sys.argv[2]
    if StandIn.fault == "dies":
        sys.exit("a fault of the server")
    Server(("127.0.0.1", int(sys.argv[1])), StandIn).serve_forever()
