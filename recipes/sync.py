"""Bring the trainer's weights to the worker: on one module, by a copy within the process, or by shared memory.

However they travel, a run is the same bit for bit: same samples, same losses, same weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from samebit.recipes.remote import remote_worker
from samebit.recipes.sampler import Sampler
from samebit.rollout import RolloutConfig, RolloutWorker, Worker
from samebit.weight_sync import SyncReport, WeightStream

Update = Callable[[Callable[[], object]], SyncReport]
"""Calls the function, which changes the policy's weights, and brings the worker to them."""


@dataclass(frozen=True)
class Synced:
    """Holds a worker that generates with the policy's weights, as of the last `update`."""

    worker: Sampler
    update: Update


@contextmanager
def synced(
    way: str, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, config: RolloutConfig
) -> Iterator[Synced]:
    """Make a worker; `way` is "shared", "copy" or "shm". A worker with its own model loads the policy from `folder`."""
    if way == "shared":
        with RolloutWorker(policy, config=config, tokenizer=tokenizer) as worker:
            yield Synced(worker, in_place(worker))
        return
    if way == "copy":
        with RolloutWorker(folder, config=own_copy(config), tokenizer=tokenizer) as worker:
            yield Synced(worker, copied(worker, policy))
    else:
        with remote_worker(folder, own_copy(config), torch.get_num_threads()) as remote:
            yield Synced(remote, sent(remote, policy))


def own_copy(config: RolloutConfig) -> RolloutConfig:
    """Return the configuration of a worker that loads the policy's folder, in the trainer's dtype."""
    return replace(config, dtype="float32")


def in_place(worker: RolloutWorker) -> Update:
    """Make a worker on the policy's own module: no byte moves."""

    def update(change: Callable[[], object]) -> SyncReport:
        with worker.weight_update() as changing:
            change()
        if changing.report is None:
            raise RuntimeError("the update ended without a report")
        return changing.report

    return update


def copied(worker: RolloutWorker, policy: PreTrainedModel) -> Update:
    """Make a worker that gets the weights by one copy within the process."""

    def update(change: Callable[[], object]) -> SyncReport:
        change()
        return worker.receive_weights(WeightStream.of(policy))

    return update


def sent(worker: Worker, policy: PreTrainedModel, in_flight: str = "keep") -> Update:
    """Start a worker in its own process, which gets the weights through shared memory."""

    def update(change: Callable[[], object]) -> SyncReport:
        change()
        return worker.receive_weights(policy, in_flight=in_flight)

    return update
