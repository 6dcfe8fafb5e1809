"""Make a fleet whose replicas are workers in this process, over a runner that computes nothing; each can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from samebit.rollout import RolloutConfig, RolloutWorker, WorkerLostError
from samebit.rollout.cache import build_cache
from samebit.rollout.control.weights.worker_weights import WorkerWeights
from samebit.rollout.engine.engine import Engine
from samebit.rollout.fleet.fleet import Fleet
from samebit.rollout.fleet.options import FleetOptions
from samebit.rollout.fleet.port import Feed, Introduction
from samebit.rollout.fleet.replica import ReplicaSide
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.publishing.journal import CacheSnapshot
from samebit.rollout.sampling_params import SamplingParams
from samebit.weight_sync.transports.addresses import Sources

from ..conftest import FakeRunner, TinyModule, worker_parts

T = TypeVar("T")
BLOCK = 4


class LocalPort:
    """Calls a replica on the fleet's own loop. `kill` ends what waits, as the death of a process does."""

    def __init__(self, side: ReplicaSide, runner: FakeRunner) -> None:
        self.side = side
        self.runner = runner
        self.commands: list[str] = []
        self.mute: asyncio.Event | None = None
        self.loses = False
        self.lost = 0
        self._dead = False
        self._waiting: set[asyncio.Task[Any]] = set()

    def kill(self, loop: asyncio.AbstractEventLoop) -> None:
        self._dead = True
        loop.call_soon_threadsafe(lambda: [task.cancel("killed") for task in self._waiting])

    async def begin(self, incarnation: int) -> Introduction:
        return await self._call(self.side.begin(incarnation))

    async def run(
        self, prompt: list[int], params: SamplingParams, request_id: str, run: int, number: int
    ) -> RequestOutput:
        return await self._call(self.side.run_followed(prompt, params, request_id, run, number))

    async def feed(self) -> Feed:
        if self.mute is not None:
            await self._call(self.mute.wait())
        feed = await self._call(self.side.feed())
        if self.loses and feed.tokens:
            self.lost += 1
            return replace(feed, tokens=[])
        return feed

    async def snapshot(self) -> CacheSnapshot:
        return await self._call(self.side.snapshot())

    async def command(self, name: str, *args: Any, **options: Any) -> Any:
        self.commands.append(name)
        return await self._call(getattr(self.side, name)(*args, **options))

    async def stop(self) -> None:
        self._dead = True
        gate, self.runner.gate = self.runner.gate, None
        if gate is not None:
            gate.release(1000)
        for task in list(self._waiting):
            task.cancel("killed")
        await self.side.close()

    async def _call(self, work: Awaitable[T]) -> T:
        if self._dead:
            asyncio.ensure_future(work).cancel()
            raise WorkerLostError("the replica was killed")
        task = asyncio.ensure_future(work)
        self._waiting.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._dead:
                raise WorkerLostError("the replica was killed") from None
            raise
        finally:
            self._waiting.discard(task)


class LocalFleet:
    """Holds a fleet with the ports of its replicas, those that live now and all that ever did. It makes no pauses
    between the starts of a replica."""

    def __init__(self, replicas: int = 3, prepare: Callable[[LocalPort], None] | None = None, **options: Any) -> None:
        self.ports: dict[str, LocalPort] = {}
        self.started: list[str] = []
        self.refuse: Exception | None = None
        self._prepare = prepare
        self.config = RolloutConfig(max_num_seqs=8, num_blocks=64, block_size=BLOCK, max_model_len=64, seed=5)
        self.fleet = Fleet(
            self._start, replicas, config=self.config, options=FleetOptions(**{"restart_seconds": 1e-6} | options)
        )

    def _start(self, name: str, config: RolloutConfig) -> LocalPort:
        self.started.append(name)
        if self.refuse is not None:
            raise self.refuse
        assert config.num_blocks is not None
        cache = build_cache(config.num_blocks, BLOCK, config.max_num_seqs, 64, digest_key=config.digest_key)
        runner = FakeRunner(BLOCK)
        engine = Engine(runner, cache, 32)
        runner.current_version = lambda: engine.weight_version
        runner.budget = lambda: 32
        parts = worker_parts(engine, WorkerWeights(TinyModule(), shared=False), config=config)
        port = LocalPort(ReplicaSide(Sources(), RolloutWorker.over(parts)), runner)
        if self._prepare is not None:
            self._prepare(port)
        self.ports[name] = port
        return port

    def kill(self, name: str) -> None:
        self.ports[name].kill(self.fleet._crew.background.loop)

    def busy(self) -> list[str]:
        """Return the replicas that have a request in flight."""
        return [name for name, load in self.fleet._crew.router.loads().items() if load]

    def __enter__(self) -> LocalFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.close()
