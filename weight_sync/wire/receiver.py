"""Run the worker's side of a sync: check the announcement, then copy what arrives into the model.

Invariants
----------
* The announcement is checked, and the first bucket has come, before `write` may be called: a sender that goes away
  before that has changed nothing.
* No record is used before the seal of its bucket was checked, and none goes where it was not announced.
* `write` returns when all announced tensors are there with the sender's digest, and agree where they are
  tied; or raises, and the weights are a mixture.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor, nn

from samebit.weight_sync.apply import verify_digests
from samebit.weight_sync.arithmetic import arithmetic_of
from samebit.weight_sync.digest import add_digests, digest_of, hexadecimal, readable_bytes, scan
from samebit.weight_sync.folder_names import Place
from samebit.weight_sync.manifest import Manifest, TensorSpec, UpdateTerms, WeightMismatchError, live_tensors
from samebit.weight_sync.report import SyncBrokenError, SyncReport
from samebit.weight_sync.wire.buckets import BucketHeader, Ending, Kind, Record
from samebit.weight_sync.wire.destination import Destination
from samebit.weight_sync.wire.link import (
    Announcement,
    Answer,
    Base,
    Outcome,
    ReceiverLink,
    SyncRefusedError,
    most_announced,
)
from samebit.weight_sync.wire.stream import WeightStream

logger = logging.getLogger(__name__)

_WHOLE = frozenset({Kind.DENSE})
_CHANGES = frozenset(Kind)


class StreamUpdate:
    """Writes an update from an iterator in this process: one copy, no buckets."""

    base_version = None

    def __init__(self, stream: WeightStream, manifest: Manifest, terms: UpdateTerms) -> None:
        places = manifest.fit(stream.specs, terms)
        again = stream.ties if manifest.knows_ties(stream.ties, places) else {}
        self._places = {name: place for name, place in places.items() if name not in again}
        self._stream = stream
        self._manifest = manifest

    def write(self, module: nn.Module, *, version: int, verify: bool = False) -> SyncReport:
        specs = {name: self._stream.specs[name] for name in self._places}
        writing = _Writing(module, self._manifest, specs, self._places)
        for name, tensor in self._stream.tensors(self._places):
            writing.destinations[name].put(0, readable_bytes(tensor))
        writing.check_whole(None)
        report = writing.conclude(version, verify=verify)
        return replace(report, casts=(*self._stream.casts, *report.casts))


class LinkUpdate:
    """Writes an update from another process. `outcome`: what to tell the sender, once the update is written."""

    def __init__(
        self, link: ReceiverLink, manifest: Manifest, announced: Announcement, places: Mapping[str, Place]
    ) -> None:
        self._link = link
        self._manifest = manifest
        self._announced = announced
        self._places = places
        self._sizes = [spec.num_bytes for spec in announced.specs.values()]
        self._sequence = 0
        self.outcome: Outcome | None = None
        self._next = self._receive()

    @property
    def base_version(self) -> int | None:
        return None if self._announced.base is None else self._announced.base.version

    def write(self, module: nn.Module, *, version: int, verify: bool = False) -> SyncReport:
        specs = self._announced.specs
        writing = _Writing(module, self._manifest, specs, self._places, self._link.destination)
        ordered = list(specs)
        left_out = {name: 0 for name in specs if name not in self._places}
        is_delta = self._announced.base is not None
        sent = total = 0
        before: Destination | None = None
        for header, records in self._buckets():
            for record in records:
                name = ordered[record.tensor]
                sent += len(record.payload)
                if name in left_out:
                    left_out[name] = add_digests((left_out[name], record.digest))
                    continue
                destination = writing.destinations[name]
                if is_delta and before is not None and before is not destination:
                    before.settle()  # a delta does not say which change of a tensor is the last: the next one's does
                destination.put_change(record) if is_delta else destination.put_record(record)
                before = destination
            total = header.total
        writing.check_changed(total) if is_delta else writing.check_whole(total, left_out)
        report = writing.conclude(version, verify=verify)
        self.outcome = Outcome(version, report.digest or "")
        return replace(report, sent_bytes=sent, casts=(*self._announced.casts, *report.casts))

    def _buckets(self) -> Iterator[tuple[BucketHeader, list[Record]]]:
        while True:
            header, records = self._next
            yield header, records
            if header.ending is Ending.LAST:
                return
            self._next = self._receive()

    def _receive(self) -> tuple[BucketHeader, list[Record]]:
        kinds = _WHOLE if self._announced.base is None else _CHANGES
        found = self._link.next_records(sequence=self._sequence, sizes=self._sizes, kinds=kinds)
        self._sequence += 1
        return found


@contextmanager
def receiving(
    link: ReceiverLink, module: nn.Module, manifest: Manifest, terms: UpdateTerms, *, version: int | None
) -> Iterator[LinkUpdate]:
    """Wait for the next sync and agree to it; on the way out, tell the sender how it ended.

    `version` is the version of the weights now, None where they are incomplete: then no delta is agreed to.

    Raises:
        WeightMismatchError: The announced weights do not fit, or are of a trainer with other bits; nothing was written.
        SyncRefusedError: Another receiver refused; nothing was written.
    """
    announced, places = _agree(link, module, manifest, terms, version=version)
    try:
        update = LinkUpdate(link, manifest, announced, places)
        yield update
    except BaseException as error:
        with suppress(SyncBrokenError):
            link.tell_outcome(Outcome(failed=f"{type(error).__name__}: {error}"))
        raise
    try:
        link.tell_outcome(update.outcome or Outcome(failed="the update was not written"))
    except SyncBrokenError:
        logger.warning("the sender went away before it heard that the update is complete", exc_info=True)


def _agree(
    link: ReceiverLink, module: nn.Module, manifest: Manifest, terms: UpdateTerms, *, version: int | None
) -> tuple[Announcement, dict[str, Place]]:
    """Wait for an announcement and answer it, whatever happens meanwhile; return what will come of it, and places."""
    announced = link.listen(most_announced(manifest.every_spec()))
    try:
        _check_arithmetic(announced.arithmetic, module, terms)
        places = manifest.fit(announced.specs, terms)
        answer = _answer(announced, module, manifest, places, version)
    except BaseException as error:
        reason = str(error) if isinstance(error, WeightMismatchError) else f"{type(error).__name__}: {error}"
        with suppress(SyncBrokenError):
            link.answer(Answer(refused=reason))
        raise
    decided = link.answer(answer)
    if decided.refused is not None:
        raise SyncRefusedError(decided.refused)
    if answer.full:
        logger.warning(
            "asked for all weights, not a delta: its base is not the weights here (version %s), or these are cast, "
            "tied in another way, lack a place for some of it, or need more (a vision tower)",
            version,
        )
    agreed = announced.agreed(decided)
    coming = agreed.specs
    return agreed, {name: place for name, place in places.items() if name in coming}


def _answer(
    announced: Announcement, module: nn.Module, manifest: Manifest, places: Mapping[str, Place], version: int | None
) -> Answer:
    """Return what is to be said to an announcement that fits."""
    later = announced.later
    apart = not manifest.knows_ties(later, places)
    images = any(name in places for name in announced.of_images)
    if announced.base is None:
        return Answer(apart=apart, images=images)
    once = {name: place for name, place in places.items() if name not in later}
    casts = manifest.casts(announced.specs, places)
    all_kept = not (apart or images or casts) and len(places) == len(announced.tensors) - len(announced.of_images)
    as_delta = all_kept and _has_base(announced.base, module, manifest, once, version)
    return Answer(full=not as_delta, apart=apart, images=images)


def _check_arithmetic(announced: str, module: nn.Module, terms: UpdateTerms) -> None:
    """Check that the sender's forward on a GPU has the bits of the one here, where both are on one.

    Raises:
        WeightMismatchError: it has others.
    """
    here = next((arithmetic_of(part.device) for part in module.parameters()), "")
    if announced and here and announced != here and not terms.other_arithmetic:
        raise WeightMismatchError(
            f"the sender computes on {announced}, the model here on {here}: their log-probabilities differ in bits; "
            "allowed: the same GPU and versions on both sides, or a worker with exact=False"
        )


def _has_base(
    base: Base, module: nn.Module, manifest: Manifest, places: Mapping[str, Place], version: int | None
) -> bool:
    """Return whether the weights here are, bit for bit, the base of the delta. Those that sleep are not."""
    if base.version != version or manifest.differences(module):
        return False
    tensors = live_tensors(module)
    here = digest_of({name: scan(place.of(tensors[place.name])).digest for name, place in places.items()})
    return hexadecimal(here) == base.digest


class _Writing:
    """Writes what arrives into the model."""

    def __init__(
        self,
        module: nn.Module,
        manifest: Manifest,
        specs: Mapping[str, TensorSpec],
        places: Mapping[str, Place],
        destination: Callable[[TensorSpec, Tensor], Destination] = Destination,
    ) -> None:
        tensors = live_tensors(module)
        self._began = time.monotonic()
        self._manifest = manifest
        self._specs = specs
        self._places = places
        self.destinations = {
            name: destination(specs[name], place.of(tensors[place.name])) for name, place in places.items()
        }
        self._digests: dict[str, int] = {}

    def check_whole(self, total: int | None, left_out: Mapping[str, int] = MappingProxyType({})) -> None:
        """Check that every tensor came, and that together they have the sender's digest (None within a process), with
        the digests of what came and was left out."""
        torn = [name for name, destination in self.destinations.items() if not destination.whole]
        if torn:
            raise SyncBrokenError(f"the sender ended without all of {', '.join(torn)}")
        self._finish()
        self._digests = {name: destination.digest for name, destination in self.destinations.items()}
        sent = {name: one.sent_digest for name, one in self.destinations.items()}
        if total is not None and digest_of({**sent, **left_out}) != total:
            raise SyncBrokenError("wrong checksum of the weights as a whole")

    def check_changed(self, total: int) -> None:
        """Check that the weights, with these changes, have the sender's digest."""
        self._finish()
        self._digests = {name: scan(one.target).digest for name, one in self.destinations.items()}
        if digest_of(self._digests) != total:
            raise SyncBrokenError("wrong checksum of the weights after the changes")

    def conclude(self, version: int, *, verify: bool) -> SyncReport:
        self._check_ties()
        live = {place.name for place in self._places.values()}
        groups = [names for names in ([n for n in group if n in live] for group in self._manifest.ties) if names]
        touched = {self._places[name].name for name, one in self.destinations.items() if one.changed}
        changed = tuple(names[0] for names in groups if not touched.isdisjoint(names))
        if verify:
            verify_digests({name: one.target for name, one in self.destinations.items()}, self._digests)
        return SyncReport(
            version=version,
            tensors=len(groups),
            bytes=sum(self._manifest.specs[name].num_bytes for name in changed),
            seconds=time.monotonic() - self._began,
            changed=changed,
            casts=tuple(self._manifest.casts(self._specs, self._places)),
            digest=hexadecimal(digest_of(self._digests)),
            verified=verify,
            dense_bytes=sum(spec.num_bytes for spec in self._specs.values()),
        )

    def _finish(self) -> None:
        for destination in self.destinations.values():
            destination.settle()

    def _check_ties(self) -> None:
        """Check that tied weights came with equal bits. (Each was written to the one tensor.)"""
        given = {place.name: name for name, place in self._places.items() if place.is_whole}
        for group in self._manifest.ties:
            names = [given[name] for name in group if name in given]
            if len({self._digests[name] for name in names}) > 1:
                raise SyncBrokenError(f"tied weights came with different values: {', '.join(names)}")
