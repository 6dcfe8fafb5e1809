"""Find out what cores a Ray cluster has for a fleet: an actor for which there are none would wait without end."""

from __future__ import annotations

import time

import ray

SETTLE_SECONDS = 20.0
"""How long cores may take to come free after the end of the actors that held them."""

_LOOK_SECONDS = 0.1


def even_share(replicas: int) -> int:
    """Return how many of the cluster's cores each of so many replicas may have; at least 1."""
    return max(1, int(_cores()) // replicas)


def check_room(replicas: int, num_cpus: int, *, reserved: bool) -> None:
    """Check that a cluster has the cores that a fleet asks for, and that they are free, or soon will be.

    reserved: the actors may be placed on cores of a placement group, which Ray does not count as free.

    Raises:
        ValueError: it has not, or others hold them.
    """
    needed, cores = replicas * num_cpus, _cores()
    asked = f"{replicas} replicas of {num_cpus} cores need {needed}"
    if cores < needed:
        raise ValueError(f"{asked}, and the Ray cluster has {cores:g}")
    until = time.monotonic() + SETTLE_SECONDS
    while not reserved and (free := _free_cores()) < needed:
        if time.monotonic() >= until:
            raise ValueError(
                f"{asked}; of the {cores:g} cores of the Ray cluster others hold {cores - free:g}: allowed are "
                f"{free:g}, or more when those have ended"
            )
        time.sleep(_LOOK_SECONDS)


def _cores() -> float:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get("CPU", 0.0)


def _free_cores() -> float:
    resources: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return resources.get("CPU", 0.0)
