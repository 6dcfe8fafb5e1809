"""Carry a result from the generation thread to the callers that wait for it.

Invariants
----------
* `Delivery` ends exactly once, with the request or with an error: an `Ending`.
* The generation thread touches a delivery when its request ends, and after a step only while someone
  streams from it. The lists of a result are built in the caller's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from samebit.kernels.openmp import release_idle_threads
from samebit.rollout.checks import check_timeout
from samebit.rollout.outputs import RequestOutput, StreamChunk, new_tokens, request_output
from samebit.rollout.requests.ending import Ending
from samebit.rollout.requests.request import Request, Sequence
from samebit.rollout.requests.tokenizer import Tokenizer


class Delivery(Ending):
    """Wakes the callers that wait for a request: the generation thread's side of a `RequestHandle`."""

    def __init__(self, request: Request, streams: set[Delivery]) -> None:
        super().__init__()
        self.request = request
        self._streams = streams

    def finish(self, error: BaseException | None = None) -> None:
        """Say that all is there, or what failed. Of images nothing stays with what a caller may keep for long."""
        self.request.shared.images = None
        super().finish(error)

    def wait(self, timeout: float | None = None) -> bool:
        if not self.done:
            release_idle_threads()
        return super().wait(timeout)

    def wait_for_tokens(self, reader: TokenReader) -> None:
        """Wait until there is something to read, or all is done."""

        def has_news() -> bool:
            self._streams.add(self)  # a reader that left has taken it out
            return self.done or reader.ready

        release_idle_threads()
        self.wait_for(has_news)

    def stop_streaming(self) -> None:
        """Be woken by steps no more, unless another reader waits: that one looks again, and asks for it."""
        self._streams.discard(self)
        self.notify()


class RequestHandle:
    """Stands for a request at its caller: waits, streams, cancels. Safe to use from several threads."""

    def __init__(
        self,
        delivery: Delivery,
        tokenizer: Tokenizer | None,
        cancel: Callable[[list[Request]], None],
        check_thread: Callable[[], None],
    ) -> None:
        self._delivery = delivery
        self._tokenizer = tokenizer
        self._cancel = cancel
        self._check_thread = check_thread
        self._output: RequestOutput | None = None

    @property
    def request_id(self) -> str:
        return self._delivery.request.request_id

    @property
    def done(self) -> bool:
        return self._delivery.done

    def cancel(self) -> None:
        """Abort the request; `result()` then gives what it had, with finish_reason "abort"."""
        if not self.done:
            self._cancel(requests_of([self]))

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. Raises what failed the request, or TimeoutError (the request goes on)."""
        check_timeout(timeout)
        if not self._delivery.done:
            self._check_thread()
        if not self._delivery.wait(timeout):
            raise TimeoutError(f"request {self.request_id!r} is not finished after {timeout} s")
        if self._delivery.error is not None:
            raise self._delivery.error
        if self._output is None:
            self._output = request_output(self._delivery.request, self._tokenizer)
        return self._output

    async def result_async(self) -> RequestOutput:
        """Do as `result()` for asyncio: the event loop goes on meanwhile. Cancelling it cancels the request."""
        if not self._delivery.done:
            self._check_thread()
        try:
            await self._delivery.wait_async()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once: in the thread that ends the request, or here if it has ended. It must not wait."""
        self._delivery.when_done(callback)

    def reader(self) -> TokenReader:
        """Return a reader of the tokens, from the first one; it never waits."""
        return TokenReader(self._delivery)

    def __iter__(self) -> Iterator[StreamChunk]:
        """Yield new tokens as they come, from the first one, over all samples; ends with the request."""
        delivery, reader = self._delivery, self.reader()
        try:
            while not reader.ended:
                if not delivery.done:
                    self._check_thread()
                delivery.wait_for_tokens(reader)
                yield from reader.read()
            delivery.wait()
            if delivery.error is not None:
                raise delivery.error
        finally:
            delivery.stop_streaming()


def requests_of(handles: list[RequestHandle]) -> list[Request]:
    """Return the requests of these handles. (An id may belong to another request by now.)"""
    return [handle._delivery.request for handle in handles]


class TokenReader:
    """Reads the tokens of a request as they come, in any thread, one reader at a time."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._open = [(sequence, 0) for sequence in delivery.request.sequences]

    @property
    def ended(self) -> bool:
        """Return whether the last chunk of every sample was read."""
        return not self._open

    @property
    def ready(self) -> bool:
        """Return whether `read` has something to give."""
        return self._delivery.error is not None or any(s.finished or s.num_new_tokens > n for s, n in self._open)

    def read(self) -> list[StreamChunk]:
        """Return what came since the last call, at most one chunk a sample. Raises what failed the request."""
        if self._delivery.error is not None:
            raise self._delivery.error
        chunks: list[StreamChunk] = []
        still_open: list[tuple[Sequence, int]] = []
        for sequence, seen in self._open:
            chunk = new_tokens(sequence, seen)
            if chunk.token_ids or chunk.finished:
                chunks.append(chunk)
            if not chunk.finished:
                still_open.append((sequence, seen + len(chunk.token_ids)))
        self._open = still_open
        return chunks
