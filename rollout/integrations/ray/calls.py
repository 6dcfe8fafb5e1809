"""Wait for an actor: what comes back is its result, its own error, or `WorkerLostError`.

Invariant: no call waits for an actor whose process has died. Ray notices that when the connection to it breaks, in
milliseconds, and ends every call that waits (a whole machine that vanishes takes as long as Ray's health checks).
"""

from __future__ import annotations

from typing import NoReturn, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from samebit.rollout.errors import WorkerLostError

T = TypeVar("T")


def wait_for(reference: ray.ObjectRef[T], timeout: float | None = None) -> T:
    """Return the result of a call. Raises its error, `WorkerLostError`, or `TimeoutError` (the call goes on)."""
    try:
        return ray.get(reference, timeout=timeout)
    except GetTimeoutError as error:
        raise TimeoutError(f"the actor did not answer within {timeout} s") from error
    except (RayTaskError, RayActorError) as error:
        _raise(error)


async def wait_for_async(reference: ray.ObjectRef[T]) -> T:
    """Do as `wait_for` for asyncio."""
    try:
        return await reference
    except (RayTaskError, RayActorError) as error:
        _raise(error)


def lost_worker(error: RayActorError) -> WorkerLostError:
    """Return the error that a dead actor means to its callers."""
    reason = " ".join(str(error).split())
    return WorkerLostError(f"the rollout worker's actor died, and what it was generating is lost: {reason}")


def _raise(error: RayTaskError | RayActorError) -> NoReturn:
    if isinstance(error, RayActorError):
        raise lost_worker(error) from error
    if isinstance(error.cause, Exception):
        raise error.cause from error
    raise error
