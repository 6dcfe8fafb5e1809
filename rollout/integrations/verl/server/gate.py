"""Decide which requests a server lets in.

Invariants
----------
* Everything happens on the server's event loop: between the check and the entry of a request nothing else runs.
* When `close` returns, no request is inside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Gate:
    """Lets requests in while it is open; while it is closed they wait outside or are turned away."""

    def __init__(self) -> None:
        self.inside: set[str] = set()
        self._open = True
        self._rejecting = False
        self._opened = asyncio.Event()
        self._left = asyncio.Event()

    async def enter(self, request_id: str) -> bool:
        """Wait until the request may go on; False if it is turned away."""
        while not self._open:
            if self._rejecting:
                return False
            await self._opened.wait()
        self.inside.add(request_id)
        return True

    def leave(self, request_id: str) -> None:
        self.inside.discard(request_id)
        self._left.set()

    async def close(self, *, reject: bool, abort: Callable[[list[str]], None]) -> list[str]:
        """Let no request in, end those inside, wait until they have left, and return their ids.

        `reject`: those that come turn back instead of waiting for `open`; so do those that wait already.
        """
        self._open = False
        self._rejecting = reject
        self._opened.set()
        self._opened = asyncio.Event()
        aborted = sorted(self.inside)
        abort(aborted)
        while self.inside:
            self._left.clear()
            await self._left.wait()
        return aborted

    def open(self) -> None:
        self._open = True
        self._rejecting = False
        self._opened.set()
        self._opened = asyncio.Event()
