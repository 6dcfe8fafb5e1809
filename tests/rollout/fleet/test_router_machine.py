"""A router promises nothing that a replica had lost when it sent the last message that counted, whatever messages are
lost, doubled, late or out of order. It runs beside a dictionary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from samebit.rollout.fleet.options import RouterOptions
from samebit.rollout.fleet.routing.places import Ticket
from samebit.rollout.fleet.routing.router import Prompt, Router
from samebit.rollout.publishing.journal import CacheJournal, CacheNews, CacheSnapshot

NAMES = ("a", "b")
DIGESTS = [bytes([first, number]) for first in (0, 1) for number in range(6)]
ROOM = 14
replicas = st.sampled_from(NAMES)


@dataclass
class Replica:
    """Holds a cache as a set; `known` is what it had when it wrote the last message that was taken, None before."""

    life: int = 1
    epoch: int = 0
    blocks: set[bytes] = field(default_factory=set)
    journal: CacheJournal = field(default_factory=lambda: CacheJournal(1, 0, most=5))
    sent: list[tuple[CacheNews | CacheSnapshot, frozenset[bytes]]] = field(default_factory=list)
    known: frozenset[bytes] | None = None
    at: tuple[int, int] = (-1, -1)


class RouterMachine(RuleBasedStateMachine):
    """Lets replicas publish chains and evict them from their ends, as caches do."""

    @initialize()
    def begin(self) -> None:
        self.router = Router(1, RouterOptions(max_shadow_blocks=ROOM, max_group=3, max_sessions=2))
        self.replicas = {name: Replica() for name in NAMES}
        self.tickets: list[Ticket] = []
        self.expected: dict[str, list[Ticket]] = {name: [] for name in NAMES}
        for name in NAMES:
            self.router.add(name, 4)
            self.router.replace(name, self.replicas[name].journal.snapshot([]))
            self.replicas[name].known, self.replicas[name].at = frozenset(), (1, 0)

    @rule(name=replicas, first=st.integers(0, 1), count=st.integers(1, 6))
    def publish(self, name: str, first: int, count: int) -> None:
        replica = self.replicas[name]
        for digest in DIGESTS[6 * first :][:count]:
            if digest not in replica.blocks:
                replica.blocks.add(digest)
                replica.journal.published(digest)

    @rule(name=replicas, first=st.integers(0, 1), count=st.integers(1, 3))
    def evict(self, name: str, first: int, count: int) -> None:
        replica = self.replicas[name]
        for digest in sorted((d for d in replica.blocks if d[0] == first), reverse=True)[:count]:
            replica.blocks.remove(digest)
            replica.journal.evicted(digest)

    @rule(name=replicas)
    def clear(self, name: str) -> None:
        replica = self.replicas[name]
        replica.epoch += 1
        replica.blocks.clear()
        replica.journal.cleared(replica.epoch)

    @rule(name=replicas)
    def restart(self, name: str) -> None:
        old = self.replicas[name]
        life = old.life + 1
        self.replicas[name] = Replica(
            life, journal=CacheJournal(life, 0, most=5), sent=old.sent, known=old.known, at=old.at
        )

    @rule(name=replicas, digest=st.sampled_from(DIGESTS), lost=st.booleans())
    def send(self, name: str, digest: bytes, lost: bool) -> None:
        """Send a message, of a block at least."""
        replica = self.replicas[name]
        if digest not in replica.blocks:
            self.publish(name, digest[0], digest[1] + 1)
        news = replica.journal.take()
        if news is not None and not lost:
            replica.sent.append((news, frozenset(replica.blocks)))

    @rule(name=replicas)
    def send_snapshot(self, name: str) -> None:
        replica = self.replicas[name]
        replica.sent.append((replica.journal.snapshot(sorted(replica.blocks)), frozenset(replica.blocks)))

    @rule(name=replicas, data=st.data(), keep=st.booleans())
    def deliver(self, name: str, data: st.DataObject, keep: bool) -> None:
        """Deliver any message, mostly the first; it may come again."""
        replica = self.replicas[name]
        if not replica.sent:
            return
        number = data.draw(st.sampled_from([0, 0, 0, 0, len(replica.sent) - 1]))
        message, blocks = replica.sent[number] if keep else replica.sent.pop(number)
        at = (message.incarnation, message.sequence)
        if isinstance(message, CacheSnapshot):
            self.router.replace(name, message)
            if message.incarnation >= replica.at[0] and (replica.known is None or at >= replica.at):
                replica.known, replica.at = blocks, at
        else:
            in_step = self.router.apply(name, message)
            fits = replica.known is not None and message.incarnation == replica.at[0]
            if fits and message.sequence == replica.at[1] + 1:
                assert in_step
                replica.known, replica.at = blocks, at
            elif fits and message.sequence <= replica.at[1]:
                assert in_step
            else:
                assert not in_step
                replica.known = None

    @rule(first=st.integers(0, 1), count=st.integers(0, 6), samples=st.integers(1, 3), session=st.sampled_from("xyz"))
    def route(self, first: int, count: int, samples: int, session: str) -> None:
        chain = DIGESTS[6 * first :][:count]
        promised = {name: self.router.matched(name, chain) for name in NAMES}
        ticket = self.router.route(Prompt(chain, count + 1, samples, bytes([first, count]), session))
        assert ticket.matched == promised[ticket.replica]
        self.tickets.append(ticket)

    @rule(data=st.data(), computed=st.booleans())
    def end(self, data: st.DataObject, computed: bool) -> None:
        if self.tickets:
            ticket = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
            self.router.done(ticket, computed=computed)

    @invariant()
    def promises_nothing_that_is_lost(self) -> None:
        for name, replica in self.replicas.items():
            held = {digest for digest in DIGESTS if self.router.holds(name, digest)}
            assert held <= (replica.known or frozenset())

    @invariant()
    def records_all_there_is_room_for(self) -> None:
        stats = self.router.stats()
        known = {name: replica.known or frozenset() for name, replica in self.replicas.items()}
        assert stats["router_shadow_blocks"] <= ROOM
        if not stats["router_shadow_refused"]:
            for name, blocks in known.items():
                assert {digest for digest in DIGESTS if self.router.holds(name, digest)} == blocks

    @invariant()
    def counts_loads(self) -> None:
        loads = dict.fromkeys(NAMES, 0)
        for ticket in self.tickets:
            loads[ticket.replica] += ticket.samples
        assert self.router.loads() == loads
        assert self.router.stats()["router_sessions"] <= 2


RouterMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("SAMEBIT_SOAK_CASES", "25")), stateful_step_count=40, deadline=None
)


@pytest.mark.soak
class TestRouter(RouterMachine.TestCase):
    pass
