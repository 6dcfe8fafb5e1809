"""Stand for a call that runs in an actor: wait for its result, or cancel it."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

import ray

from samebit.rollout.checks import check_timeout
from samebit.rollout.integrations.ray.calls import wait_for, wait_for_async
from samebit.rollout.outputs import RequestOutput

T = TypeVar("T")


class RayCall(Generic[T]):
    """Stands for requests that were submitted to an actor in one call, which knows it by its ticket."""

    def __init__(self, actor: Any, ticket: str, reference: ray.ObjectRef[T]) -> None:
        self.ticket = ticket
        self._actor = actor
        self._reference = reference

    @property
    def done(self) -> bool:
        return bool(ray.wait([self._reference], timeout=0)[0])

    def cancel(self) -> None:
        """Abort the requests; `result()` then gives what they had, with finish_reason "abort"."""
        if not self.done:
            wait_for(self._actor.cancel.remote(self.ticket))

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end. Raises what failed a request, `WorkerLostError`, or TimeoutError (it goes on)."""
        check_timeout(timeout)
        return wait_for(self._reference, timeout)

    async def result_async(self) -> T:
        """Do as `result()` for asyncio. Cancelling it cancels the requests."""
        try:
            return await wait_for_async(self._reference)
        except asyncio.CancelledError:
            self.leave()
            raise

    def leave(self) -> None:
        """Abort the requests, unless they have ended, without waiting for the actor: nobody wants their results."""
        if not self.done:
            self._actor.cancel.remote(self.ticket)


class RayRequestHandle(RayCall[RequestOutput]):
    """Stands for one request that was submitted to an actor."""

    def __init__(self, actor: Any, request_id: str, ticket: str, reference: ray.ObjectRef[RequestOutput]) -> None:
        super().__init__(actor, ticket, reference)
        self.request_id = request_id
