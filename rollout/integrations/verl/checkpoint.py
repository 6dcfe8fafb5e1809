"""samebit's broadcast as verl's checkpoint engine: `rollout.checkpoint_engine.backend=samebit`, for servers with
resources of their own.

Rank 0 of the trainer sends straight to the servers; the worker that verl puts beside each server only tells it where.

Invariants
----------
* Every sync has a group of its own: servers may come and go between two.
* All ranks of the trainer go through the weights: gathering a sharded tensor is a collective.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, CheckpointEngineWorker

from samebit.rollout.integrations.ray import BroadcastGroup
from samebit.rollout.integrations.verl.plugin import NAME
from samebit.weight_sync import BroadcastSender, WeightStream, gloo_group, listening_store
from samebit.weight_sync.link import DEFAULT_TIMEOUT, check_timeout


class SamebitCheckpointEngine(CheckpointEngine):
    """One per rank of the trainer and per server.

    bucket_size: bytes that travel at once. timeout: the longest wait for another rank, in seconds
    (`checkpoint_engine.engine_kwargs.samebit.timeout`).
    """

    wire_format = NAME

    def __init__(self, bucket_size: int, is_master: bool = False, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._bucket_bytes = bucket_size
        self._is_master = is_master
        self._timeout = check_timeout(timeout)
        self._store: TCPStore | None = None
        self._place: BroadcastGroup | None = None

    def prepare(self) -> dict[str, Any]:
        """Where the ranks of this sync meet, said by rank 0 of the trainer."""
        if not self._is_master:
            return {}
        self._store = listening_store(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return {"host": self._store.host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The arguments of each rank's `init_process_group`; trainer ranks but the first are in no group."""
        meeting = {"size": rollout_world_size + 1, **metadata[0]}

        def all_of(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, **{name: [value] * len(ranks) for name, value in meeting.items()}}

        return all_of([0] + [-1] * (actor_wg_world_size - 1)), all_of(list(range(1, rollout_world_size + 1)))

    def init_process_group(self, rank: int, size: int, host: str, port: int) -> None:
        """Only note it: rank 0 and the servers join when the weights go."""
        self._place = BroadcastGroup(host, port, rank, size, self._timeout)

    def finalize(self) -> None:
        self._store = self._place = None

    async def send_weights(self, weights: WeightStream, global_steps: int | None = None) -> dict[str, float]:
        """Send, or on other ranks than the first, take part in the gathering."""
        return await asyncio.to_thread(self._send, weights)

    def _send(self, weights: WeightStream) -> dict[str, float]:
        if self._store is None or self._place is None:
            weights.exhaust()
            return {}
        group = gloo_group(self._store, 0, self._place.size, timeout=self._timeout)
        with BroadcastSender(group, bucket_bytes=self._bucket_bytes, timeout=self._timeout) as sender:
            report = sender.send(weights)
        return {"samebit/broadcast_seconds": report.seconds, "samebit/broadcast_bytes": float(report.sent_bytes)}

    def receive_weights(self, global_steps: int | None = None) -> BroadcastGroup:
        """No weights, but where the server gets them; for `SamebitRollout.update_weights`."""
        if self._place is None:
            raise RuntimeError("receive_weights before init_process_group")
        return self._place


class SamebitCheckpointWorker(CheckpointEngineWorker):
    """verl's worker beside a server, in a process that has to know the backend first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register()
        super().__init__(*args, **kwargs)


def register() -> None:
    """Make the backend known in this process."""
    CheckpointEngineRegistry.register(NAME)(SamebitCheckpointEngine)
