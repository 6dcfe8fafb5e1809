"""Run a rollout worker in a process of its own, as an actor of Ray, or several as a fleet (`RayFleet`).

worker = RayWorker.start("path/to/model", num_cpus=2)
outputs = worker.generate(prompts, SamplingParams(max_tokens=64))
worker.receive_weights(policy)  # through shared memory

The way through: `client` is the caller's side, `actor` the side of the worker, `calls` waits for one from the other,
`handle` stands for what runs there, `order` keeps the order of what is submitted; `fleet` makes actors a fleet's
replicas, if there is `room`; `local` connects a server to Ray, `serve` puts it behind Ray Serve. Imports `worker` and
its callers' parts, `requests`, `fleet`, `keys`, `publishing`, `adapters`, `control`, `integrations.http`,
`samebit.weight_sync`, and of `samebit.kernels` only the setup of threads.
"""

try:
    import ray  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ImportError("samebit.rollout.integrations.ray needs Ray: pip install 'samebit[ray]'") from error

from samebit.rollout.fleet.options import FleetOptions, RouterOptions
from samebit.rollout.integrations.ray.actor import Health, RolloutActor
from samebit.rollout.integrations.ray.calls import lost_worker, wait_for, wait_for_async
from samebit.rollout.integrations.ray.client import RayWorker, start_actor
from samebit.rollout.integrations.ray.fleet import RayFleet
from samebit.rollout.integrations.ray.handle import RayRequestHandle
from samebit.weight_sync.transports.addresses import BroadcastFrom, BroadcastGroup, SharedMemoryAt

__all__ = [
    "BroadcastFrom",
    "BroadcastGroup",
    "FleetOptions",
    "Health",
    "RayFleet",
    "RayRequestHandle",
    "RayWorker",
    "RolloutActor",
    "RouterOptions",
    "SharedMemoryAt",
    "lost_worker",
    "start_actor",
    "wait_for",
    "wait_for_async",
]
