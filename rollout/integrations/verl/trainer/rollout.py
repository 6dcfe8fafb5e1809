"""Drive a rollout server from the trainer: its weights and its memory. verl makes one in every trainer process, and one
beside each server that has resources of its own.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
from verl.utils.device import get_device_name
from verl.workers.rollout.base import BaseRollout

from samebit.rollout.integrations.ray import BroadcastGroup, RayWorker, wait_for_async
from samebit.rollout.integrations.verl.names import ADAPTER, server_name
from samebit.rollout.integrations.verl.options import sync_timeout
from samebit.weight_sync import SyncReport, WeightStream


class SamebitRollout(BaseRollout):
    """Drives the server beside a rank of the trainer: what verl calls the rollout. `device_mesh` is None beside a
    STANDALONE server."""

    is_leader_rank = True

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._found: Any = None
        self._client: RayWorker | None = None

    async def resume(self, tags: list[str]) -> None:
        await wait_for_async(self._server.wake_up.remote(tags=tags))

    async def release(self) -> None:
        await wait_for_async(self._server.sleep.remote())

    async def update_weights(
        self,
        weights: WeightStream | BroadcastGroup,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        base_sync_done: bool = True,
    ) -> None:
        """Send all weights to the server, or those of the adapter that is trained, or tell it where they come from.
        What its prefix cache has of the weights before them is not hit again.

        weights: of `SamebitEngine`, through shared memory or, on a GPU, its own (CUDA IPC); or the group of
        `SamebitCheckpointEngine`. base_sync_done: False when the model of an adapter comes, which happens once, and
        always before the adapter.
        """
        if not isinstance(weights, WeightStream | BroadcastGroup):
            raise _unknown(weights, wire_format)
        adapted = self.model_config.lora_rank > 0 and base_sync_done
        report = await self._update(weights, adapted)
        if global_steps is not None and base_sync_done:
            await wait_for_async(self._server.set_global_steps.remote(report.version, global_steps))

    async def _update(self, weights: WeightStream | BroadcastGroup, adapted: bool) -> SyncReport:
        if isinstance(weights, WeightStream):
            worker = self._worker
            if adapted:
                return await asyncio.to_thread(lambda: worker.load_adapter(ADAPTER, weights, autocast=False))
            return await asyncio.to_thread(worker.receive_weights, weights)
        if adapted:
            loaded: SyncReport = await wait_for_async(
                self._server.load_adapter.remote(ADAPTER, weights, autocast=False)
            )
            return loaded
        report: SyncReport = await wait_for_async(self._server.receive_weights.remote(weights))
        return report

    @property
    def _server(self) -> Any:
        """Return the server, found when it is first needed: verl starts it after this object."""
        if self._found is None:
            self._found = ray.get_actor(server_name(self.replica_rank))
        return self._found

    @property
    def _worker(self) -> RayWorker:
        if self._client is None:
            timeout = sync_timeout(self.config.custom)
            self._client = RayWorker(self._server, sync_timeout=timeout, device=get_device_name())
        return self._client


def _unknown(weights: object, wire_format: str) -> TypeError:
    return TypeError(
        "samebit takes weights from its own engine (model.fused_kernel_options.impl_backend=samebit) and, for "
        "servers with resources of their own, over its own transport (rollout.checkpoint_engine.backend=samebit); "
        f"got a {type(weights).__name__} as {wire_format!r}"
    )
