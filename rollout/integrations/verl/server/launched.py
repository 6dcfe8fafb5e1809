"""Know the servers of this process's replicas, for the functions of verl that have no way to them.

Invariants
----------
* `check_servers` raises the cause once the watch of a server has told of its end, which takes a second; `ask_servers`
  does not wait for that second.
* A server is watched once in a process, and counted once, however many replicas there stand for it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import ray

from samebit.rollout.errors import WorkerLostError
from samebit.rollout.integrations.ray import wait_for
from samebit.rollout.integrations.verl.server.metrics import of_servers

logger = logging.getLogger(__name__)

ASK_SECONDS = 5.0
"""Seconds that a server has to answer that it is well."""


@dataclass(eq=False)
class Server:
    """Holds what this process knows of a server, for all replicas in it that stand for that server.

    failure: what ended it, as far as its watch has told. seen: its numbers at the last look.
    """

    server_handle: Any
    server_address: str
    is_policy: bool
    failure: Exception | None = None
    seen: dict[str, float] = field(default_factory=dict)

    def watch(self) -> None:
        """Wait for the end of the server, and note it."""
        try:
            wait_for(self.server_handle.watch.remote())
        except Exception as error:
            self.failure = error
            logger.error("%s: %s", self.server_address, error)


_launched: WeakSet[Server] = WeakSet()


def watched(handle: Any, address: str, *, is_policy: bool) -> Server:
    """Return the server of this handle, and watch it, unless this process does.

    It is known as long as it is watched, or a replica has it. verl makes copies of replicas, at each step with dynamic
    resources, only to ask for their names.
    """
    known = next((server for server in _launched if server.server_handle == handle), None)
    if known is not None:
        return known
    server = Server(handle, address, is_policy)
    _launched.add(server)
    threading.Thread(target=server.watch, name=f"{address}-watch", daemon=True).start()
    return server


def check_servers() -> None:
    """Raise if a server of this process died or broke, as far as its watch has told."""
    for server in _launched:
        if server.failure is not None:
            raise _lost(server, server.failure)


def ask_servers() -> None:
    """Ask each server, where something failed just now. One that is slow to answer is not lost."""
    check_servers()
    asked = [(server, server.server_handle.check_usable.remote()) for server in _launched]
    for server, answer in asked:
        try:
            wait_for(answer, timeout=ASK_SECONDS)
        except TimeoutError:
            logger.warning("%s did not answer within %s s", server.server_address, ASK_SECONDS)
        except Exception as error:
            raise _lost(server, error) from error


def _lost(server: Server, cause: Exception) -> WorkerLostError:
    error = WorkerLostError(f"{server.server_address} is lost: {cause}")
    error.__cause__ = cause
    return error


def server_metrics() -> dict[str, float]:
    """Return what the policy's servers did since the last call, under verl's kind of names."""
    servers = _policies()
    before = [server.seen for server in servers]
    for server, stats in zip(servers, ray.get([s.server_handle.stats.remote() for s in servers]), strict=True):
        server.seen = stats
    return of_servers(before, [server.seen for server in servers])


def weights_in_servers() -> set[int]:
    """Return the trainer's steps whose weights are, bit for bit, those that all servers of the policy have."""
    held = ray.get([server.server_handle.steps_of_weights.remote() for server in _policies()])
    return set.intersection(*held) if held else set()


def _policies() -> list[Server]:
    return [server for server in _launched if server.is_policy]
