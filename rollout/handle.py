"""How a result travels from the generation thread to whoever waits for it.

Invariants
----------
* `Delivery` ends exactly once, with the request or with an error; whoever waits is woken then.
* The generation thread touches a delivery when its request ends, and after a step only while someone
  streams from it. The lists of a result are built in the caller's thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from samebit.kernels.openmp import release_idle_threads
from samebit.rollout.outputs import RequestOutput, request_output
from samebit.rollout.request import Request, Sequence
from samebit.rollout.stopping import Tokenizer


@dataclass(frozen=True)
class StreamChunk:
    """New tokens of one sample; `finished` is True on its last chunk (which may be empty)."""

    sample: int
    token_ids: list[int]
    logprobs: list[float]
    finished: bool
    finish_reason: str | None


class Delivery:
    """The generation thread's end: a request on its way to its caller."""

    def __init__(self, request: Request, streams: set[Delivery]) -> None:
        self.request = request
        self.error: Exception | None = None
        self.done = False
        self._streams = streams
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[], None]] = []

    def finish(self, error: Exception | None = None) -> None:
        """The request ended; the first call counts."""
        with self._changed:
            if not self.done:
                self.error = error
                self.done = True
            self._changed.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call it once, in the thread that ends the request, or here if that has happened. It must not wait."""
        with self._changed:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def notify(self) -> None:
        """A step went by: let streams look for new tokens."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        if not self.done:
            release_idle_threads()
        with self._changed:
            return self._changed.wait_for(lambda: self.done, timeout)

    def wait_for_tokens(self, sequences: list[Sequence], seen: list[int]) -> None:
        """Until a sequence has more tokens than `seen` says, or has finished, or all is done."""
        self._streams.add(self)
        release_idle_threads()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.done or any(s.finished or s.num_new_tokens > n for s, n in zip(sequences, seen, strict=True))
                )
            )

    def stop_streaming(self) -> None:
        self._streams.discard(self)


class RequestHandle:
    """The caller's end. Safe to use from several threads."""

    def __init__(
        self,
        delivery: Delivery,
        tokenizer: Tokenizer | None,
        cancel: Callable[[str], None],
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
        self._cancel(self.request_id)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. Raises what failed the request, or TimeoutError (the request goes on)."""
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
        """`result()` for asyncio: the event loop goes on meanwhile. Cancelling it cancels the request."""
        if not self._delivery.done:
            self._check_thread()
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        self._delivery.when_done(lambda: _wake(loop, ended))
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()

    def __iter__(self) -> Iterator[StreamChunk]:
        """New tokens as they come, from the first one, over all samples; ends with the request."""
        delivery = self._delivery
        open_sequences = list(delivery.request.sequences)
        seen = [0] * len(open_sequences)
        try:
            while open_sequences:
                if not delivery.done:
                    self._check_thread()
                delivery.wait_for_tokens(open_sequences, seen)
                if delivery.error is not None:
                    raise delivery.error
                still_open: list[Sequence] = []
                counts: list[int] = []
                for sequence, count in zip(open_sequences, seen, strict=True):
                    chunk = _new_tokens(sequence, count)
                    if chunk.token_ids or chunk.finished:
                        yield chunk
                    if not chunk.finished:
                        still_open.append(sequence)
                        counts.append(count + len(chunk.token_ids))
                open_sequences, seen = still_open, counts
            delivery.wait(None)
            if delivery.error is not None:
                raise delivery.error
        finally:
            delivery.stop_streaming()


def _wake(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    """From another thread. In a loop that was closed meanwhile (RuntimeError) nobody waits any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(ended.set)


def _new_tokens(sequence: Sequence, seen: int) -> StreamChunk:
    """The tokens behind the first `seen`; `finished` is read first, so a last chunk lacks none."""
    finished = sequence.finished
    count = sequence.num_new_tokens
    start = sequence.num_prompt_tokens
    return StreamChunk(
        sample=sequence.sample_index,
        token_ids=sequence.token_ids[start + seen : start + count].tolist(),
        logprobs=sequence.logprobs[seen:count].tolist(),
        finished=finished,
        finish_reason=sequence.finish_reason if finished else None,
    )
