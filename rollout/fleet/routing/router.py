"""Choose the replica that computes a request.

Invariants
----------
* Nothing waits here: a choice is arithmetic under one mutex, of a cost that does not grow with the blocks cached.
* A request goes to a replica that takes requests, or `NoReplicaError` says why none does.
* Requests of one prompt that are in flight together are in one place, until they are too many; a session stays where it
  is, unless that replica is saturated. Otherwise the score decides: the share of the prompt that is cached, less
  `beta` times how far the load is off the mean. Replicas that can run the request at once go before those that can not,
  and of equals the one that was chosen least recently goes first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from samebit.rollout.errors import NoReplicaError
from samebit.rollout.fleet.options import RouterOptions
from samebit.rollout.fleet.routing.places import Groups, Place, SessionPlaces, Ticket
from samebit.rollout.fleet.routing.shadow import Room, Shadow
from samebit.rollout.publishing.journal import CacheNews, CacheSnapshot

LIGHT = 4
"""A mean load below this part of what a replica runs at once counts as that part: of two nearly idle replicas, that one
has a request more says nothing."""

_NONE = float("-inf")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Holds what decides where a request goes.

    chain: the digests of its full blocks. tokens: its length. samples: `n`. group: equal for equal prompts. session:
    the conversation it belongs to.
    """

    chain: Sequence[bytes]
    tokens: int
    samples: int = 1
    group: bytes | None = None
    session: str | None = None


