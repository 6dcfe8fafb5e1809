"""Know the replicas of this process, for the functions of verl that have no way to them.

Invariant: `check_servers` raises the cause once the watch of a server has told of its end, which takes a second;
`ask_servers` does not wait for that second.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol
from weakref import WeakSet

import ray

from samebit.rollout.errors import WorkerLostError
from samebit.rollout.integrations.ray import wait_for
from samebit.rollout.integrations.verl.server.metrics import of_servers

logger = logging.getLogger(__name__)

ASK_SECONDS = 5.0
"""Seconds that a server has to answer that it is well."""


class Replica(Protocol):
    """Describes a server that was launched, as this process sees it.

    failure: what ended it, as far as its watch has told. seen: its numbers at the last look.
    """

    failure: Exception | None
    seen: dict[str, float]

    @property
    def is_policy(self) -> bool: ...

    @property
    def server_handle(self) -> Any: ...

    @property
    def server_address(self) -> str: ...


_launched: WeakSet[Replica] = WeakSet()


def note_launched(replica: Replica) -> None:
    """Count this replica among those of the process, as long as it lives."""
    _launched.add(replica)


def check_servers() -> None:
    """Raise if a server of this process died or broke, as far as its watch has told."""
    for replica in _launched:
        if replica.failure is not None:
            raise _lost(replica, replica.failure)


def ask_servers() -> None:
    """Ask each server, where something failed just now. One that is slow to answer is not lost."""
    check_servers()
    asked = [(replica, replica.server_handle.check_usable.remote()) for replica in _launched]
    for replica, answer in asked:
        try:
            wait_for(answer, timeout=ASK_SECONDS)
        except TimeoutError:
            logger.warning("%s did not answer within %s s", replica.server_address, ASK_SECONDS)
        except Exception as error:
            raise _lost(replica, error) from error


def _lost(replica: Replica, cause: Exception) -> WorkerLostError:
    error = WorkerLostError(f"{replica.server_address} is lost: {cause}")
    error.__cause__ = cause
    return error


def server_metrics() -> dict[str, float]:
    """Return what the policy's servers did since the last call, under verl's kind of names."""
    replicas = _policies()
    before = [replica.seen for replica in replicas]
    for replica, stats in zip(replicas, ray.get([r.server_handle.stats.remote() for r in replicas]), strict=True):
        replica.seen = stats
    return of_servers(before, [replica.seen for replica in replicas])


def weights_in_servers() -> set[int]:
    """Return the trainer's steps whose weights are, bit for bit, those that all servers of the policy have."""
    held = ray.get([replica.server_handle.steps_of_weights.remote() for replica in _policies()])
    return set.intersection(*held) if held else set()


def _policies() -> list[Replica]:
    return [replica for replica in _launched if replica.is_policy]
