"""Hold the caller's end of a request that a fleet runs.

Invariants
----------
* It ends exactly once: with its result, or with an error by name.
* Its streams read tokens as they come, from the first one. What the feeds had not brought when the result came, the
  result brings.
* A stream has no gap: a chunk that does not begin where the one before has ended is a `StreamGapError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from samebit.rollout.checks import check_timeout
from samebit.rollout.errors import StreamGapError
from samebit.rollout.outputs import RequestOutput, SampleOutput, StreamChunk
from samebit.rollout.requests.ending import Ending


class FleetHandle:
    """Stands for a request. Safe to use from several threads."""

    def __init__(
        self,
        request_id: str,
        samples: int,
        cancel: Callable[[FleetHandle], None],
        follow: Callable[[FleetHandle], None],
    ) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._follow = follow
        self._ending = Ending()
        self._output: RequestOutput | None = None
        self.num_samples = samples
        self._seen = [0] * samples
        self._open = set(range(samples))
        self._chunks: list[StreamChunk] = []
        self._followed = False

    @property
    def done(self) -> bool:
        return self._ending.done

    @property
    def streamed(self) -> bool:
        """Return whether tokens were handed to a stream."""
        return bool(self._chunks)

    @property
    def followed(self) -> bool:
        """Return whether the caller streams."""
        return self._followed

    def cancel(self) -> None:
        """Abort the request; `result()` then gives what it had, with finish_reason "abort"."""
        self._cancel(self)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. Raises what failed the request, or TimeoutError (the request goes on)."""
        check_timeout(timeout)
        if not self._ending.wait(timeout):
            raise TimeoutError(f"request {self.request_id!r} is not finished after {timeout} s")
        if self._ending.error is not None:
            raise self._ending.error
        assert self._output is not None
        return self._output

    async def result_async(self) -> RequestOutput:
        """Do as `result()` for asyncio. Cancelling it cancels the request."""
        try:
            await self._ending.wait_async()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once: when the request ends, or here if it has ended. It must not wait."""
        self._ending.when_done(callback)

    def reader(self) -> FleetReader:
        """Return a reader of the tokens, from the first one; it never waits."""
        if not self._followed:
            self._followed = True
            self._follow(self)
        return FleetReader(self)

    def __iter__(self) -> Iterator[StreamChunk]:
        """Yield new tokens as they come, over all samples; ends with the request."""
        reader = self.reader()
        while not reader.ended:
            self._ending.wait_for(lambda: reader.ready)
            yield from reader.read()

    # -- the fleet's side --------------------------------------------------------------------------

    def feed(self, chunks: list[StreamChunk]) -> None:
        """Take new tokens."""
        for chunk in chunks:
            if self.done:
                return
            if chunk.start != self._seen[chunk.sample]:
                self.fail(self._gap(chunk))
                self.cancel()
                return
            self._take(chunk)
        self._ending.notify()

    def finish(self, output: RequestOutput) -> None:
        """End the request with its result."""
        if self.done:
            return
        for sample in output.samples:
            if sample.index in self._open:
                self._take(_rest(sample, self._seen[sample.index]))
        self._output = output
        self._ending.finish()

    def fail(self, error: Exception) -> None:
        """End the request with an error, unless it has ended."""
        self._ending.finish(error)

    def chunks(self, start: int) -> list[StreamChunk]:
        """Return what came, from chunk `start` on. Raises what failed the request."""
        if self._ending.error is not None:
            raise self._ending.error
        return self._chunks[start:]

    @property
    def failed(self) -> bool:
        """Return whether the request has ended with an error."""
        return self._ending.error is not None

    @property
    def num_chunks(self) -> int:
        """Return how many chunks have come."""
        return len(self._chunks)

    def _gap(self, chunk: StreamChunk) -> StreamGapError:
        return StreamGapError(
            f"request {self.request_id!r}, sample {chunk.sample}: tokens from {chunk.start} on have come where those "
            f"from {self._seen[chunk.sample]} on were next; the request was ended"
        )

    def _take(self, chunk: StreamChunk) -> None:
        self._seen[chunk.sample] += len(chunk.token_ids)
        if chunk.finished:
            self._open.discard(chunk.sample)
        self._chunks.append(chunk)


class FleetReader:
    """Reads the tokens of a request as they come, in any thread, one reader at a time."""

    def __init__(self, handle: FleetHandle) -> None:
        self._handle = handle
        self._read = 0
        self._open = handle.num_samples

    @property
    def ended(self) -> bool:
        """Return whether the last chunk of every sample was read."""
        return self._open == 0

    @property
    def ready(self) -> bool:
        """Return whether `read` has something to give."""
        return self._handle.num_chunks > self._read or self._handle.failed

    def read(self) -> list[StreamChunk]:
        """Return what came since the last call. Raises what failed the request."""
        chunks = self._handle.chunks(self._read)
        self._read += len(chunks)
        self._open -= sum(chunk.finished for chunk in chunks)
        return chunks


def _rest(sample: SampleOutput, seen: int) -> StreamChunk:
    """Return the last chunk of a sample of which `seen` tokens were streamed."""
    return StreamChunk(
        sample=sample.index,
        token_ids=sample.token_ids[seen:],
        logprobs=sample.logprobs[seen:],
        finished=True,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        weight_versions=sample.weight_versions,
        top_logprobs=None if sample.top_logprobs is None else sample.top_logprobs[seen:],
        start=seen,
    )
