"""Bound what waits: a request is let in as a whole, or answered 429 at once.

Invariant: samples inside are at most what runs at once and `max_waiting` more; a request that would not fit an empty
server is refused for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from samebit.rollout.async_worker import Preparing
from samebit.rollout.integrations.http.errors import ApiError
from samebit.rollout.integrations.http.served import ServedWorker
from samebit.rollout.sampling_params import SamplingParams


class Admission:
    """Counts the samples of the requests inside. Everything happens on the event loop."""

    def __init__(self, running: int, waiting: int) -> None:
        self._preparing = Preparing()
        self.most = running + waiting
        self.inside = 0
        self.refused = 0

    async def prepare(self, worker: ServedWorker, params: SamplingParams, samples: int) -> object:
        """Let a request in for as long as what it is constrained to is compiled, beside the event loop; return what
        keeps it so.

        Raises:
            ApiError: as `enter` does.
            RequestError: it can not be compiled.
        """
        with self.enter(samples):
            return await self._preparing.prepare(worker, params)

    @contextmanager
    def enter(self, samples: int) -> Iterator[None]:
        """Let a request with this many samples in for the length of the block.

        Raises:
            ApiError: 429 when it does not fit now, 400 when it never will.
        """
        if samples > self.most:
            raise ApiError(400, f"the request asks for {samples} samples; at most {self.most} fit here", param="n")
        if self.inside + samples > self.most:
            self.refused += 1
            raise ApiError(
                429,
                f"{self.inside} samples run or wait, and at most {self.most} may; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.inside += samples
        try:
            yield
        finally:
            self.inside -= samples
