"""Say how a fleet is run: `RouterOptions` and `FleetOptions`. An instance that exists is valid."""

from __future__ import annotations

from dataclasses import dataclass, field

from samebit.rollout.checks import check_bool, check_positive_int, is_positive_number, shown

SHORTEST_SILENCE = 2
"""Seconds. A replica that has nothing to tell says so every second."""

LONGEST_PAUSE = 60
"""Seconds, between two tries to start a replica."""


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Says how a router chooses.

    beta: what load weighs against cached tokens. With 1, a replica whose load is the mean and a half must have half a
        prompt more in its cache than one whose load is the mean.
    overload: a replica with more than this multiple of the mean load is saturated, as one is that has all the samples
        it can run; sessions leave it.
    max_group: samples of one prompt that stay together; None for as many as a replica runs at once.
    max_sessions: sessions whose replica is remembered; those not used for longest are forgotten.
    max_shadow_blocks: digests that all shadows together record.
    """

    beta: float = 0.5
    overload: float = 2.0
    max_group: int | None = None
    max_sessions: int = 1 << 16
    max_shadow_blocks: int = 1 << 22

    def __post_init__(self) -> None:
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float) or not 0 <= self.beta < float("inf"):
            raise ValueError(f"beta must be a number of at least 0, got {shown(self.beta)}")
        if not is_positive_number(self.overload) or self.overload < 1:
            raise ValueError(f"overload must be a number of at least 1, got {shown(self.overload)}")
        if self.max_group is not None:
            check_positive_int("max_group", self.max_group)
        check_positive_int("max_sessions", self.max_sessions)
        check_positive_int("max_shadow_blocks", self.max_shadow_blocks)


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Says how a fleet keeps its replicas.

    router: how requests are placed.
    resubmit: send the requests of a replica that has died to another one, from their tokens. A request of which tokens
        were streamed already ends with `WorkerLostError` all the same, as all do without this, and as does one under
        an adapter that has got a new version since, or was dropped.
    max_restarts: how often in a row a replica that has died is started again, each; 0 for never.
    restart_seconds: the pause before the second start in a row, up to a minute; each later one is twice as long, up to
        a minute too.
    well_seconds: a replica that has run for so long was not started in a row with what came before.
    silent_seconds: a replica that says nothing for so long takes no new requests until it speaks again.
    sync_timeout: how long an update waits for the other side while no weights move, in seconds. A replica that has not
        answered then is asked how it is; one that says nothing for as long again, nor for `silent_seconds`, is dead.
    """

    router: RouterOptions = field(default_factory=RouterOptions)
    resubmit: bool = False
    max_restarts: int = 3
    restart_seconds: float = 1.0
    well_seconds: float = 300.0
    silent_seconds: float = 10.0
    sync_timeout: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.router, RouterOptions):
            raise ValueError(f"router must be RouterOptions, got {shown(self.router)}")
        check_bool("resubmit", self.resubmit)
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise ValueError(f"max_restarts must be an int of at least 0, got {shown(self.max_restarts)}")
        for name in ("silent_seconds", "sync_timeout", "restart_seconds", "well_seconds"):
            value, least = vars(self)[name], SHORTEST_SILENCE if name == "silent_seconds" else 0
            if not is_positive_number(value) or value < least:
                raise ValueError(f"{name} must be a number of at least {least} and above 0, got {shown(value)}")
        if self.restart_seconds > LONGEST_PAUSE:
            raise ValueError(f"restart_seconds must be at most {LONGEST_PAUSE}, got {shown(self.restart_seconds)}")
