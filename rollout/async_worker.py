"""Put a worker behind an event loop: what an actor or a server has inside.

Invariants
----------
* Requests wait on the event loop, without a thread each; a call that is cancelled aborts its requests. What takes the
  worker's lock or waits for a sender runs in a thread, which the end of the process does not wait for.
* `stats` and `abort` answer whatever the worker is doing. A grammar is compiled in a thread, and a request without one,
  or with one that is there, is queued before its call waits for anything.
* Weights come over a link or from a folder, never inside a call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from samebit.rollout.adapters.loading import AdapterOptions
from samebit.rollout.control.worker_status import TAGS
from samebit.rollout.errors import RequestError, WorkerStateError
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.requests.prompt_with_images import GivenPrompt
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.structured_outputs.params import StructuredOutputsParams
from samebit.rollout.worker_interface import Handle, LocalWorker, UpdateOptions
from samebit.weight_sync import SyncReport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from samebit.rollout.adapters.loading import AdapterKeywords
    from samebit.rollout.worker_interface import UpdateKeywords

MOST_COMMANDS = 32
MOST_EARLY = 10_000
"""Limits how many calls are remembered that were cancelled or followed before they came, or after they had ended."""
T = TypeVar("T")
K = TypeVar("K")


class Sources(Protocol):
    """Opens what a call names as the source of weights."""

    def opened(self, source: object) -> AbstractContextManager[object]: ...

    def forget(self, source: object) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Call:
    """Holds the requests of one call. name: that by which `cancel` finds it, None if none was given."""

    name: str | None
    handles: Sequence[Handle]

    def cancel(self) -> None:
        """End its requests with what they have."""
        for handle in self.handles:
            handle.cancel()


class AsyncWorker:
    """Offers the calls of a worker as coroutines: of one that is `loaded`, or of the one that `build` makes."""

    def __init__(self, sources: Sources, loaded: LocalWorker | None = None) -> None:
        self._loaded = loaded
        self._sources = sources
        self._runs: dict[str | int, Call | Handle] = {}
        self._early: dict[str | int, None] = {}
        self._turns = asyncio.Semaphore(MOST_COMMANDS)
        self._preparing = Preparing()

    async def build(self, make: Callable[[], LocalWorker]) -> LocalWorker:
        """Make the worker in a thread; what that raises reaches the caller as it is."""
        if self._loaded is not None:
            raise WorkerStateError("this actor has a worker already")
        self._loaded = await self.in_thread(make)
        return self._loaded

    async def generate(
        self, prompts: Sequence[GivenPrompt], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        return await self.ended(await self.queue_all(prompts, params))

    async def run(
        self, prompt: GivenPrompt, params: SamplingParams | None, request_id: str, ticket: str | None = None
    ) -> RequestOutput:
        """Generate one request under an id by which it can be aborted. ticket: names this call, and never another one,
        for `cancel`; None: its id does."""
        (output,) = await self.ended(await self.queue(prompt, params, request_id, ticket))
        return output

    async def queue(
        self, prompt: GivenPrompt, params: SamplingParams | None, request_id: str, ticket: str | None = None
    ) -> Call:
        """Submit the request of `run`; `ended` has to follow at once."""
        prepared = await self.prepare(params)
        call = Call(request_id if ticket is None else ticket, [self.worker.submit(prompt, params, request_id)])
        del prepared
        return self._begun(call, ticket)

    async def queue_all(
        self,
        prompts: Sequence[GivenPrompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        ticket: str | None = None,
    ) -> Call:
        """Submit the requests of `generate`; `ended` has to follow at once. ticket: names the call for `cancel`."""
        each = params if isinstance(params, list | tuple) else (params,)
        prepared: list[object] = []
        while waiting := [one for one in each if self._preparing.takes_long(self.worker, one)]:
            prepared += [await self.prepare(one) for one in waiting]  # and what was there may have made room for these
        call = Call(ticket, self.worker.submit_all(prompts, params))
        del prepared
        return self._begun(call, ticket)

    async def ended(self, call: Call) -> list[RequestOutput]:
        """Wait for the requests of a call; if one fails, or the wait is cancelled, abort the rest."""
        try:
            return await _results(call.handles)
        finally:
            if call.name is not None and self._runs.get(call.name) is call:  # an id may have been taken again
                del self._runs[call.name]

    async def prepare(self, params: SamplingParams | None) -> object:
        """Do what takes long before a request is queued, beside the event loop; hold the result until it is."""
        return await self._preparing.prepare(self.worker, params)

    async def cancel(self, ticket: str | int) -> None:
        """End the requests of a call with what they have, unless they have ended. It may come before that call: Ray
        keeps no order."""
        call = self._runs.get(ticket)
        if call is not None:
            call.cancel()
            return
        remember(self._early, ticket, None)

    async def abort(self, request_ids: str | Iterable[str], tickets: Iterable[str] = ()) -> None:
        """End these requests with what they have. tickets: of calls with these ids that may come after this one."""
        self.worker.abort(request_ids)
        for ticket in tickets:
            await self.cancel(ticket)

    async def receive_weights(self, source: object = None, **options: Unpack[UpdateKeywords]) -> SyncReport:
        """Take weights as the worker does; `source` names a link."""
        UpdateOptions.of(options)

        def receive() -> SyncReport:
            with self._sources.opened(source) as opened:
                return self.worker.receive_weights(opened, **options)

        return await self.in_thread(receive)

    async def hang_up(self, source: object) -> None:
        """Close a link that stayed open after an update; its sender may then send to another receiver."""
        await self.in_thread(lambda: self._sources.forget(source))

    async def load_adapter(self, name: str, source: object, **options: Unpack[AdapterKeywords]) -> SyncReport:
        """Take an adapter as the worker does; `source` names a link or a folder."""
        AdapterOptions(**options)

        def load() -> SyncReport:
            with self._sources.opened(source) as opened:
                return self.worker.load_adapter(name, opened, **options)

        return await self.in_thread(load)

    async def drop_adapter(self, name: str, *, in_flight: str = "finish") -> None:
        await self.in_thread(lambda: self.worker.drop_adapter(name, in_flight=in_flight))

    async def adapters(self) -> list[str]:
        """Return the names that `SamplingParams.adapter` may have."""
        return self.worker.adapters

    async def sleep(self, tags: str | Iterable[str] = TAGS, level: int = 1) -> None:
        await self.in_thread(lambda: self.worker.sleep(tags, level))

    async def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        await self.in_thread(lambda: self.worker.wake_up(tags))

    async def pause(self, mode: str = "keep") -> None:
        await self.in_thread(lambda: self.worker.pause(mode))

    async def resume(self) -> None:
        await self.in_thread(self.worker.resume)

    async def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        await self.in_thread(lambda: self.worker.reset_prefix_cache(recompute_running=recompute_running))

    async def stats(self) -> dict[str, float]:
        return self.worker.stats()

    async def close(self) -> None:
        """Stop the worker and hang up; the process goes on."""
        if self._loaded is not None:
            await self.in_thread(self._loaded.close)
        await self.in_thread(self._sources.close)

    @property
    def worker(self) -> LocalWorker:
        if self._loaded is None:
            raise WorkerStateError("no model is loaded yet")
        return self._loaded

    def _begun(self, call: Call, ticket: str | None) -> Call:
        if call.name is not None:
            self._runs[call.name] = call
        self._catch_up(ticket, call)
        return call

    def _catch_up(self, ticket: str | int | None, call: Call | Handle) -> None:
        """Cancel the requests of a call whose `cancel` came before it."""
        if ticket in self._early:
            del self._early[ticket]
            call.cancel()

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run what may wait where it does not hold up the event loop; `MOST_COMMANDS` are waited for at once."""
        async with self._turns:
            return await asyncio.wrap_future(started(call))


