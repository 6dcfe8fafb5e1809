"""Make samebit's broadcast verl's checkpoint engine, for servers with resources of their own:
`rollout.checkpoint_engine.backend=samebit`.

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
from samebit.rollout.integrations.verl.names import NAME
from samebit.rollout.integrations.verl.options import sync_timeout
from samebit.weight_sync import BroadcastSender, WeightStream, gloo_group, listening_store
from samebit.weight_sync.wire.link import DEFAULT_TIMEOUT
from samebit.weight_sync.wire.stream import gone_through


class SamebitCheckpointEngine(CheckpointEngine):
    """Sends or takes the weights of one rank of the trainer or one server.

    bucket_size: bytes that travel at once. timeout: of a server's updates, in seconds (`custom.sync_timeout`); the
    ranks of the trainer take it over from the servers.
    """

    wire_format = NAME

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.timeout = DEFAULT_TIMEOUT
        self._bucket_bytes = bucket_size
        self._is_master = is_master
        self._store: TCPStore | None = None
        self._place: BroadcastGroup | None = None

    def prepare(self) -> dict[str, Any]:
        """Return how long to wait for peers; and from rank 0 of the trainer, where the ranks of this sync meet."""
        if not self._is_master:
            return {"timeout": self.timeout}
        self._store = listening_store(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return {"timeout": self.timeout, "host": self._store.host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of each rank's `init_process_group`; trainer ranks but the first are in no group.

        metadata: of `prepare`, the trainer's ranks first. All wait as long as the last, a server, says.
        """
        meeting = {**metadata[0], "size": rollout_world_size + 1, "timeout": metadata[-1]["timeout"]}

        def all_of(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, **{name: [value] * len(ranks) for name, value in meeting.items()}}

        return all_of([0] + [-1] * (actor_wg_world_size - 1)), all_of(list(range(1, rollout_world_size + 1)))

    def init_process_group(self, rank: int, size: int, host: str, port: int, timeout: float) -> None:
        """Note where the group meets: rank 0 and the servers join when the weights go."""
        self._place = BroadcastGroup(host, port, rank, size, timeout)

    def finalize(self) -> None:
        self._store = self._place = None

    async def send_weights(self, weights: WeightStream, global_steps: int | None = None) -> dict[str, float]:
        """Send, or on other ranks than the first, take part in the gathering."""
        return await asyncio.to_thread(self._send, weights)

    def _send(self, weights: WeightStream) -> dict[str, float]:
        if self._store is None or self._place is None:
            weights.exhaust()
            return {}
        timeout = self._place.timeout
        with gone_through(weights):  # a server may be missing, and the trainer's other ranks are gathering already
            group = gloo_group(self._store, 0, self._place.size, timeout=timeout)
            with BroadcastSender(group, bucket_bytes=self._bucket_bytes, timeout=timeout) as sender:
                report = sender.send(weights)
        return {"samebit/broadcast_seconds": report.seconds, "samebit/broadcast_bytes": float(report.sent_bytes)}

    def receive_weights(self, global_steps: int | None = None) -> BroadcastGroup:
        """Return no weights, but where the server gets them; for `SamebitRollout.update_weights`."""
        if self._place is None:
            raise RuntimeError("receive_weights before init_process_group")
        return self._place


class SamebitCheckpointWorker(CheckpointEngineWorker):
    """Makes the backend known in its process, and is then verl's worker beside a server."""

    def __init__(self, rollout_config: Any, *args: Any, **kwargs: Any) -> None:
        register()
        super().__init__(rollout_config, *args, **kwargs)
        if isinstance(self.checkpoint_engine, SamebitCheckpointEngine):
            self.checkpoint_engine.timeout = sync_timeout(rollout_config.custom)


def register() -> None:
    """Make the backend known in this process."""
    CheckpointEngineRegistry.register(NAME)(SamebitCheckpointEngine)
