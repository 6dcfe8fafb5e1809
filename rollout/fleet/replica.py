"""Run the side of a replica: a worker that tells its fleet's front what it has cached and what it has sampled.

Invariants
----------
* One feed is open at a time, and holds everything since the one before: tokens at once, what is cached and the numbers
  at most twenty times a second. A step costs the generation thread at most one call into the loop, and none while there
  is nothing to tell.
* No thread waits for the reader of a feed: the journal is bounded, and tokens stay in their sequences.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from samebit.rollout.async_worker import AsyncWorker, remember, started
from samebit.rollout.control.delivery import RequestHandle, TokenReader
from samebit.rollout.errors import WorkerStateError
from samebit.rollout.fleet.arrivals import Arrivals
from samebit.rollout.fleet.port import Feed, Introduction, Offer, ReplicaState, Streamed
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.publishing.journal import CacheJournal, CacheSnapshot
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker
from samebit.weight_sync import BroadcastSender, SyncReport, WeightStream, gloo_group, listening_store

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from samebit.rollout.adapters.loading import AdapterKeywords

HEARTBEAT = 1.0
CALM = 0.05


class ReplicaSide(AsyncWorker):
    """Offers what `ReplicaPort` carries. Everything but `_stepped` happens on its event loop."""

    _journal: CacheJournal | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _stamp = 0
    _told = True

    async def begin(self, incarnation: int, host: str = "127.0.0.1") -> Introduction:
        """Join a fleet: begin to note what is cached. host: where others reach this process.

        Raises:
            WorkerStateError: it has begun already.
        """
        worker = self.rollout
        if self._journal is not None:
            raise WorkerStateError("this replica belongs to a fleet already")
        self._host = host
        self._arrivals = Arrivals()
        self._handles: dict[int, RequestHandle] = {}
        self._awaited: dict[int, None] = {}
        self._readers: dict[int, tuple[str, TokenReader]] = {}
        self._something = asyncio.Event()
        self._reading: dict[str, asyncio.Future[SyncReport]] = {}
        self._loop = asyncio.get_running_loop()
        self._journal = await self.in_thread(lambda: worker.open_cache_journal(incarnation))
        worker.after_steps(self._stepped)
        names = tuple(worker.adapters)
        return Introduction(os.getpid(), worker.limits, worker.eos_token_ids, names, await self.state())

    @property
    def rollout(self) -> RolloutWorker:
        """Return the worker. Raises `WorkerStateError` before a model is loaded."""
        worker = self.worker
        if not isinstance(worker, RolloutWorker):
            raise WorkerStateError(f"a replica runs a RolloutWorker, not a {type(worker).__name__}")
        return worker

    async def run_followed(
        self, prompt: list[int], params: SamplingParams, request_id: str, run: int, number: int
    ) -> RequestOutput:
        """Generate one request, whose tokens the feeds hold once it is followed. run: names this call, never another
        one, for `follow` and `cancel`: an id may come again. number: counts the calls to this replica.
        """
        with self._arrivals.queueing(number):
            prepared = await self.prepare(params)
            handle = self._handles[run] = self._runs[run] = self.rollout.submit(prompt, params, request_id)
            del prepared
        try:
            self._catch_up(run, handle)
            if run in self._awaited:
                del self._awaited[run]
                await self.follow(run)
            return await handle.result_async()
        finally:
            del self._handles[run], self._runs[run]

    async def settle(self, number: int) -> None:
        """Wait until all requests up to this number of `run_followed` are queued, or refused."""
        await self._arrivals.until_over(number)

    async def follow(self, run: int) -> None:
        """Let the feeds hold the tokens of a request, from its first one; one that has ended needs none. This may come
        before the request, as `cancel` may.
        """
        handle = self._handles.get(run)
        if handle is None:
            remember(self._awaited, run, None)
            return
        self._readers.setdefault(run, (handle.request_id, handle.reader()))
        self._something.set()

    async def feed(self) -> Feed:
        """Wait until there is something to tell, or a second has passed."""
        self._told = False  # first: a step that ends from here on is noticed
        if not self._has_news():
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._something.wait(), HEARTBEAT)
        if not self._tokens_are_ready():
            await asyncio.sleep(CALM)
        self._something.clear()
        self._told = True
        journal, news = self._opened(), []
        while (message := journal.take()) is not None:
            news.append(message)
        return Feed(await self.state(), self.rollout.stats(), news, self._new_tokens())

    async def snapshot(self) -> CacheSnapshot:
        journal = self._opened()
        return await self.in_thread(lambda: self.rollout.cache_snapshot(journal))

    async def state(self) -> ReplicaState:
        """Say how the worker is now."""
        worker = self.rollout
        self._stamp += 1
        return ReplicaState(
            self._stamp, worker.weight_version, worker.has_weights, worker.trouble(), _broken(worker), worker.paused,
            tuple(worker.sleeping),
        )  # fmt: skip

    async def load_adapter(self, name: str, source: object, **options: Unpack[AdapterKeywords]) -> SyncReport:
        """Read an adapter of the fleet, once: what loads it and what brings this replica up may both ask."""
        reading = self._reading.get(name)
        if reading is None:
            reading = self._reading[name] = asyncio.ensure_future(super().load_adapter(name, source, **options))
        return await asyncio.shield(reading)

    async def forget_adapter(self, name: str, in_flight: str) -> None:
        """Drop an adapter, if it is there: a load of the fleet may have failed here, or not be over yet."""
        reading = self._reading.pop(name, None)
        if reading is not None:
            await asyncio.wait((reading,))
        if name in self.rollout.adapters:
            await self.drop_adapter(name, in_flight=in_flight)

    async def offer_weights(self, timeout: float) -> Offer:
        """Give the weights, as they are, to the one process that joins the group."""
        worker = self.rollout
        if not worker.has_weights:
            raise WorkerStateError("this replica has no weights to give: they sleep, or are incomplete")
        store = listening_store(self._host)

        def give() -> None:
            with BroadcastSender(gloo_group(store, 0, 2, timeout=timeout), timeout=timeout) as sender:
                sender.send(WeightStream.of(worker.module))

        started(give)  # who joins hears of its failure
        return Offer(self._host, store.port)

    # -- parts -------------------------------------------------------------------------------------

    def _opened(self) -> CacheJournal:
        if self._journal is None:
            raise WorkerStateError("this replica belongs to no fleet")
        return self._journal

    def _stepped(self) -> None:
        """Note that a step has ended. In the thread that commits it."""
        if not self._told and self._loop is not None and self._has_news():
            self._told = True
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._something.set)

    def _has_news(self) -> bool:
        return self._opened().pending or self._tokens_are_ready()

    def _tokens_are_ready(self) -> bool:
        return any(reader.ready for _, reader in list(self._readers.values()))

    def _new_tokens(self) -> list[Streamed]:
        """Take what is new. A request that has failed, or ended, is followed no longer: its result tells the rest."""
        found = []
        for run, (name, reader) in list(self._readers.items()):
            if run not in self._handles:
                del self._readers[run]
            elif reader.ready:
                with suppress(Exception):  # boundary: the request's own result raises it
                    found.append(Streamed(name, run, reader.read()))
        return found


def _broken(worker: RolloutWorker) -> str | None:
    """Say why a worker will compute nothing any more, None if it may."""
    try:
        worker.check_usable()
    except WorkerStateError as error:
        return str(error)
    return None
