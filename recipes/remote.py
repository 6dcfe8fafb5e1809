"""Start a worker in a process of its own, in a Ray that lives as long as the recipe: on this machine, on its loopback
interface, without a dashboard."""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from samebit.rollout import RolloutConfig

if TYPE_CHECKING:
    from samebit.rollout.integrations.ray import RayWorker

# Read when Ray is imported, or by the processes that it starts. The second keeps it from writing a token to the home
# folder; the last is what makes it listen on 127.0.0.1 alone.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
_OBJECT_STORE_BYTES = 80 << 20  # for token ids and log-probabilities: weights do not go through it


@contextmanager
def remote_worker(folder: Path, config: RolloutConfig, num_threads: int) -> Iterator["RayWorker"]:
    """Start a worker on the model in `folder`, with this number of threads."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from samebit.rollout.integrations.ray import RayWorker

    with _local_ray(num_threads), RayWorker.start(folder.absolute(), config=config, num_cpus=num_threads) as worker:
        yield worker


@contextmanager
def _local_ray(num_cpus: int) -> Iterator[None]:
    """Start Ray, unless this process is already connected to one."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()
