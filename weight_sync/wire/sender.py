"""Run the trainer's side of a sync: announce, fill buckets, wait for the outcomes.

Invariants
----------
* The weights are read once, tensor by tensor, after every receiver has accepted the announcement.
* While the receivers copy out of one bucket the other is filled; beyond the two buckets only the base of deltas, where
  deltas are asked for, takes memory.
* However a sync ends, the stream has been gone through: other ranks may be gathering the same tensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samebit.weight_sync.arithmetic import arithmetic_here
from samebit.weight_sync.closing import Closing
from samebit.weight_sync.digest import Bytes, Lanes, add_digests, digest_of, hexadecimal, scan_bytes
from samebit.weight_sync.manifest import NonFiniteWeightError
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.wire.buckets import ALIGN, Ending, Writer
from samebit.weight_sync.wire.delta import DeltaEncoder
from samebit.weight_sync.wire.link import Announcement, Base, Outcome, SenderLink, SyncRefusedError, Tie
from samebit.weight_sync.wire.sharded import Sharded
from samebit.weight_sync.wire.stream import WeightStream, exhaust_after_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SendReport:
    """Reports one sync, at the sender.

    Attributes:
        sent_bytes: The payload that was sent.
        dense_bytes: The payload of a full update.
        delta: Only differences were sent.
        digest: The digest of the weights as sent.
        versions: The version of each receiver's weights now.
    """

    tensors: int
    sent_bytes: int
    dense_bytes: int
    seconds: float
    delta: bool
    digest: str
    casts: tuple[str, ...]
    versions: tuple[int, ...]


@dataclass
class _DeltaBase:
    """Holds the bits that the receivers have; unreliable while `known` is None."""

    tensors: dict[str, Bytes] = field(default_factory=dict)
    known: Base | None = None


class WeightSender(Closing):
    """Sends weights over a link, any number of times."""

    no_deltas = ""
    """Says why this transport sends none, where it does not."""

    def __init__(self, link: SenderLink) -> None:
        self.link = link
        self._base = _DeltaBase()

    def send(self, weights: object, *, delta: bool = False, dtype: torch.dtype | None = None) -> SendReport:
        """Send a module, a dict, or a `WeightStream`.

        Args:
            weights: A module, a dict of tensors or a `WeightStream`.
            delta: Send only what changed since the last update with `delta=True`; all weights are sent when a receiver
                lacks that update. Costs a copy of the weights in host memory.
            dtype: The dtype to which floating tensors of a module or dict are cast first.

        Raises:
            TypeError, ValueError: something else was given; nothing was sent.
            SyncRefusedError: the weights do not fit; nothing was written.
            SyncBrokenError: a receiver went away, took too long, or failed.
            NonFiniteWeightError: NaN or infinity; receivers that had begun to write have incomplete weights.
        """
        stream = _as_stream(weights, dtype)
        if why := self._why_not(delta):
            exhaust_after_error(stream)
            raise ValueError(why)
        try:
            return self._send(stream, delta)
        except BaseException:
            self._base.known = None
            exhaust_after_error(stream)
            raise

    def close(self) -> None:
        self.link.close()

    def _why_not(self, delta: object) -> str:
        """Return what is wrong with this `delta`, or nothing."""
        if not isinstance(delta, bool):
            return f"delta must be True or False, got {delta!r}"
        return self.no_deltas if delta else ""

    def _send(self, stream: WeightStream, delta: bool) -> SendReport:
        if not delta:
            self._base = _DeltaBase()
        began = time.monotonic()
        announced = self._announcement(stream)
        base = announced.base
        answer = self.link.announce(announced)
        if answer.refused is not None:
            raise SyncRefusedError(answer.refused)
        if base is not None and answer.full:
            logger.warning("a receiver lacks version %d, the base of this delta: all weights are sent", base.version)
        agreed = announced.agreed(answer)
        as_delta = agreed.base is not None
        if not as_delta:
            self._base = _DeltaBase()
        self._base.known = None
        filling = _Filling(self.link)
        try:
            digests = {
                name: self._send_weight(filling, index, name, weight, as_delta=as_delta, keep=delta)
                for index, name, weight in _indexed(stream, agreed.specs)
            }
        except BaseException as error:
            filling.break_off(error)
            raise
        total = digest_of(digests)
        filling.flush(Ending.LAST, total)
        outcomes = self.link.outcomes()
        _check(outcomes)
        if delta:
            self._base.known = _common_base(outcomes, hexadecimal(total))
        return SendReport(
            tensors=len(agreed.tensors),
            sent_bytes=filling.sent,
            dense_bytes=sum(spec.num_bytes for spec in agreed.tensors),
            seconds=time.monotonic() - began,
            delta=as_delta,
            digest=hexadecimal(total),
            casts=stream.casts,
            versions=tuple(outcome.version for outcome in outcomes),
        )

    def _announcement(self, stream: WeightStream) -> Announcement:
        """Return what begins a sync; without ties where the base has each tensor under all its names, and with what
        only images go through as any other tensor where the base has it."""
        kept = frozenset() if self._base.known is None else self._base.tensors.keys()
        of_images = stream.of_images if kept.isdisjoint(stream.of_images) else ()
        coming = stream.specs.keys() - set(of_images)
        ties = {} if kept == coming else stream.ties
        return Announcement(
            tuple(stream.specs.values()),
            self._base.known if kept == coming - ties.keys() else None,
            stream.casts,
            arithmetic=arithmetic_here(),
            ties=tuple(Tie(first, later) for later, first in ties.items()),
            of_images=of_images,
        )

    def _send_weight(
        self, filling: _Filling, index: int, name: str, weight: Tensor | Sharded, *, as_delta: bool, keep: bool
    ) -> int:
        """Send a whole tensor, or its changes; return its digest."""
        lanes = Lanes.of(weight.dtype)
        if isinstance(weight, Sharded):
            if not (as_delta or keep):
                return filling.add_parts(index, name, map(self.link.readable, weight.parts()), lanes)
            weight = weight.whole()
        source = self.link.readable(weight)
        if as_delta:
            found = scan_bytes(source, lanes)
            if not found.finite:
                raise _not_finite(name)
            filling.add_changes(index, source, self._base.tensors[name], weight.element_size())
            return found.digest
        digest = filling.add_tensor(index, name, source, lanes)
        if keep:
            self._base.tensors[name] = source.copy()
        return digest


class _Filling:
    """Fills the buckets of one sync, one after the other. `sent` counts the payload."""

    def __init__(self, link: SenderLink) -> None:
        self._link = link
        self._sequence = 0
        self._writer: Writer | None = None
        self.sent = 0

    def add_parts(self, index: int, name: str, parts: Iterable[Any], lanes: Lanes) -> int:
        """Add the parts of one tensor, in order, each but the last a multiple of 64 bytes; return its digest."""
        digests: list[int] = []
        begin = 0
        for part in parts:
            digests.append(self.add_tensor(index, name, part, lanes, begin))
            begin += len(part)
        return add_digests(digests)

    def add_tensor(self, index: int, name: str, source: Any, lanes: Lanes, begin: int = 0) -> int:
        """Add a tensor, or the part of one that begins at byte `begin`; return its digest."""
        digests: list[int] = []
        offset = 0
        while offset < len(source):
            bucket = self._bucket(ALIGN)
            piece = source[offset : offset + bucket.room]
            scanned = bucket.copy(index, begin + offset, piece, lanes)
            if not scanned.finite:
                raise _not_finite(name)
            digests.append(scanned.digest)
            offset += len(piece)
        self.sent += len(source)
        return add_digests(digests)

    def add_changes(self, index: int, source: Bytes, base: Bytes, element: int) -> None:
        encoder = DeltaEncoder(self._link.bucket_bytes - ALIGN)
        for begin, end in encoder.pieces(source, element):
            encoded = encoder.encode(source[begin:end], base[begin:end], element)
            if encoded is not None:
                self._bucket(encoded.size).add(index, encoded.kind, begin, encoded.parts)
                self.sent += encoded.size

    def flush(self, ending: Ending, total: int = 0) -> None:
        """Send the bucket that is being filled."""
        header = self._bucket(0).seal(self._sequence, ending, total)
        self._writer = None
        self._sequence += 1
        self._link.send_bucket(header)

    def break_off(self, error: BaseException) -> None:
        """Tell the receivers that no more will come, if they can still be told."""
        with suppress(SyncBrokenError):
            reason = f"{type(error).__name__}: {error}"
            self._link.send_bucket(self._bucket(0).reason(self._sequence, reason))
            self._link.outcomes()

    def _bucket(self, room: int) -> Writer:
        """Return the current bucket if it has `room` bytes left, otherwise the next one."""
        if self._writer is not None and self._writer.room < room:
            self.flush(Ending.MORE)
        if self._writer is None:
            self._writer = self._link.open_bucket()
        return self._writer


def _as_stream(weights: object, dtype: torch.dtype | None) -> WeightStream:
    if isinstance(weights, nn.Module | Mapping):
        return WeightStream.of(weights, dtype=dtype)
    if not isinstance(weights, WeightStream):
        raise TypeError(f"weights are a module, a dict of tensors or a WeightStream, not a {type(weights).__name__}")
    if dtype is not None:
        exhaust_after_error(weights)
        raise ValueError("dtype= casts a module or a dict; a WeightStream gives its tensors as it announced them")
    return weights


def _indexed(stream: WeightStream, names: Iterable[str]) -> Iterator[tuple[int, str, Tensor | Sharded]]:
    index = {name: number for number, name in enumerate(names)}
    for name, weight in stream.weights(index):
        yield index[name], name, weight


def _not_finite(name: str) -> NonFiniteWeightError:
    return NonFiniteWeightError(f"{name} holds NaN or infinity in the dtype in which it is sent")


def _check(outcomes: list[Outcome]) -> None:
    failures = [outcome.failed for outcome in outcomes if outcome.failed is not None]
    if failures:
        raise SyncBrokenError(f"{len(failures)} of {len(outcomes)} receivers failed: {'; '.join(failures)}")


def _common_base(outcomes: list[Outcome], digest: str) -> Base | None:
    """Return the base of the next delta, if all receivers are at one version with the bits that were sent."""
    versions = {outcome.version for outcome in outcomes}
    same = len(versions) == 1 and all(outcome.digest == digest for outcome in outcomes)
    return Base(versions.pop(), digest) if same else None
