"""Keep the replicas of a fleet: start them, listen to them, notice that one is dead or silent, start it again.

Invariants
----------
* Everything here happens on one event loop, in a thread of the fleet's own; nothing there waits for a lock.
* A replica takes requests only while it is known to live, to speak, and to have the fleet's weights. One whose worker
  is broken counts as dead: nothing but another process heals it.
* A command finds queued what was sent to a replica before it, though calls may overtake each other on their way.
* A replica that was started again is paused, asleep and of the weights as the fleet is, and has its adapters, before
  it takes requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from samebit.rollout.errors import AdapterError, WorkerLostError
from samebit.rollout.fleet.background import Background, heard
from samebit.rollout.fleet.options import FleetOptions
from samebit.rollout.fleet.port import Command, Feed, Introduction, ReplicaPort, ReplicaState, Streamed, Wanted
from samebit.rollout.fleet.routing.router import Router
from samebit.rollout.fleet.tries import Tries
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.stats import at_rest

logger = logging.getLogger(__name__)

DEAD, SILENT, TROUBLE, BEHIND = "dead", "silent", "trouble", "behind"
"""Name the reasons for which a replica takes no requests."""

_STATES = frozenset[Command](["pause", "resume", "sleep", "wake_up"])
_AFTER_REQUESTS = frozenset[Command](["forget_adapter", "pause", "receive_weights", "reset_prefix_cache", "sleep"])


@dataclass(eq=False)
class Member:
    """Holds what the fleet knows of a replica. tries: to start it again. incarnation: counts its starts. stats: as of
    its last feed, and of one that is dead what it had counted. read: the digests of the adapters that it has read since
    it was started again, by their inner names. sent: counts the requests that its port has had. changing: held
    while it is told to stand still, to sleep or to go on, as two commands might change places."""

    name: str
    port: ReplicaPort
    state: ReplicaState
    pid: int
    tries: Tries
    incarnation: int = 1
    alive: bool = True
    starting: bool = False
    stats: dict[str, float] = field(default_factory=dict)
    read: dict[str, str | None] = field(default_factory=dict)
    sent: int = 0
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def run(self, prompt: list[int], params: SamplingParams, request_id: str, run: int) -> Awaitable[RequestOutput]:
        """Send a request. If that raises, its number is given again, so that nobody waits for it."""
        answer = self.port.run(prompt, params, request_id, run, self.sent)
        self.sent += 1
        return answer


class Crew:
    """Holds the replicas. start: makes the port of one, with its model loaded; it may wait. limit: samples that a
    replica runs at once."""

    def __init__(self, start: Callable[[str], ReplicaPort], count: int, limit: int, options: FleetOptions) -> None:
        self.options = options
        self.wanted = Wanted()
        self.members: dict[str, Member] = {}
        self.restarts = 0
        self._start = start
        self._limit = limit
        self.background = Background("samebit-fleet")
        try:
            self.introduction = self._start_all(count)
        except BaseException:
            self.background.end()
            raise
        self.router = Router(self.introduction.limits.block_size, options.router)

    # -- calls from other threads ------------------------------------------------------------------

    def begin(
        self,
        catch_up: Callable[[Member], Coroutine[Any, Any, None]],
        on_tokens: Callable[[list[Streamed]], None],
    ) -> None:
        """Listen to all replicas, and let them take requests.

        catch_up: gives a replica that was started again the fleet's weights. on_tokens: takes those that come, on the
        loop.
        """
        self.catch_up, self.on_tokens = catch_up, on_tokens
        for member in self.members.values():
            self.router.add(member.name, self._limit)
            self.background.wait(self._listen_to(member))

    def living(self) -> list[Member]:
        """Return the replicas that are not known to be dead."""
        return [member for member in self.members.values() if member.alive]

    def command(self, name: Command, *args: Any, **options: Any) -> list[Any]:
        """Call a method of all living replicas at once, and wait. Raises the first error of one that lives."""
        return self.background.wait(self.command_all(name, *args, **options))

    def close(self) -> None:
        """End all replicas and the loop."""
        if not self.background.closed:
            ended = self.background.spawn(self._stop())
            self.background.closed = True
            ended.result()
            self.background.end()

    # -- on the loop -------------------------------------------------------------------------------

    async def lose(self, member: Member, life: int, error: WorkerLostError) -> None:
        """Note that a replica has died and start it again. life: its incarnation; later calls for it do nothing."""
        if self.background.closed or not member.alive or member.starting or member.incarnation != life:
            return
        member.alive = False
        member.tries.note_loss()
        member.stats = at_rest(member.stats)
        logger.warning("replica %s has died: %s", member.name, error)
        self.router.remove(member.name)
        self.router.add(member.name, self._limit)
        self.router.close(member.name, DEAD, _fate(member))
        self.background.keep(self._restart(member))

    async def look(self, member: Member, life: int) -> None:
        """Bring up to date what is known of a replica where a request has failed, unless it is silent. life: as of
        `lose`."""
        if not member.alive or member.incarnation != life:
            return
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.refresh(member), self.options.silent_seconds)
        except WorkerLostError as error:
            await self.lose(member, life, error)

    async def call(self, member: Member, name: Command, *args: Any, **options: Any) -> Any:
        """Call a method of a replica, after the requests that were sent there if it is about them, and bring up to date
        what is known of it. Raises what the method raises.

        Raises:
            WorkerLostError: it has died, or is broken.
        """
        try:
            if name in _AFTER_REQUESTS and member.sent:
                await member.port.command("settle", member.sent - 1)
            answer = await member.port.command(name, *args, **options)
        except Exception:
            await self.refresh(member)  # its error may be that it is broken
            raise
        await self.refresh(member)
        return answer

    async def command_all(self, name: Command, *args: Any, **options: Any) -> list[Any]:
        """Do as `command`. All have answered when it returns or raises."""

        async def one(member: Member) -> Any:
            life = member.incarnation
            try:
                async with member.changing if name in _STATES else nullcontext():
                    return await self.call(member, name, *args, **options)
            except WorkerLostError as error:
                await self.lose(member, life, error)
                return error

        answers = await asyncio.gather(*(one(member) for member in self.living()), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerLostError):
                raise answer
        return [answer for answer in answers if not isinstance(answer, WorkerLostError)]

    async def refresh(self, member: Member) -> None:
        """Bring up to date what is known of a replica. Raises `WorkerLostError` if it has died, or is broken."""
        self._take(member, await member.port.command("state"))

    # -- parts -------------------------------------------------------------------------------------

    def _start_all(self, count: int) -> Introduction:
        names = [str(number) for number in range(count)]
        with ThreadPoolExecutor(count) as threads:
            starting = {name: threads.submit(self._start, name) for name in names}
        errors = [error for one in starting.values() if (error := one.exception()) is not None]
        ports = {name: one.result() for name, one in starting.items() if one.exception() is None}
        if not errors:
            told = {name: self.background.wait(port.begin(1)) for name, port in ports.items()}
            self.members = {
                name: Member(name, ports[name], one.state, one.pid, Tries(self.options)) for name, one in told.items()
            }
            return told[names[0]]
        for port in ports.values():
            self.background.wait(port.stop())
        raise errors[0]

    async def _listen_to(self, member: Member) -> None:
        """Learn what a replica has cached, and listen from then on."""
        self.router.replace(member.name, await member.port.snapshot())
        self._take(member, member.state)
        member.stats = await member.port.command("stats")
        self.background.keep(self._listen(member))

    async def _listen(self, member: Member) -> None:
        life, port = member.incarnation, member.port
        try:
            while True:
                feed = await self._next_feed(member, port)
                self.router.reopen(member.name, SILENT)
                if member.alive:
                    member.stats = feed.stats
                self.on_tokens(feed.tokens)
                self._take(member, feed.state)
                for news in feed.news:
                    if not self.router.apply(member.name, news):
                        self.router.replace(member.name, await port.snapshot())
                        break
        except WorkerLostError as error:
            await self.lose(member, life, error)

    async def _next_feed(self, member: Member, port: ReplicaPort) -> Feed:
        waiting = asyncio.ensure_future(port.feed())
        waiting.add_done_callback(heard)
        try:
            done, _ = await asyncio.wait((waiting,), timeout=self.options.silent_seconds)
            if not done:
                why = f"it has said nothing for {self.options.silent_seconds:g} s"
                logger.warning("replica %s takes no requests: %s", member.name, why)
                self.router.close(member.name, SILENT, why)
            return await waiting
        finally:
            waiting.cancel()

    def _take(self, member: Member, state: ReplicaState) -> None:
        """Note the state of a replica, unless a later one is known. Raises `WorkerLostError` if it is broken."""
        if state.stamp < member.state.stamp:
            return
        member.state = state
        if state.broken is not None:
            raise WorkerLostError(state.broken)
        if state.trouble is None:
            self.router.reopen(member.name, TROUBLE)
        else:
            self.router.close(member.name, TROUBLE, state.trouble)

    async def _restart(self, member: Member) -> None:
        """Start a replica again, with pauses between the tries, at most `max_restarts` times in a row."""
        await member.port.stop()
        while not (member.tries.used_up or self.background.closed):
            await asyncio.sleep(member.tries.take())
            self.restarts += 1
            member.starting = True
            try:
                await self._begin_again(member)
            except Exception as error:  # boundary: whatever it is, the fleet goes on without this replica
                member.alive = False
                logger.warning("replica %s could not be started again: %s", member.name, error)
                continue
            finally:
                member.starting = False
            member.tries.note_start()
            logger.info("replica %s was started again", member.name)
            return
        why = f"{_fate(member)}, and max_restarts={self.options.max_restarts} is used up"
        self.router.close(member.name, DEAD, why)
        logger.error("replica %s is given up: %s", member.name, why)

    async def _begin_again(self, member: Member) -> None:
        member.port = await self.background.loop.run_in_executor(None, self._start, member.name)
        member.sent = 0
        try:
            await self._bring_up(member)
        except BaseException:
            await member.port.stop()  # the next one may need what it has reserved
            raise

    async def _bring_up(self, member: Member) -> None:
        """Bring a replica that was started again to the state of the fleet, and let it take requests."""
        member.incarnation += 1
        told = await member.port.begin(member.incarnation)
        member.state, member.pid = told.state, told.pid
        member.alive = True  # before it catches up: an update that comes after that reaches it
        await self.catch_up(member)
        await self._bring_adapters(member)
        async with member.changing:
            if self.wanted.paused:
                await member.port.command("pause", "keep")
            for level in set(self.wanted.asleep.values()):
                tags = tuple(tag for tag, wanted in self.wanted.asleep.items() if wanted == level)
                await member.port.command("sleep", tags, level)
        await self.refresh(member)
        await self._listen_to(member)
        self.router.reopen(member.name, DEAD)

    async def _bring_adapters(self, member: Member) -> None:
        """Let a replica read the fleet's adapters.

        Raises:
            AdapterError: a folder holds another one by now.
        """
        member.read.clear()
        there = set(await member.port.command("adapters"))
        for one in list(self.wanted.adapters.values()):
            if one.inner not in there and one.inner in self.wanted.adapters:  # it may have been forgotten meanwhile
                report = await member.port.command("load_adapter", one.inner, one.folder, **one.options())
                member.read[one.inner] = report.digest  # what loads it now compares this, unless it has ended
                kept = self.wanted.adapters.get(one.inner, one)
                if kept.digest not in (None, report.digest):
                    raise AdapterError(f"{one.folder} holds another adapter than the one that the fleet has read there")

    async def _stop(self) -> None:
        doing = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in doing:
            task.cancel()
        await asyncio.gather(*doing, return_exceptions=True)
        await asyncio.gather(*(member.port.stop() for member in self.members.values()), return_exceptions=True)


def _fate(member: Member) -> str:
    """Say what has ended a replica."""
    return "its process has died" if member.state.broken is None else member.state.broken
