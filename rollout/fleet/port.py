"""Say what the front of a fleet asks of a replica, wherever that runs, what comes back, and how all shall be."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from samebit.rollout.outputs import RequestOutput, StreamChunk
from samebit.rollout.publishing.journal import CacheNews, CacheSnapshot
from samebit.rollout.requests.limits import RequestLimits
from samebit.rollout.sampling_params import SamplingParams

if TYPE_CHECKING:
    from samebit.rollout.adapters.loading import AdapterKeywords

Command = Literal[
    "adapters", "cancel", "follow", "forget_adapter", "load_adapter", "offer_weights", "pause", "receive_weights",
    "reset_prefix_cache", "resume", "settle", "sleep", "state", "stats", "wake_up",
]  # fmt: skip
"""Names the methods of `ReplicaSide` that a front calls by `ReplicaPort.command`."""


@dataclass(frozen=True)
class ReplicaState:
    """Says how a replica is. stamp: later states have higher ones. has_weights: all of them, and awake. trouble: why a
    request would be refused now. broken: why nothing will be computed there any more."""

    stamp: int
    weight_version: int
    has_weights: bool
    trouble: str | None
    broken: str | None
    paused: bool
    sleeping: tuple[str, ...]


@dataclass(frozen=True)
class Introduction:
    """Says what a replica is, once it has loaded its model. adapters: names that a request may give."""

    pid: int
    limits: RequestLimits
    eos_token_ids: tuple[int, ...]
    adapters: tuple[str, ...]
    state: ReplicaState


class Streamed(NamedTuple):
    """Holds new tokens of a request. run: the number that the front gave this run of it: an id may come again."""

    request_id: str
    run: int
    chunks: list[StreamChunk]


@dataclass(frozen=True)
class Feed:
    """Holds what has happened at a replica since the feed before.

    tokens: new ones of the requests that are followed.
    """

    state: ReplicaState
    stats: dict[str, float]
    news: list[CacheNews] = field(default_factory=list)
    tokens: list[Streamed] = field(default_factory=list)


@dataclass(frozen=True)
class Offer:
    """Says where a replica gives its weights to one other, as rank 0 of a group of two."""

    host: str
    port: int


class ReplicaPort(Protocol):
    """Carries calls to one replica, from the fleet's event loop. All raise `WorkerLostError` once it is dead."""

    async def begin(self, incarnation: int) -> Introduction:
        """Begin to note what is cached, under this number of the replica's life."""
        ...

    def run(
        self, prompt: list[int], params: SamplingParams, request_id: str, run: int, number: int
    ) -> Awaitable[RequestOutput]:
        """Send one request to be generated; what this raises, and not the awaiting of its answer, was not sent. run: by
        which commands name it; they may overtake it. number: counts the calls."""
        ...

    async def feed(self) -> Feed:
        """Wait until there is something to tell, or a second has passed."""
        ...

    async def snapshot(self) -> CacheSnapshot: ...

    async def command(self, name: Command, *args: Any, **options: Any) -> Any:
        """Call a method of `ReplicaSide` by its name."""
        ...

    async def stop(self) -> None:
        """End the replica, whatever it is doing."""
        ...


@dataclass(frozen=True, eq=False)
class WantedAdapter:
    """Describes an adapter that all replicas shall have.

    inner: its name there. name: in the fleet. folder: or a name of the hub, with `revision`. number: in the digests of
    its cached blocks. digest: of what was read; None until all have read it.
    """

    inner: str
    folder: str
    version: int
    number: int
    config: object
    autocast: bool
    name: str
    digest: str | None = None
    revision: str | None = None

    def options(self) -> AdapterKeywords:
        """Return the keywords with which a replica loads the adapter."""
        return {
            "config": self.config, "version": self.version, "autocast": self.autocast, "number": self.number,
            "revision": self.revision, "alias": self.name,
        }  # fmt: skip


@dataclass
class Wanted:
    """Says which state all replicas shall have, later ones too. asleep: the level of each tag that sleeps."""

    paused: bool = False
    asleep: dict[str, int] = field(default_factory=dict)
    adapters: dict[str, WantedAdapter] = field(default_factory=dict)
