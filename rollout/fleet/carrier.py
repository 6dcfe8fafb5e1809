"""Carry requests to replicas and their results back.

Invariants
----------
* A request is counted in the router from before it is sent until it has ended.
* Each ends once, with a result or an error by name; one whose replica died is sent to another if the fleet was asked
  to, no token of it was handed out yet, and replicas know its adapter. One whose replica broke is not: it may be what
  has broken it.
* An id may belong to another request once one has ended: what a handle asks for is done for its own alone.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from samebit.rollout.errors import RequestIdInUseError, WorkerLostError, WorkerStateError
from samebit.rollout.fleet.adapters import is_known
from samebit.rollout.fleet.crew import Crew, Member
from samebit.rollout.fleet.handle import FleetHandle
from samebit.rollout.fleet.port import Command, Streamed
from samebit.rollout.fleet.routing.places import Ticket
from samebit.rollout.fleet.routing.router import Prompt
from samebit.rollout.guard import contained
from samebit.rollout.sampling_params import SamplingParams


@dataclass(eq=False)
class Running:
    """Holds a request in flight; `member` runs it. run: its number there, by which both name it."""

    handle: FleetHandle
    prompt: list[int]
    params: SamplingParams
    asked: Prompt
    ticket: Ticket
    member: Member
    run: int
    cancelled: bool = False


class Carrier:
    """Holds the requests in flight. Any thread may call it."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._running: dict[str, Running] = {}
        self._runs = itertools.count()
        self._names = map("request-{}".format, itertools.count())
        self._mutex = threading.Lock()
        self._listeners: tuple[Callable[[], None], ...] = ()
        self.resubmitted = 0
        self.lost = 0

    def send(self, request_id: str | None, prompt: list[int], params: SamplingParams, asked: Prompt) -> FleetHandle:
        """Choose a replica for a request, and send it there. request_id: None for one that no request has.

        Raises:
            NoReplicaError: none takes requests now.
            RequestIdInUseError: a request with this id is running.
        """
        with self._mutex:
            if request_id in self._running:
                raise RequestIdInUseError(f"a request with the id {request_id!r} is running")
            if request_id is None:
                request_id = next(name for name in self._names if name not in self._running)
            handle = FleetHandle(request_id, params.n, self._cancel, self._follow)
            ticket = self._crew.router.route(asked)
            member = self._crew.members[ticket.replica]
            running = self._running[request_id] = Running(
                handle, prompt, params, asked, ticket, member, next(self._runs)
            )
        try:
            self._crew.background.spawn(self._run(running))
        except WorkerStateError:
            self._forget(running, computed=False)
            raise
        return handle

    def abort(self, request_ids: list[str]) -> None:
        """End these requests with what they have; those that have ended already stay so."""
        for request_id in request_ids:
            running = self._running.get(request_id)
            if running is not None:
                self._abort(running)

    def after_steps(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each feed with tokens. It must not wait."""
        self._listeners = (*self._listeners, listener)

    def fail_all(self, error: WorkerStateError) -> None:
        """End all requests with an error."""
        for running in list(self._running.values()):
            self._forget(running, computed=False)
            running.handle.fail(error)

    def _cancel(self, handle: FleetHandle) -> None:
        running = self._of(handle)
        if running is not None:
            self._abort(running)

    def _follow(self, handle: FleetHandle) -> None:
        running = self._of(handle)
        if running is not None:
            self._crew.background.spawn(self._tell(running, "follow"))

    def _of(self, handle: FleetHandle) -> Running | None:
        """Return the request of a handle, None if it has ended."""
        running = self._running.get(handle.request_id)
        return running if running is not None and running.handle is handle else None

    def _abort(self, running: Running) -> None:
        running.cancelled = True
        self._crew.background.spawn(self._tell(running, "cancel"))

    # -- on the loop -------------------------------------------------------------------------------

    def feed(self, tokens: list[Streamed]) -> None:
        """Hand new tokens to the requests that they are of, and tell who listens."""
        for request_id, run, chunks in tokens:
            running = self._running.get(request_id)
            if running is not None and running.run == run:
                running.handle.feed(chunks)
        if tokens:
            for listener in self._listeners:
                with contained("a listener of the feeds"):
                    listener()

    async def _run(self, running: Running) -> None:
        """Run a request to its end."""
        while True:
            member, life = running.member, running.member.incarnation
            try:
                output = await member.run(running.prompt, running.params, running.handle.request_id, running.run)
            except WorkerLostError as error:
                await self._crew.lose(member, life, error)
                if self._goes_on(running):
                    continue
                self.lost += 1
                self._end(running, error)
            except WorkerStateError as error:
                try:
                    await self._crew.look(member, life)  # first: those that follow go elsewhere
                finally:
                    self._end(running, error)
            except Exception as error:  # boundary: the request's caller raises it
                self._end(running, error)
            else:
                self._forget(running, computed=True)
                running.handle.finish(output)
            return

    def _goes_on(self, running: Running) -> bool:
        """Choose another replica for a request whose own has died, if it may have one and there is one."""
        if not self._crew.options.resubmit or running.handle.streamed or running.cancelled:
            return False
        if running.member.state.broken is not None or not is_known(running.params.adapter, self._crew.wanted):
            return False
        self._crew.router.done(running.ticket, computed=False)
        try:
            running.ticket = self._crew.router.route(running.asked)
        except WorkerStateError:
            return False
        running.member = self._crew.members[running.ticket.replica]
        running.run = next(self._runs)
        self.resubmitted += 1
        if running.handle.followed:
            self._crew.background.keep(self._tell(running, "follow"))
        return True

    async def _tell(self, running: Running, what: Command) -> None:
        """Tell the replica that runs a request, unless it has ended, a command; a dead replica is passed over."""
        if self._of(running.handle) is None:
            return
        with contained(f"{what} at a replica"):
            try:
                await running.member.port.command(what, running.run)
            except WorkerLostError:
                return

    def _end(self, running: Running, error: Exception) -> None:
        self._forget(running, computed=False)
        running.handle.fail(error)

    def _forget(self, running: Running, *, computed: bool) -> None:
        self._running.pop(running.handle.request_id, None)
        self._crew.router.done(running.ticket, computed=computed)
