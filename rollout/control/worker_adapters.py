"""Load and drop the adapters of a worker while it generates.

Invariants
----------
* Generation goes on while an adapter is read, and no request waits for it. Requests that have begun end under what they
  began with, unless the caller has them ended.
* What is refused changes nothing: an adapter is known when all of it is there, and not before.
* Loads under one name are made one after the other: no two adapters have one version. Of a name that was dropped
  nothing is left but the number of its last version: a trainer may give each adapter another.
"""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

from samebit.kernels.layout.lora.adapters import Adapter
from samebit.rollout.adapters.loading import AdapterOptions, check_in_flight, read_adapter
from samebit.rollout.adapters.registry import AdapterRegistry
from samebit.rollout.control.generation_thread import GenerationThread
from samebit.rollout.control.weights.links_in_use import LinksInUse
from samebit.rollout.control.weights.worker_weights import WorkerWeights
from samebit.weight_sync import SyncReport


class WorkerAdapters:
    """Loads and drops the adapters of one worker."""

    def __init__(
        self, registry: AdapterRegistry, thread: GenerationThread, weights: WorkerWeights, links: LinksInUse
    ) -> None:
        self.registry = registry
        self._thread = thread
        self._weights = weights
        self._links = links
        self._mutex = threading.Lock()
        self._turns: WeakValueDictionary[str, threading.RLock] = WeakValueDictionary()

    def load(self, name: str, source: object, asked: AdapterOptions) -> SyncReport:
        """Read an adapter in, and let requests from now on find it under this name."""
        self._thread.check_thread()
        turn = self._turn(self.registry.check_free(name))
        with turn:
            self._thread.status.check_usable()
            before = self.registry.loaded(name)
            with self._links.in_use(source):
                loaded, report = read_adapter(name, source, asked, self._weights.module, self.registry)
            self.registry.put(loaded)
        if before is not None and asked.in_flight == "abort":
            self._abort_requests_of(before.adapter)
        return report

    def _turn(self, name: str) -> threading.RLock:
        """Return the turn of the loads under this name, which lasts as long as one of them has it."""
        with self._mutex:
            return self._turns.setdefault(name, threading.RLock())

    def drop(self, name: str, in_flight: str) -> None:
        """Forget a loaded adapter."""
        check_in_flight(in_flight)
        self._thread.check_thread()
        self._thread.status.check_usable()
        dropped = self.registry.drop(name)
        if in_flight == "abort":
            self._abort_requests_of(dropped)

    def _abort_requests_of(self, adapter: Adapter) -> None:
        self._thread.run(lambda _: self._thread.abort_where(lambda request: request.adapter is adapter))
