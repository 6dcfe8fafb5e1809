"""Report what a trainer has written in place as an update.

Invariant: what a report does not know it does not say: that nothing changed (`Marks`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from samebit.weight_sync.digest import digest_of, hexadecimal, scan
from samebit.weight_sync.in_place.marks import Marks
from samebit.weight_sync.manifest import Manifest, NonFiniteWeightError, live_tensors
from samebit.weight_sync.report import SyncReport


class InPlaceChanges:
    """Tells which tensors of a module have changed since they were last accepted."""

    def __init__(self, module: nn.Module, manifest: Manifest) -> None:
        self._module = module
        self._manifest = manifest
        self._names = [names[0] for names in manifest.ties]
        self._seen = self._marks()

    def accept(self) -> None:
        """Take the tensors as they are now: what has changed is no part of the next report."""
        self._seen = self._marks()

    def follow(self, manifest: Manifest) -> None:
        """Go on with a manifest of other ties; a tensor that was not listed by its name has changed."""
        self._manifest = manifest
        self._names = [names[0] for names in manifest.ties]

    def names(self) -> tuple[str, ...]:
        """Return the tensors that are seen to have changed."""
        return self._marks().changed_since(self._seen)

    def report(self, version: int, seconds: float, *, read: bool = False) -> SyncReport:
        """Accept the tensors, as a full update. Of their values only samples are read unless `read`, which adds the
        digest.

        Raises:
            NonFiniteWeightError: NaN or infinity, in what was read.
        """
        digest = self._read() if read else None
        marks = self._marks()
        changed, self._seen = marks.changed_since(self._seen), marks
        return SyncReport(
            version=version,
            tensors=len(self._names),
            bytes=self._bytes(changed) if changed else None,
            seconds=seconds,
            changed=changed or None,
            casts=(),
            digest=digest,
            verified=read,
            dense_bytes=self._bytes(self._names),
        )

    def added(self, before: tuple[str, ...], report: SyncReport) -> SyncReport:
        """Return the report of an update that was written over changes in place, those `before` it: they count too."""
        changed = tuple(dict.fromkeys((*before, *(report.changed or ()))))
        return replace(report, changed=changed or None, bytes=self._bytes(changed) if changed else None)

    def _marks(self) -> Marks:
        return Marks(live_tensors(self._module), self._names)

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self._manifest.specs[name].num_bytes for name in names)

    def _read(self) -> str:
        tensors = live_tensors(self._module)
        scans = {name: scan(tensors[name]) for name in self._names}
        bad = [name for name, found in scans.items() if not found.finite]
        if bad:
            raise NonFiniteWeightError(f"NaN or infinity in {', '.join(bad)}")
        return hexadecimal(digest_of({name: found.digest for name, found in scans.items()}))
