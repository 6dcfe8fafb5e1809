"""Connect to a Ray cluster for a server: one that runs, or one that begins and ends with this process."""

from __future__ import annotations

import ray

from samebit.rollout.integrations.ray.fleet import RayFleet


def connect(address: str | None) -> type[RayFleet]:
    """Connect this process to Ray and return what starts a fleet there; a process that is connected already stays so.

    address: of a running cluster; None begins one, which listens on the loopback interface alone.

    Raises:
        ValueError: nothing answers at the address.
    """
    if not ray.is_initialized():
        try:
            if address is None:
                ray.init(address="local", include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
            else:
                ray.init(address=address, log_to_driver=False)
        except ConnectionError as error:
            raise ValueError(f"no Ray cluster answers at {address!r}: {error}") from error
    return RayFleet
