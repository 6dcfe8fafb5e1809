"""Say what a server needs of what it serves: one worker, or a fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from samebit.rollout.config import RolloutConfig
from samebit.rollout.fleet.fleet import Fleet
from samebit.rollout.outputs import StreamChunk
from samebit.rollout.requests.prompt_with_images import GivenPrompt
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker_interface import Handle, LocalWorker


class Reader(Protocol):
    """Reads the tokens of a request as they come."""

    @property
    def ended(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    def read(self) -> list[StreamChunk]: ...


class ServedHandle(Handle, Protocol):
    """Stands for a request that can be streamed."""

    def when_done(self, callback: Callable[[], None]) -> None: ...

    def reader(self) -> Reader: ...


class ServedWorker(LocalWorker, Protocol):
    """Lists what a server asks of a worker or a fleet beside a worker's own calls."""

    @property
    def config(self) -> RolloutConfig: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def submit(
        self, prompt: GivenPrompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> ServedHandle: ...

    def after_steps(self, listener: Callable[[], None]) -> None: ...


def replicas_of(worker: ServedWorker) -> int:
    """Return how many workers there are."""
    return len(worker.replicas) if isinstance(worker, Fleet) else 1


def submitted(
    worker: ServedWorker, prompt: list[int], params: SamplingParams, request_id: str, session: str | None
) -> ServedHandle:
    """Submit a request; a fleet keeps the turns of a session together."""
    if isinstance(worker, Fleet):
        return worker.submit(prompt, params, request_id, session=session)
    return worker.submit(prompt, params, request_id)


def numbers_of(worker: ServedWorker) -> dict[str, dict[str, float]]:
    """Return the statistics of each replica by its name, "0" for a single worker; no replica is asked."""
    if isinstance(worker, Fleet):
        return worker.replica_stats()
    return {"0": worker.stats()}
