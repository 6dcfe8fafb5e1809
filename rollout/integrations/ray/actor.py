"""The side of Ray's actor: a `RolloutWorker` whose calls do not block each other.

Invariants
----------
* Requests wait on the event loop, without a thread each; a call that is cancelled aborts its requests. What
  takes the worker's lock or waits for a sender runs in a thread.
* `health` and `stats` answer whatever the worker is doing.
* Weights come over a link or from a folder, never inside a call.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import distributed as dist

from samebit.rollout.config import RolloutConfig
from samebit.rollout.errors import WorkerStateError
from samebit.rollout.handle import RequestHandle
from samebit.rollout.integrations.ray.links import Sources
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker
from samebit.rollout.worker_core import TAGS
from samebit.weight_sync import SyncReport

MOST_COMMANDS = 32
T = TypeVar("T")


@dataclass(frozen=True)
class Health:
    """`trouble`: why a request would be refused now, None if it would not."""

    pid: int
    weight_version: int
    trouble: str | None


class RolloutActor:
    """Plain class; `start_actor` makes the actor. Its methods are those of `RolloutWorker`."""

    def __init__(self) -> None:
        self._loaded: RolloutWorker | None = None
        self._sources = Sources()
        self._threads = ThreadPoolExecutor(MOST_COMMANDS, "samebit-command")

    async def load(self, model: str | Path, config: RolloutConfig | None = None) -> int:
        """Build the worker from a folder. Apart from `__init__` so that its errors reach the caller as they are."""
        if self._loaded is not None:
            raise WorkerStateError("this actor has a worker already")
        self._loaded = await self._in_thread(lambda: RolloutWorker(model, config=config))
        return self._worker.weight_version

    async def generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        return await _results(self._worker.submit_all(prompts, params))

    async def run(self, prompt: list[int], params: SamplingParams | None, request_id: str) -> RequestOutput:
        """One request under an id by which it can be aborted."""
        return (await _results([self._worker.submit(prompt, params, request_id)]))[0]

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        self._worker.abort(request_ids)

    async def join_group(self, init_method: str, world_size: int, rank: int, backend: str = "gloo") -> None:
        """Make the actor a rank of a new `torch.distributed` group, to receive broadcasts in."""
        await self._in_thread(
            lambda: dist.init_process_group(backend, init_method=init_method, world_size=world_size, rank=rank)
        )

    async def receive_weights(
        self,
        source: object = None,
        *,
        version: int | None = None,
        in_flight: str = "keep",
        partial: bool = False,
        cast: bool = False,
        verify: bool = False,
    ) -> SyncReport:
        def receive() -> SyncReport:
            with self._sources.opened(source) as opened:
                return self._worker.receive_weights(
                    opened, version=version, in_flight=in_flight, partial=partial, cast=cast, verify=verify
                )

        return await self._in_thread(receive)

    async def sleep(self, tags: str | Iterable[str] = TAGS, level: int = 1) -> None:
        await self._in_thread(lambda: self._worker.sleep(tags, level))

    async def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        await self._in_thread(lambda: self._worker.wake_up(tags))

    async def pause(self) -> None:
        await self._in_thread(self._worker.pause)

    async def resume(self) -> None:
        await self._in_thread(self._worker.resume)

    async def reset_prefix_cache(self) -> None:
        await self._in_thread(self._worker.reset_prefix_cache)

    async def stats(self) -> dict[str, float]:
        return self._worker.stats()

    async def health(self) -> Health:
        if self._loaded is None:
            return Health(os.getpid(), 0, "no model is loaded yet")
        return Health(os.getpid(), self._loaded.weight_version, self._loaded.trouble())

    async def close(self) -> None:
        """Stop the worker and leave the group; the process stays until the actor is ended."""
        if self._loaded is not None:
            await self._in_thread(self._loaded.close)
        self._sources.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _worker(self) -> RolloutWorker:
        if self._loaded is None:
            raise WorkerStateError("no model is loaded yet")
        return self._loaded

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


async def _results(handles: list[RequestHandle]) -> list[RequestOutput]:
    """Wait for all; if one fails, or the wait is cancelled, abort the others."""
    results: list[RequestOutput] = []
    try:
        for handle in handles:
            results.append(await handle.result_async())
    finally:
        for handle in handles[len(results) :]:
            handle.cancel()
    return results
