"""Hold the weights a worker runs on: whose they are, how they are replaced.

Invariants
----------
* The manifest is taken once, while the weights are there; updates are checked against it even when they sleep. Of a
  shared module it has the ties that are there at each update: the trainer may tie weights, and untie them.
* On a shared module nothing is ever reallocated: the trainer's optimizer holds the same tensors.
* No locks here: the caller holds the worker's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from samebit.kernels.binding.binding import binding_of, is_bound
from samebit.kernels.binding.users import Users
from samebit.rollout.errors import WorkerStateError
from samebit.rollout.guard import contained
from samebit.rollout.models.loading import is_sharded
from samebit.weight_sync import (
    Manifest,
    NonFiniteWeightError,
    PreparedUpdate,
    SyncBrokenError,
    SyncReport,
    UpdateTerms,
    open_update,
)
from samebit.weight_sync.apply import first_non_finite
from samebit.weight_sync.in_place.changes import InPlaceChanges
from samebit.weight_sync.in_place.watch import WeightWatch
from samebit.weight_sync.manifest import live_tensors
from samebit.weight_sync.sleeping import SleepingWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedUpdate:
    """Holds an update that was checked, and the ties of the weights it was checked against."""

    prepared: PreparedUpdate
    ties: tuple[tuple[str, ...], ...]


class WorkerWeights:
    """Holds the weights of one worker. memory: frees and restores them.

    users: where the workers on a shared module are known, that of its binding. dequantize: take quantized folders.
    exact: take no weights of a trainer whose GPU computes other bits. watch: that of the engine on these weights.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        shared: bool,
        users: Users[Any] | None = None,
        dequantize: bool = False,
        exact: bool = True,
        watch: WeightWatch | None = None,
    ) -> None:
        self.module = module
        self.shared = shared
        self._dequantize = dequantize
        self._exact = exact
        self._watch = WeightWatch() if watch is None else watch
        self.users: Users[Any] = Users() if users is None else users
        self.manifest = Manifest.of(module)
        self._adapters = binding_of(module).adapters if is_bound(module) else None
        self._in_place = InPlaceChanges(module, self.manifest) if shared else None
        self.memory = SleepingWeights(module, self.manifest)

    @contextmanager
    def open(self, source: object, terms: UpdateTerms, *, version: int | None) -> Iterator[OpenedUpdate]:
        """Give an update from `source` that was checked; `version` is that of the weights now, if complete."""
        self.check_module()
        terms = replace(terms, dequantize=self._dequantize, other_arithmetic=not self._exact)
        manifest = self._manifest_now()
        with open_update(source, self.module, manifest, terms, version=version) as update:
            yield OpenedUpdate(update, manifest.ties)

    def check_ties(self, update: OpenedUpdate) -> None:
        """Raise if the trainer has tied or untied weights since an update was checked. Under the lock.

        Raises:
            SyncBrokenError: it has, by name; nothing was written.
        """
        now = self._manifest_now().ties
        if now != update.ties:
            were, are = ([names for names in ties if len(names) > 1] for ties in (update.ties, now))
            raise SyncBrokenError(
                f"weights were tied or untied while this update waited (one tensor each: {were or 'none'} -> "
                f"{are or 'none'}), nothing was written: send them again"
            )

    def write(self, update: OpenedUpdate, version: int, *, verify: bool) -> SyncReport:
        """Copy a checked update in; on a shared module, what the trainer changed in place counts too."""
        write = update.prepared.write
        if self._in_place is None:
            return _warned_if_unchanged(write(self.module, version=version, verify=verify))
        self._follow_ties(self._in_place)
        before = self._in_place.names()
        report = write(self.module, version=version, verify=verify)
        self._in_place.accept()
        return self._in_place.added(before, report)

    def accept(self) -> None:
        """Take the shared weights as they are now: what has changed is no part of this worker's next report."""
        self.check_module()
        if self._in_place is not None:
            self._follow_ties(self._in_place)
            self._in_place.accept()

    def check_module(self) -> None:
        """Raise if a shared module is not what was bound any more, or was sharded.

        Raises:
            BindingError: its modules are not those that were bound.
            WorkerStateError: its parameters are shards.
        """
        if not self.shared or not is_bound(self.module):
            return
        binding = binding_of(self.module)
        binding.check()
        if binding.adapters is not self._adapters:  # the trainer has bound it again, with other adapters
            self._watch.extend()  # before a request goes through one that has come
            self._adapters = binding.adapters
            self.manifest = Manifest.of(self.module)
            self._in_place = InPlaceChanges(self.module, self.manifest)
        if is_sharded(self.module.get_parameter("lm_head.weight")):
            raise WorkerStateError(
                "the module was sharded (DTensor) after this worker was built on it, and can not be served in place: "
                "give the worker a model of its own, and send it the weights"
            )

    def accept_in_place(self, version: int, seconds: float, *, read: bool = False) -> SyncReport:
        """Take shared parameters that the trainer changed itself; see `InPlaceChanges.report`.

        Raises:
            WorkerStateError: what was changed is the shape or the dtype of a tensor, or its values are gone, by name.
        """
        self.check_module()
        self._check_kinds()
        if self._in_place is None:
            raise WorkerStateError("only a shared module is written in place")
        self._follow_ties(self._in_place)
        return self._in_place.report(version, seconds, read=read)

    def check_finite(self) -> None:
        self._check_kinds()
        bad = first_non_finite(live_tensors(self.module))
        if bad is not None:
            raise NonFiniteWeightError(f"{bad} holds NaN or infinity")

    def _manifest_now(self) -> Manifest:
        return self.manifest.with_ties_of(self.module) if self.shared else self.manifest

    def _follow_ties(self, in_place: InPlaceChanges) -> None:
        """Know which names are one tensor now. Under the lock."""
        self.manifest = self._manifest_now()
        in_place.follow(self.manifest)

    def _check_kinds(self) -> None:
        others = self.manifest.differences(self.module)
        if others:
            raise WorkerStateError(
                f"the weights are not what this worker was built for: {'; '.join(others)}. Restore them and call "
                "receive_weights(), or build a new worker"
            )


def _warned_if_unchanged(report: SyncReport) -> SyncReport:
    """Return the report; warn of an update that changed nothing: it is legal, and mostly a mistake."""
    if not report.changed:
        with contained("warning of an update that changed nothing"):
            logger.warning("weight update %d changed no parameter", report.version)
    return report
