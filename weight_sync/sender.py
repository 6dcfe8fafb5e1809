"""The trainer's side of a sync: announce, fill buckets, hear how it ended.

Invariants
----------
* The weights are read once, tensor by tensor, after every receiver has accepted the announcement.
* While the receivers copy out of one bucket the other is filled; no other memory is held, but for the base
  of deltas where they are asked for.
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

from samebit.weight_sync.buckets import ALIGN, Ending, Writer
from samebit.weight_sync.checksum import Bytes, Lanes, add_digests, digest_of, hexadecimal, scan_bytes
from samebit.weight_sync.closing import Closing
from samebit.weight_sync.delta import DeltaEncoder
from samebit.weight_sync.link import Announcement, Base, Outcome, SenderLink, SyncRefusedError
from samebit.weight_sync.manifest import NonFiniteWeightError
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.sharded import Sharded
from samebit.weight_sync.stream import WeightStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SendReport:
    """What a sync moved. sent_bytes: payload on the wire; dense_bytes: what a full update sends; delta: whether
    it went as a difference; digest: of the weights as sent; versions: what each receiver is at now."""

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
    """The bits that the receivers have. Without `known` they are not to be relied on."""

    tensors: dict[str, Bytes] = field(default_factory=dict)
    known: Base | None = None


class WeightSender(Closing):
    """Sends weights over a link, as often as wanted."""

    def __init__(self, link: SenderLink) -> None:
        self.link = link
        self._base = _DeltaBase()

    def send(self, weights: object, *, delta: bool = False, dtype: torch.dtype | None = None) -> SendReport:
        """Send a module, a dict, or a `WeightStream`.

        delta: send what changed since the last update that was sent with `delta=True`; a receiver that has not
        that update gets all. It costs a copy of the weights in host memory. dtype: what floating tensors of a
        module or dict are cast to before they are sent.

        Raises:
            SyncRefusedError: the weights do not fit; nothing was written.
            SyncBrokenError: a receiver went away, took too long, or failed.
            NonFiniteWeightError: NaN or infinity; receivers that had begun to write have incomplete weights.
        """
        stream = _as_stream(weights, dtype)
        if not delta:
            self._base = _DeltaBase()
        try:
            return self._send(stream, delta)
        except BaseException:
            self._base.known = None
            _go_through(stream)
            raise

    def close(self) -> None:
        self.link.close()

    def _send(self, stream: WeightStream, delta: bool) -> SendReport:
        began = time.monotonic()
        base = self._base.known if self._base.tensors.keys() == stream.specs.keys() else None
        answer = self.link.announce(Announcement(stream.specs, base, stream.casts))
        if answer.refused is not None:
            raise SyncRefusedError(answer.refused)
        if base is not None and answer.full:
            logger.warning("a receiver has not version %d, the base of this delta: all weights are sent", base.version)
        as_delta = base is not None and not answer.full
        self._base.known = None
        filling = _Filling(self.link)
        try:
            digests = {
                name: self._send_weight(filling, index, name, weight, as_delta=as_delta, keep=delta)
                for index, name, weight in _indexed(stream)
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
            tensors=len(stream.specs),
            sent_bytes=filling.sent,
            dense_bytes=sum(spec.num_bytes for spec in stream.specs.values()),
            seconds=time.monotonic() - began,
            delta=as_delta,
            digest=hexadecimal(total),
            casts=stream.casts,
            versions=tuple(outcome.version for outcome in outcomes),
        )

    def _send_weight(
        self, filling: _Filling, index: int, name: str, weight: Tensor | Sharded, *, as_delta: bool, keep: bool
    ) -> int:
        """The digest of the tensor, all of which is on its way."""
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
    """The buckets of one sync, filled one after the other. `sent` counts the payload."""

    def __init__(self, link: SenderLink) -> None:
        self._link = link
        self._sequence = 0
        self._writer: Writer | None = None
        self.sent = 0

    def add_parts(self, index: int, name: str, parts: Iterable[Any], lanes: Lanes) -> int:
        """Of one tensor, in order; each but the last a multiple of 64 bytes."""
        digests: list[int] = []
        begin = 0
        for part in parts:
            digests.append(self.add_tensor(index, name, part, lanes, begin))
            begin += len(part)
        return add_digests(digests)

    def add_tensor(self, index: int, name: str, source: Any, lanes: Lanes, begin: int = 0) -> int:
        """A tensor, or what of it begins at byte `begin`."""
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
        """Publish the bucket that is being filled."""
        header = self._bucket(0).seal(self._sequence, ending, total)
        self._writer = None
        self._sequence += 1
        self._link.publish(header)

    def break_off(self, error: BaseException) -> None:
        """Tell the receivers that no more will come, if they can still be told."""
        with suppress(SyncBrokenError):
            reason = f"{type(error).__name__}: {error}"
            self._link.publish(self._bucket(0).reason(self._sequence, reason))
            self._link.outcomes()

    def _bucket(self, room: int) -> Writer:
        """The current bucket if it has so much room, else the next."""
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
        raise ValueError("dtype= casts a module or a dict; a WeightStream gives its tensors as it announced them")
    return weights


def _go_through(stream: WeightStream) -> None:
    """Boundary: the iterator is the caller's own code. What it raises here is logged, since the error that ended the
    sync, often one that the iterator raised itself, is the one to hear of."""
    try:
        stream.exhaust()
    except Exception:
        logger.warning("the rest of the weights could not be gathered either", exc_info=True)


def _indexed(stream: WeightStream) -> Iterator[tuple[int, str, Tensor | Sharded]]:
    index = {name: number for number, name in enumerate(stream.specs)}
    for name, weight in stream.weights():
        yield index[name], name, weight


def _not_finite(name: str) -> NonFiniteWeightError:
    return NonFiniteWeightError(f"{name} holds NaN or infinity, as it was to be sent")


def _check(outcomes: list[Outcome]) -> None:
    failures = [outcome.failed for outcome in outcomes if outcome.failed is not None]
    if failures:
        raise SyncBrokenError(f"{len(failures)} of {len(outcomes)} receivers failed: {'; '.join(failures)}")


def _common_base(outcomes: list[Outcome], digest: str) -> Base | None:
    """What the next delta can build on: all receivers at one version, with the bits that were sent."""
    versions = {outcome.version for outcome in outcomes}
    same = len(versions) == 1 and all(outcome.digest == digest for outcome in outcomes)
    return Base(versions.pop(), digest) if same else None
