"""Bring adapters to all replicas of a fleet, and know under which of them a request runs.

Invariants
----------
* A replica knows an adapter by a name of its own for each load. So a name means another adapter from one request to the
  next, on all replicas at once, when all of them have it; what one of them refuses, none has.
* A request that was sent ends under the adapter that it was sent with.
* Versions of a name go on counting where it was dropped: two adapters of one name never have one version.
* A replica that is started again reads the folders again, and of a name of the hub the commit that was found when it
  was loaded; one that finds another adapter there takes no requests.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from samebit.rollout.adapters.loading import AdapterOptions, check_in_flight
from samebit.rollout.adapters.registry import FIRST, FIRST_NUMBER
from samebit.rollout.errors import AdapterError, NoReplicaError, RequestError
from samebit.rollout.fleet.crew import Crew
from samebit.rollout.fleet.port import Wanted, WantedAdapter
from samebit.rollout.models.hub import commit_of, is_name
from samebit.weight_sync import SyncReport

if TYPE_CHECKING:
    from samebit.rollout.adapters.loading import AdapterKeywords

_MARK = "#"
_FIRST_LOADED = 1 << 64
"""Begins the numbers of a fleet's adapters, which no process draws for one of its own."""


class InnerAdapter(NamedTuple):
    """Says what a request's adapter is at the replicas: its name there, and its number in the digests of its blocks."""

    name: str | None
    number: int


class FleetAdapters:
    """Knows the adapters of a fleet. own: names that each replica has from its model's folder."""

    def __init__(self, crew: Crew, own: Sequence[str]) -> None:
        self.sending = threading.RLock()
        """Held from the moment at which a request finds its adapter until it is on its way."""
        self._crew = crew
        self._own = tuple(own)
        self._known: dict[str, WantedAdapter] = {}
        self._last_versions: dict[str, int] = {}
        self._turn = threading.Lock()
        self._numbers = itertools.count(_FIRST_LOADED)

    def names(self) -> list[str]:
        """Return the names that a request may give."""
        return [*self._own, *self._known]

    def resolve(self, name: str | None) -> InnerAdapter:
        """Return the adapter that a request names.

        Raises:
            RequestError: there is no such adapter.
        """
        if name is None or name in self._own:
            of_folder = name in (None, FIRST) and FIRST in self._own
            return InnerAdapter(name, FIRST_NUMBER if of_folder else 0)
        found = self._known.get(name)
        if found is None:
            raise RequestError(f"adapter={name!r} is not known; there are {', '.join(self.names())}")
        return InnerAdapter(found.inner, found.number)

    def load(self, name: str, source: object, options: AdapterKeywords) -> SyncReport:
        """Let all replicas read an adapter from a folder or the hub, and requests from now on find it under this name.

        Raises:
            AdapterError: a name, a version or an adapter that will not do, or replicas that read different ones.
            ModelLoadError: no such folder; or a name that is not known, or not to be reached.
            TypeError: the source is no folder.
            NoReplicaError: all replicas are dead.
        """
        asked = AdapterOptions(**options)
        if asked.number is not None or asked.alias is not None:
            raise AdapterError("a fleet numbers its adapters and names them at the replicas: no number= and no alias=")
        if not isinstance(source, str | Path):
            raise TypeError(
                "a fleet takes adapters from a folder that every replica can read, now and when one is started again, "
                f"not from {type(source).__name__}"
            )
        if not (isinstance(name, str) and name) or name in self._own:
            raise AdapterError(
                f"an adapter's name must be a string that is not empty nor the model's own, got {name!r}"
            )
        revision = commit_of(source, asked.revision, "adapter") if is_name(source) else asked.revision
        with self._turn:
            before = self._known.get(name)
            current = self._last_versions.get(name, 0)
            version = current + 1 if asked.version is None else asked.version
            if version <= current:
                raise AdapterError(f"version must be above the adapter's current {current}, got {version}")
            number = next(self._numbers)
            wanted = WantedAdapter(
                f"{name}{_MARK}{number - _FIRST_LOADED}", str(source), version, number, asked.config,
                asked.autocast, name, revision=revision,
            )  # fmt: skip
            report = self._read_everywhere(wanted)
            with self.sending:
                self._known[name] = replace(wanted, digest=report.digest)
                self._last_versions[name] = version
            if before is not None:
                self._forget(before, asked.in_flight)
            return report

    def drop(self, name: str, in_flight: str) -> None:
        """Forget a loaded adapter, on all replicas.

        Raises:
            AdapterError: none was loaded under this name.
        """
        check_in_flight(in_flight)
        with self._turn:
            if name not in self._known:
                raise AdapterError(f"no adapter {name!r} was loaded; loaded are: {', '.join(self._known) or 'none'}")
            with self.sending:
                dropped = self._known.pop(name)
            self._forget(dropped, in_flight)

    def _read_everywhere(self, wanted: WantedAdapter) -> SyncReport:
        self._crew.wanted.adapters[wanted.inner] = wanted
        try:
            reports: list[SyncReport] = self._crew.command(
                "load_adapter", wanted.inner, wanted.folder, **wanted.options()
            )
            if not reports:
                raise NoReplicaError("no replica is alive to take an adapter")
            digest = reports[0].digest
            # the digest is told first: who reads the adapter after the look below compares it itself
            self._crew.wanted.adapters[wanted.inner] = replace(wanted, digest=digest)
            late = {one.read.get(wanted.inner, digest) for one in self._crew.living()}
            if {*late, *(report.digest for report in reports)} != {digest}:
                raise AdapterError(
                    f"the replicas read different adapters from {wanted.folder}: it has changed meanwhile"
                )
        except BaseException:
            self._forget(wanted, "finish")
            raise
        return reports[0]

    def _forget(self, adapter: WantedAdapter, in_flight: str) -> None:
        del self._crew.wanted.adapters[adapter.inner]
        self._crew.command("forget_adapter", adapter.inner, in_flight)


def is_known(inner: str | None, wanted: Wanted) -> bool:
    """Return whether replicas have the adapter of this name there: one that was loaded may be forgotten by now."""
    return inner is None or _MARK not in inner or inner in wanted.adapters
