"""Bring new weights to all replicas of a fleet.

Invariants
----------
* All replicas are given one version. From the first that has it, those that have not take no new requests until they
  do; one that fails is brought up to date by another, or started again. What it has in flight is dealt with then as the
  update was asked to.
* A part of the weights goes only to replicas that have the rest; others then get all of them from one of these.
* An update that no replica took changes nothing, and raises why. What comes of one that replicas were asked to take is
  noted on the loop, to the end, also if its caller is interrupted; until then none follows, and nobody catches up.
* Nobody waits for a replica that hangs: one that does not answer, nor say how it is, counts as dead.
* One pass over the weights serves all: the front is rank 0 of a group of gloo, whose broadcast is a tree. A stream has
  been gone through however its update ends: other ranks may be gathering the same tensors.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from samebit.rollout.errors import NoReplicaError, WorkerLostError, WorkerStateError
from samebit.rollout.fleet.background import heard, in_turn
from samebit.rollout.fleet.crew import BEHIND, Crew, Member
from samebit.rollout.fleet.port import Command
from samebit.rollout.worker_interface import UpdateOptions
from samebit.weight_sync import (
    BroadcastSender,
    SyncBrokenError,
    SyncRefusedError,
    SyncReport,
    WeightStream,
    gloo_group,
    listening_store,
)
from samebit.weight_sync.transports.addresses import BroadcastGroup
from samebit.weight_sync.wire.stream import gone_through

logger = logging.getLogger(__name__)

Outcomes: TypeAlias = "dict[Member, SyncReport | BaseException]"


class FleetWeights:
    """Knows the version of the fleet's weights. host: where replicas reach this process."""

    def __init__(self, crew: Crew, host: str) -> None:
        self._crew = crew
        self._host = host
        self._turn = threading.Lock()
        self._settling = asyncio.Lock()  # on the loop: held for as long as replicas have an update in their hands
        self._timeout = crew.options.sync_timeout
        self._manner = UpdateOptions()
        self.version = max(member.state.weight_version for member in crew.members.values())

    def receive(self, source: object, given: Mapping[str, Any]) -> SyncReport:
        """Take new weights, in the caller's thread: reading them may be a collective.

        Raises:
            TypeError: the source is none of a module, a dict, a `WeightStream` and a folder; or an unknown option.
            ValueError: the version is not above the current one.
            NoReplicaError: all replicas are dead; or none has the weights of which a partial update changes a part.
            WorkerStateError: the weights are asleep.
        """
        with gone_through(source):
            return self._receive(source, given)

    def mend(self) -> None:
        """Do as `bring_up`, in a caller's thread."""
        self._crew.background.wait(self.bring_up())

    async def bring_up(self) -> None:
        """Let replicas that lack the fleet's weights try to get them."""
        for member in self._crew.living():
            if member.state.weight_version != self.version:
                await self._behind(member)

    async def catch_up(self, member: Member) -> None:
        """Give a replica the fleet's weights, from another that has them. Without one, it takes no requests.

        Raises:
            WorkerLostError: the replica has died meanwhile.
        """
        async with in_turn(self._turn), self._settling:
            await self._catch_up(member)

    # -- parts -------------------------------------------------------------------------------------

    def _receive(self, source: object, given: Mapping[str, Any]) -> SyncReport:
        asked = UpdateOptions.of(given)
        if not isinstance(source, str | Path | nn.Module | Mapping | WeightStream):
            raise TypeError(
                "a fleet takes weights from a module, a dict of tensors, a WeightStream or a folder with "
                f"*.safetensors, not from {type(source).__name__}"
            )
        with self._turn:
            self._crew.background.wait(self._settled())
            version = self.version + 1 if asked.version is None else asked.version
            if version <= self.version:
                raise ValueError(f"version must be above the current one ({self.version}), got {version}")
            return _told(self._everywhere(source, replace(asked, version=version)))

    async def _catch_up(self, member: Member) -> None:
        if member.state.weight_version == self.version:
            self._crew.router.reopen(member.name, BEHIND)
            return
        name, why = member.name, f"its weights are of version {member.state.weight_version}, not {self.version}"
        self._crew.router.close(name, BEHIND, why)
        for giver in self._crew.living():
            if giver is member or giver.state.weight_version != self.version or "weights" in giver.state.sleeping:
                continue
            try:
                offer = await self._answered(giver, "offer_weights", self._timeout)
                link = BroadcastGroup(offer.host, offer.port, 1, 2, self._timeout)
                asked = replace(self._manner, version=self.version)
                await self._answered(member, "receive_weights", link, **vars(asked))
            except Exception as error:  # boundary: another may have them
                logger.warning("replica %s did not get its weights from %s: %s", name, giver.name, error)
                continue
            self._crew.router.reopen(name, BEHIND)
            return
        logger.warning("replica %s takes no requests: %s, and no other can give them now", name, why)

    def _everywhere(self, source: object, asked: UpdateOptions) -> Outcomes:
        """Give the weights to all. A broadcast that a death has broken is made again, if the source can be read twice;
        what each replica said last is returned."""
        while True:
            members = self._takers(partial=asked.partial)
            if isinstance(source, str | Path):
                return self._crew.background.wait(self._give(dict.fromkeys(members, str(source)), asked))
            outcomes = self._broadcast(source, members, asked)
            died = any(isinstance(one, WorkerLostError) for one in outcomes.values())
            taken = any(isinstance(one, SyncReport) for one in outcomes.values())
            if taken or not died or isinstance(source, WeightStream):
                return outcomes
            logger.warning("a replica died during an update of the weights; the others get them again")

    def _takers(self, *, partial: bool) -> list[Member]:
        """Return the replicas that are given an update."""
        living = self._crew.living()
        if not living:
            raise NoReplicaError("no replica is alive to take weights")
        if not partial:
            return living
        current = [one for one in living if one.state.weight_version == self.version]
        having = [one for one in current if one.state.has_weights]
        if not having and any("weights" in one.state.sleeping for one in current):
            raise WorkerStateError('the weights are asleep; call wake_up("weights") first')
        if not having:
            raise NoReplicaError(
                f"no living replica has the weights of version {self.version}, which a partial update changes in part: "
                "send all weights"
            )
        return having

    def _broadcast(self, source: object, members: list[Member], asked: UpdateOptions) -> Outcomes:
        store, size = listening_store(self._host), len(members) + 1
        links = {
            member: BroadcastGroup(self._host, store.port, rank, size, self._timeout)
            for rank, member in enumerate(members, 1)
        }
        giving = self._crew.background.spawn(self._give(links, asked))
        broken: Exception | None = None
        try:
            group = gloo_group(store, 0, size, timeout=self._timeout)
            with BroadcastSender(group, timeout=self._timeout) as sender:
                sender.send(source)
        except (SyncBrokenError, SyncRefusedError) as error:
            broken = error  # a replica's own error says more
        outcomes = giving.result()
        if broken is not None and all(isinstance(one, SyncReport) for one in outcomes.values()):
            logger.warning("version %d is on all replicas, but its sender gave up: %s", asked.version, broken)
        return outcomes

    async def _settled(self) -> None:
        """Wait until the replicas have ended an update whose caller waits no longer."""
        async with self._settling:
            pass

    async def _give(self, sources: Mapping[Member, object], asked: UpdateOptions) -> Outcomes:
        """Let replicas take an update, and wait for what comes of it. From when one has it, it is the fleet's."""
        async with self._settling:
            taking = [self._take(member, source, asked) for member, source in sources.items()]
            outcomes = dict(zip(sources, await asyncio.gather(*taking, return_exceptions=True), strict=True))
            if any(isinstance(one, SyncReport) for one in outcomes.values()):
                self._settle(outcomes, asked)
            return outcomes

    async def _take(self, member: Member, source: object, asked: UpdateOptions) -> SyncReport:
        life = member.incarnation
        try:
            report: SyncReport = await self._answered(member, "receive_weights", source, **vars(asked))
        except WorkerLostError as error:
            await self._crew.lose(member, life, error)
            raise
        finally:
            self._compare(asked)
        return report

    async def _answered(self, member: Member, name: Command, *args: Any, **options: Any) -> Any:
        """Call a method of a replica, and wait for as long as that says how it is: it may let requests finish first.

        Raises:
            WorkerLostError: it has died, is broken, or hangs.
        """
        life, limit = member.incarnation, max(self._timeout, self._crew.options.silent_seconds)
        call = asyncio.ensure_future(self._crew.call(member, name, *args, **options))
        call.add_done_callback(heard)
        try:
            while not (await asyncio.wait((call,), timeout=self._timeout))[0]:
                await asyncio.wait_for(self._crew.refresh(member), limit)
        except asyncio.TimeoutError:
            error = WorkerLostError(f"it hangs: it has not answered {name}, nor said for {limit:g} s how it is")
            await self._crew.lose(member, life, error)
            raise error from None
        finally:
            call.cancel()
        return call.result()

    def _compare(self, asked: UpdateOptions) -> None:
        """Let those without the newest weights wait for them, once one has them."""
        if any(member.state.weight_version == asked.version for member in self._crew.living()):
            for member in self._crew.living():
                if member.state.weight_version == asked.version:
                    self._crew.router.reopen(member.name, BEHIND)
                else:
                    why = f"its weights are of version {member.state.weight_version}, not {asked.version}"
                    self._crew.router.close(member.name, BEHIND, why)

    def _settle(self, outcomes: Outcomes, asked: UpdateOptions) -> None:
        """Note the new version; those that failed where others did not, or were not asked, are brought up to date."""
        assert asked.version is not None  # from `_receive`, which has chosen it
        self.version, self._manner = asked.version, UpdateOptions(in_flight=asked.in_flight, verify=asked.verify)
        for member in self._crew.living():
            outcome = outcomes.get(member, "it came late, or lacked the version before")
            if not isinstance(outcome, SyncReport | WorkerLostError):
                logger.warning("replica %s did not take version %d: %s", member.name, self.version, outcome)
                self._crew.background.keep(self._behind(member))

    async def _behind(self, member: Member) -> None:
        life = member.incarnation
        try:
            await self.catch_up(member)
        except WorkerLostError as error:
            await self._crew.lose(member, life, error)


def _told(outcomes: Outcomes) -> SyncReport:
    """Return the report of a replica that has taken an update. Raises the most telling error where none has."""
    for outcome in outcomes.values():
        if isinstance(outcome, SyncReport):
            return outcome
    errors = [one for one in outcomes.values() if not isinstance(one, SyncReport)]
    telling = [one for one in errors if not isinstance(one, WorkerLostError | SyncBrokenError)]
    raise (telling or errors)[0]