class Router:
    """Knows the replicas of a fleet, what each has cached and how much each has to do. Any thread may call it."""

    def __init__(self, block_size: int, options: RouterOptions | None = None) -> None:
        self._options = RouterOptions() if options is None else options
        self._block_size = block_size
        self._room = Room(self._options.max_shadow_blocks)
        self._places: dict[str, Place] = {}
        self._open: list[Place] = []
        self._load = 0
        self._groups = Groups()
        self._sessions = SessionPlaces(self._options.max_sessions)
        self._choices = 0
        self._matched_tokens = 0
        self._snapshots = 0
        self._mutex = threading.Lock()

    # -- replicas ----------------------------------------------------------------------------------

    def add(self, name: str, limit: int) -> None:
        """Send requests to a replica that runs `limit` samples at once.

        Raises:
            ValueError: it is known already, or can run nothing.
        """
        if limit < 1:
            raise ValueError(f"a replica must run at least 1 sample at once, got {limit}")
        with self._mutex:
            if name in self._places:
                raise ValueError(f"there is a replica {name!r} already")
            self._places[name] = Place(name, limit, Shadow(self._room))
            self._look()

    def remove(self, name: str) -> None:
        """Forget a replica; its cache is gone, and nothing it runs is counted any more."""
        with self._mutex:
            self._place(name).shadow.clear()
            del self._places[name]
            self._look()

    def close(self, name: str, reason: str, why: str) -> None:
        """Send nothing more to a replica, for a reason with this name; what it has cached stays known."""
        with self._mutex:
            self._place(name).closed[reason] = why
            self._look()

    def reopen(self, name: str, reason: str) -> None:
        """Take one reason away; without any, the replica takes requests again."""
        with self._mutex:
            self._place(name).closed.pop(reason, None)
            self._look()

    def apply(self, name: str, news: CacheNews) -> bool:
        """Take a message of a replica; False asks for a snapshot of its cache."""
        with self._mutex:
            in_step = self._place(name).shadow.apply(news)
            self._snapshots += not in_step
            return in_step

    def replace(self, name: str, snapshot: CacheSnapshot) -> None:
        """Take a snapshot of a replica's cache; one that is older than what is known changes nothing."""
        with self._mutex:
            self._place(name).shadow.replace(snapshot)

    # -- requests ----------------------------------------------------------------------------------

    def route(self, prompt: Prompt) -> Ticket:
        """Choose a replica for a request, which counts as in flight there until `done`.

        Raises:
            NoReplicaError: none takes requests now.
        """
        with self._mutex:
            if not self._open:
                raise NoReplicaError(f"no replica takes requests now: {self._reasons()}")
            place = self._kept(prompt)
            if place is not None:
                return self._send(prompt, place, place.shadow.matched(prompt.chain))
            return self._send(prompt, *self._best(prompt))

    def done(self, ticket: Ticket, *, computed: bool = True) -> None:
        """Note that a request has ended; `computed` says whether its prompt was."""
        with self._mutex:
            if ticket.ended:
                return
            ticket.ended = True
            place = ticket.place
            place.load -= ticket.samples
            if place in self._open:
                self._load -= ticket.samples
            if ticket.group is not None and ticket.group_name is not None:
                self._groups.leave(ticket.group_name, ticket.group, ticket.samples)
            if computed:
                place.shadow.fulfil(ticket.expected)
            else:
                place.shadow.disappoint(ticket.expected)

    # -- what it knows -----------------------------------------------------------------------------

    def matched(self, name: str, chain: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain a replica has, or is about to have."""
        with self._mutex:
            return self._place(name).shadow.matched(chain)

    def holds(self, name: str, digest: bytes) -> bool:
        """Tell whether a replica has said that it has this block."""
        with self._mutex:
            return self._place(name).shadow.has(digest)

    def loads(self) -> dict[str, int]:
        """Return the samples in flight at each replica."""
        with self._mutex:
            return {name: place.load for name, place in self._places.items()}

    def closed(self) -> dict[str, str]:
        """Return the replicas that take no requests, each with the reason."""
        with self._mutex:
            return {name: _why(place) for name, place in self._places.items() if place.closed}

    def stats(self) -> dict[str, float]:
        """Return counters since it was made, and sizes of the moment."""
        with self._mutex:
            return {
                "router_requests": self._choices,
                "router_matched_tokens": self._matched_tokens,
                "router_sessions": len(self._sessions),
                "router_sessions_moved": self._sessions.moved,
                "router_groups": len(self._groups),
                "router_snapshots_asked": self._snapshots,
                "router_shadow_blocks": sum(len(place.shadow) for place in self._places.values()),
                "router_shadow_refused": self._room.refused,
            }

    # -- parts -------------------------------------------------------------------------------------

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise ValueError(f"there is no replica {name!r}; there are {', '.join(self._places) or 'none'}")
        return self._places[name]

    def _look(self) -> None:
        """Note which replicas take requests."""
        self._open = [place for place in self._places.values() if not place.closed]
        self._load = sum(place.load for place in self._open)

    def _reasons(self) -> str:
        return "; ".join(f"{name}: {_why(place)}" for name, place in self._places.items()) or "there is none"

    def _kept(self, prompt: Prompt) -> Place | None:
        """Return where a request's group or session is, if it stays there."""
        if prompt.group is not None:
            group = self._groups.find(prompt.group)
            if group is not None and not group.place.closed and self._place_is_known(group.place):
                most = self._options.max_group or group.place.limit
                if group.samples + prompt.samples <= most:
                    return group.place
        if prompt.session is not None:
            place = self._sessions.find(prompt.session)
            if place is not None and not place.closed and self._place_is_known(place) and not self._saturated(place):
                return place
        return None

    def _place_is_known(self, place: Place) -> bool:
        return self._places.get(place.name) is place

    def _saturated(self, place: Place) -> bool:
        mean = max(self._load / len(self._open), place.limit / LIGHT)
        return place.load >= place.limit or place.load > self._options.overload * mean

    def _best(self, prompt: Prompt) -> tuple[Place, int]:
        """Return the replica of the best score, and how many blocks it has. A cache is searched only as far as the
        score can still be the best."""
        mean = self._load / len(self._open)
        chain, beta = prompt.chain, self._options.beta
        share, count = self._block_size / prompt.tokens, len(prompt.chain)
        best, best_matched, best_room, best_score = self._open[0], 0, False, _NONE
        for place in self._open:
            load, limit = place.load, place.limit
            room = load < limit
            if best_room and not room:
                continue
            light = limit / LIGHT
            weight = beta * (load - mean) / (mean if mean > light else light)
            first = room is not best_room or best_score == _NONE
            least = 0 if first else int((best_score + weight) / share)
            if least > count:
                continue
            matched = place.shadow.matched(chain, least if least > 0 else 0)
            score = matched * share - weight
            if first or score > best_score or (score == best_score and place.used < best.used):
                best, best_matched, best_room, best_score = place, matched, room, score
        return best, best_matched

    def _send(self, prompt: Prompt, place: Place, matched: int) -> Ticket:
        shadow, chain = place.shadow, prompt.chain
        ticket = Ticket(place, prompt.samples, matched, shadow.expect(chain[matched:]))
        self._choices += 1
        self._matched_tokens += matched * self._block_size
        place.used = self._choices
        place.routed += 1
        place.load += prompt.samples
        self._load += prompt.samples
        if prompt.group is not None:
            ticket.group_name = prompt.group
            ticket.group = self._groups.join(prompt.group, place, prompt.samples)
        if prompt.session is not None:
            self._sessions.note(prompt.session, place)
        return ticket


def _why(place: Place) -> str:
    return " and ".join(place.closed.values()) or "takes requests"
