"""Hold what a router knows of each replica, and where groups and sessions are.

Invariants
----------
* A place's load is the samples that the router has sent there and not heard the end of.
* A group is remembered while a request of it is in flight, a session until too many others came.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from samebit.rollout.fleet.routing.shadow import Shadow


@dataclass(eq=False, slots=True)
class Place:
    """Holds what the router knows of a replica.

    limit: samples that it runs at once. used: when it was chosen last, as a count of choices. closed: why it takes no
    requests, each reason by its name.
    """

    name: str
    limit: int
    shadow: Shadow
    load: int = 0
    used: int = 0
    routed: int = 0
    closed: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Group:
    """Holds the place that the requests of one prompt go to, and how many of their samples are in flight."""

    place: Place
    samples: int = 0


@dataclass(eq=False, slots=True)
class Ticket:
    """Stands for a request that was sent to a replica.

    matched: leading blocks that it has, or is about to have. expected: those that this request is to publish.
    """

    place: Place
    samples: int
    matched: int
    expected: list[bytes]
    group_name: bytes | None = None
    group: Group | None = None
    ended: bool = False

    @property
    def replica(self) -> str:
        """Return the name of the replica."""
        return self.place.name


class Groups:
    """Holds the groups that are in flight, by their prompt's name."""

    def __init__(self) -> None:
        self._groups: dict[bytes, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def find(self, name: bytes) -> Group | None:
        """Return the group of this prompt, if it is in flight."""
        return self._groups.get(name)

    def join(self, name: bytes, place: Place, samples: int) -> Group:
        """Count samples in; a group that goes on elsewhere is there from now on."""
        group = self._groups.get(name)
        if group is None or group.place is not place:
            group = self._groups[name] = Group(place)
        group.samples += samples
        return group

    def leave(self, name: bytes, group: Group, samples: int) -> None:
        """Count samples out."""
        group.samples -= samples
        if group.samples == 0 and self._groups.get(name) is group:
            del self._groups[name]


class SessionPlaces:
    """Remembers where sessions are, the `most` that were used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: OrderedDict[str, Place] = OrderedDict()
        self.moved = 0

    def __len__(self) -> int:
        return len(self._places)

    def find(self, session: str) -> Place | None:
        """Return where a session is, if that is remembered."""
        return self._places.get(session)

    def note(self, session: str, place: Place) -> None:
        """Remember where a session is now."""
        before = self._places.get(session)
        self.moved += before is not None and before is not place
        self._places[session] = place
        self._places.move_to_end(session)
        if len(self._places) > self._most:
            self._places.popitem(last=False)
