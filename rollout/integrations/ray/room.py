"""Find out what cores a Ray cluster has for a fleet: an actor for which there are none would wait without end.

Invariant: an actor's cores are those of one node.
"""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

SETTLE_SECONDS = 20
"""How long cores may take to come free after the end of the actors that held them."""


def even_share(replicas: int) -> int:
    """Return how many cores each of so many replicas may have for all of them to fit on the nodes; at least 1."""
    nodes = _cores_of_nodes()
    most = int(max(nodes, default=0.0))
    return next((share for share in range(most, 1, -1) if _fitting(nodes, share) >= replicas), 1)


def check_room(replicas: int, num_cpus: int, *, reserved: bool) -> None:
    """Check that a cluster has the cores that a fleet asks for, and that they are free, or soon will be.

    reserved: the actors are placed on cores of a placement group, which Ray does not count as free.

    Raises:
        ValueError: it has not, or others hold them.
    """
    nodes = _cores_of_nodes()
    cores, fitting = sum(nodes), _fitting(nodes, num_cpus)
    asked = f"{replicas} replicas of {num_cpus} cores need {replicas * num_cpus}"
    if fitting < replicas:
        raise ValueError(
            f"{asked}, and the Ray cluster has {cores:g}: its nodes have {', '.join(f'{one:g}' for one in nodes)}, "
            f"where {fitting} of that size fit"
        )
    if not reserved and not _come_free(replicas, num_cpus):
        free = _free_cores()
        raise ValueError(
            f"{asked}; of the {cores:g} cores of the Ray cluster others hold {cores - free:g}: allowed is what fits "
            f"on its nodes in the other {free:g}, or more when those have ended"
        )


def in_a_group(options: Mapping[str, object]) -> bool:
    """Tell whether Ray places actors with these options of its own in a placement group, theirs or the caller's."""
    strategy, group = options.get("scheduling_strategy"), options.get("placement_group", "default")
    if isinstance(strategy, PlacementGroupSchedulingStrategy):
        group = strategy.placement_group
    if isinstance(group, PlacementGroup):
        return not group.is_empty
    captures = options.get("placement_group_capture_child_tasks")
    if captures is None:
        captures = ray.get_runtime_context().should_capture_child_tasks_in_placement_group
    return bool(captures) and strategy is None and group == "default" and get_current_placement_group() is not None


def _fitting(nodes: list[float], num_cpus: int) -> int:
    """Return how many actors of so many cores fit on nodes."""
    return sum(int(cores // num_cpus) for cores in nodes)


def _come_free(replicas: int, num_cpus: int) -> bool:
    """Let Ray find a place for all replicas: it knows what is free on which node."""
    group = placement_group([{"CPU": num_cpus}] * replicas)
    try:
        return any(group.wait(1) for _ in range(SETTLE_SECONDS))  # by the second: an interrupt ends it in between
    finally:
        remove_placement_group(group)


def _cores_of_nodes() -> list[float]:
    return [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _free_cores() -> float:
    resources: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return resources.get("CPU", 0.0)
