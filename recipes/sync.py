"""How the worker gets the trainer's weights: on one module, by a copy within the process, or through shared memory.

However they travel, a run is the same bit for bit: same samples, same losses, same weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from samebit.recipes.remote import remote_worker
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams
from samebit.weight_sync import SyncReport, WeightStream

if TYPE_CHECKING:
    from samebit.rollout.integrations.ray import RayWorker


class Worker(Protocol):
    """What a recipe asks of a worker, wherever it runs."""

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]: ...


Update = Callable[[Callable[[], object]], SyncReport]
"""Calls the function, which changes the policy's weights, and brings the worker to them."""


@dataclass(frozen=True)
class Synced:
    """A worker that generates with the policy's weights, as of the last `update`."""

    worker: Worker
    update: Update


@contextmanager
def synced(
    way: str, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, config: RolloutConfig
) -> Iterator[Synced]:
    """`way` is "shared", "copy" or "shm". `folder` holds the policy as it is now, for a worker with its own model."""
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
    """For a worker that loads the policy's folder itself, in the dtype that the trainer has it in."""
    return replace(config, dtype="float32")


def in_place(worker: RolloutWorker) -> Update:
    """The worker runs on the policy's own module: no byte moves."""

    def update(change: Callable[[], object]) -> SyncReport:
        with worker.weight_update() as changing:
            change()
        if changing.report is None:
            raise RuntimeError("the update ended without a report")
        return changing.report

    return update


def copied(worker: RolloutWorker, policy: PreTrainedModel) -> Update:
    """One copy within the process."""

    def update(change: Callable[[], object]) -> SyncReport:
        change()
        return worker.receive_weights(WeightStream.of(policy))

    return update


def sent(worker: "RayWorker", policy: PreTrainedModel, in_flight: str = "keep") -> Update:
    """Through shared memory, to the worker's own process."""

    def update(change: Callable[[], object]) -> SyncReport:
        change()
        return worker.receive_weights(policy, in_flight=in_flight)

    return update
