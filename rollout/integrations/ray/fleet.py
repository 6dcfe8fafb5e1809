"""Put a fleet's replicas into actors of Ray: `RayFleet`.

Invariants
----------
* The fleet's digest key is pickled in one call, the one that loads a replica's model.
* All replicas read the commit that was found when the fleet was started, whenever they are started themselves.
* The actors belong to the process that started them: when that ends, however it ends, Ray ends them.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from samebit.rollout.adapters.pinned import Pinned
from samebit.rollout.async_worker import read_for_grammars
from samebit.rollout.checks import check_bool, check_positive_int
from samebit.rollout.config import RolloutConfig
from samebit.rollout.fleet.fleet import Fleet
from samebit.rollout.fleet.options import FleetOptions
from samebit.rollout.fleet.port import Command, Feed, Introduction
from samebit.rollout.fleet.replica import ReplicaSide
from samebit.rollout.integrations.ray.actor import RolloutActor
from samebit.rollout.integrations.ray.calls import wait_for, wait_for_async
from samebit.rollout.integrations.ray.client import MOST_CALLS, start_actor
from samebit.rollout.integrations.ray.room import check_room, in_a_group
from samebit.rollout.keys.digest_key import handed_over
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.publishing.journal import CacheSnapshot
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker


class FleetActor(ReplicaSide, RolloutActor):
    """Runs a replica in an actor."""

    async def load_pinned(self, model: Pinned, config: RolloutConfig, structured_outputs: bool) -> int:
        """Do as `load` with what the fleet has found; `structured_outputs` as `RayFleet.start` has it."""

        def make() -> RolloutWorker:
            found, revision = model.here()
            worker = RolloutWorker(found, config=replace(config, revision=revision))
            if structured_outputs:
                read_for_grammars(worker)
            return worker

        return (await self.build(make)).weight_version

    async def begin(self, incarnation: int, host: str | None = None) -> Introduction:
        return await super().begin(incarnation, _this_node() if host is None else host)


class RayPort:
    """Carries calls to a `FleetActor`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def begin(self, incarnation: int) -> Introduction:
        told: Introduction = await wait_for_async(self.actor.begin.remote(incarnation))
        return told

    def run(
        self, prompt: list[int], params: SamplingParams, request_id: str, run: int, number: int
    ) -> Awaitable[RequestOutput]:
        return wait_for_async(self.actor.run_followed.remote(prompt, params, request_id, run, number))

    async def feed(self) -> Feed:
        feed: Feed = await wait_for_async(self.actor.feed.remote())
        return feed

    async def snapshot(self) -> CacheSnapshot:
        snapshot: CacheSnapshot = await wait_for_async(self.actor.snapshot.remote())
        return snapshot

    async def command(self, name: Command, *args: Any, **options: Any) -> Any:
        return await wait_for_async(getattr(self.actor, name).remote(*args, **options))

    async def stop(self) -> None:
        ray.kill(self.actor)


class RayFleet(Fleet):
    """Offers the calls of `RolloutWorker` over replicas in actors, behind one router."""

    @classmethod
    def start(
        cls,
        model: str | Path | Pinned,
        *,
        replicas: int,
        config: RolloutConfig | None = None,
        options: FleetOptions | None = None,
        num_cpus: int = 1,
        structured_outputs: bool = False,
        **actor_options: Any,
    ) -> RayFleet:
        """Start the replicas and load a model folder in each. Ray must be running (`ray.init`).

        model: a name of the hub is looked up once, here, unless this is `Pinned` already.
        num_cpus: cores that Ray reserves for each, and threads that it computes with unless the config says.
        structured_outputs: let each read its tokenizer for them before it takes requests. Otherwise its streams stand
        still for that at the first request of them.
        actor_options: Ray's own, as in `.options()`, of each actor.

        Raises:
            ValueError: the cluster has too few cores, or others hold them; what building a `RolloutWorker` raises.
        """
        check_positive_int("replicas", replicas)
        check_positive_int("num_cpus", num_cpus)
        check_bool("structured_outputs", structured_outputs)
        for name in ("name", "max_restarts", "lifetime"):
            if name in actor_options:
                raise ValueError(f"a fleet names, restarts and ends its actors itself: leave out {name}")
        check_room(replicas, num_cpus, reserved=in_a_group(actor_options))
        threads = None if config is None else config.num_threads
        revision = None if config is None else config.revision
        pinned = model if isinstance(model, Pinned) else Pinned.of(model, revision)

        def begin(name: str, inner: RolloutConfig) -> RayPort:
            actor = start_actor(
                FleetActor, num_cpus=num_cpus, num_threads=threads, max_concurrency=MOST_CALLS, **actor_options
            )
            try:
                with handed_over():
                    loading = actor.load_pinned.remote(pinned, inner, structured_outputs)
                wait_for(loading)
            except BaseException:
                ray.kill(actor)
                raise
            return RayPort(actor)

        return cls(begin, replicas, config=config, options=options, host=_this_node())


def _this_node() -> str:
    """Return the address at which other nodes reach this one."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