class Preparing:
    """Compiles what requests are constrained to, for one after the other, in a thread that holds up no event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def takes_long(self, worker: LocalWorker, params: object) -> bool:
        """Return whether a request with these parameters can not be submitted without waiting."""
        return isinstance(params, SamplingParams) and worker.preparation(params) is not None

    async def prepare(self, worker: LocalWorker, params: SamplingParams | None) -> object:
        """Wait until a request with these parameters can be submitted without waiting. At once if it can already.
        Return what keeps it so, however many others are prepared, for as long as the caller holds it.

        Raises:
            RequestError: what it is constrained to can not be compiled.
        """
        if params is None or not self.takes_long(worker, params):
            return None
        await self._turn.acquire()
        return await self._begun(worker, params)  # in no variable: an error of it holds this frame

    def _begun(self, worker: LocalWorker, params: SamplingParams) -> asyncio.Future[object]:
        """Begin what is left to do in this turn, which ends with it: who gives up waiting leaves it to its end."""
        with ExitStack() as turn:
            turn.callback(self._turn.release)
            work = worker.preparation(params)  # the one before may have been for the same
            if work is None:
                nothing: asyncio.Future[object] = asyncio.get_running_loop().create_future()
                nothing.set_result(None)
                return nothing
            running = asyncio.wrap_future(started(work))
            ending = turn.pop_all()
        running.add_done_callback(lambda _: ending.close())
        return asyncio.shield(running)


def read_for_grammars(worker: LocalWorker) -> None:
    """Have a worker read its tokenizer for structured outputs, where it can compile any: llguidance lets no other
    thread run meanwhile (1.3 s for 150,000 tokens), and at the first such request all streams would stop.
    """
    work = worker.preparation(SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))
    if work is not None:
        with suppress(RequestError):
            work()


def remember(early: dict[K, T], name: K, said: T) -> None:
    """Note what was said of a call that has not come; of too many the oldest is forgotten."""
    early[name] = said
    if len(early) > MOST_EARLY:
        del early[next(iter(early))]


def started(call: Callable[[], T]) -> Future[T]:
    """Run a call in a thread that the end of the process does not wait for: whom it waits for may never come."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # who gives up waiting for it does not end it
    threading.Thread(target=_run, args=(call, future), name="samebit-command", daemon=True).start()
    return future


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # boundary: who waits for it raises it
        future.set_exception(error)
        del future  # the error holds this frame


async def _results(handles: Sequence[Handle]) -> list[RequestOutput]:
    """Wait for all; if one fails, or the wait is cancelled, abort the rest."""
    results: list[RequestOutput] = []
    try:
        for handle in handles:
            results.append(await handle.result_async())
    finally:
        for handle in handles[len(results) :]:
            handle.cancel()
    return results
