"""Run the side of Ray's actor: a `RolloutWorker` whose calls do not block each other (`AsyncWorker`).

Invariants
----------
* `health` answers whatever the worker is doing.
* What one `RayWorker` submits is queued in the order in which it did: the ordinal of a request without a seed, and with
  it its random numbers, are those that a worker in the caller's process would give it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import distributed as dist

from samebit.rollout.async_worker import AsyncWorker
from samebit.rollout.config import RolloutConfig
from samebit.rollout.integrations.ray.order import Lines, Place
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.requests.prompt_with_images import GivenPrompt
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker
from samebit.weight_sync.transports.addresses import Sources


@dataclass(frozen=True)
class Health:
    """Says how a worker is; `trouble` is why a request would be refused now, None if it would not."""

    pid: int
    weight_version: int
    trouble: str | None


class RolloutActor(AsyncWorker):
    """Answers calls over Ray. It is a plain class; `start_actor` makes the actor. Its methods are those of
    `RolloutWorker`."""

    def __init__(self) -> None:
        super().__init__(Sources())
        self._lines = Lines()

    async def load(self, model: str | Path, config: RolloutConfig | None = None) -> int:
        """Build the worker from a folder. Apart from `__init__` so that its errors reach the caller as they are."""
        return (await self.build(lambda: RolloutWorker(model, config=config))).weight_version

    async def run_in_turn(
        self, place: Place, prompt: GivenPrompt, params: SamplingParams | None, request_id: str, ticket: str
    ) -> RequestOutput:
        """Do as `run`, after what its client submitted before is queued."""
        async with self._lines.of(place.client).turn(place.number):
            call = await self.queue(prompt, params, request_id, ticket)
        (output,) = await self.ended(call)
        return output

    async def generate_in_turn(
        self,
        place: Place,
        prompts: Sequence[GivenPrompt],
        params: SamplingParams | list[SamplingParams] | None,
        ticket: str,
    ) -> list[RequestOutput]:
        """Do as `generate`, after what its client submitted before is queued."""
        async with self._lines.of(place.client).turn(place.number):
            call = await self.queue_all(prompts, params, ticket)
        return await self.ended(call)

    async def until_queued(self, place: Place) -> None:
        """Wait until a client's submissions up to this one are queued, or refused."""
        await self._lines.of(place.client).until_over(place.number)

    async def join_group(self, init_method: str, world_size: int, rank: int, backend: str = "gloo") -> None:
        """Make the actor a rank of a new `torch.distributed` group, to receive broadcasts in."""
        await self.in_thread(
            lambda: dist.init_process_group(backend, init_method=init_method, world_size=world_size, rank=rank)
        )

    async def health(self) -> Health:
        if self._loaded is None:
            return Health(os.getpid(), 0, "no model is loaded yet")
        return Health(os.getpid(), self._loaded.weight_version, self._loaded.trouble())

    async def close(self) -> None:
        """Stop the worker and leave the group; the process stays until the actor is ended."""
        await super().close()
        if dist.is_initialized():
            dist.destroy_process_group()
