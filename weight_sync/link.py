"""What a transport does: the two ends of a link, and what is said over it.

A sync: the sender announces, each receiver answers, buckets follow, each receiver tells the outcome.

Invariants
----------
* Nothing is sent before every receiver has answered. One that refuses stops the sync for all; one that has
  not the base of a delta gets, with all others, a full update.
* Nobody waits for the other longer than the link's timeout: `SyncTimeoutError`. A peer that goes away is a
  `PeerLostError`.
* What comes from a peer is JSON and bytes, checked before use; nothing is unpickled.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from samebit.weight_sync.buckets import BucketHeader, Kind, Record, Writer
from samebit.weight_sync.checksum import DTYPES, readable_bytes
from samebit.weight_sync.closing import Closing
from samebit.weight_sync.destination import Destination
from samebit.weight_sync.manifest import TensorSpec, dtype_name
from samebit.weight_sync.report import SyncBrokenError

DEFAULT_BUCKET = 8 << 20
DEFAULT_TIMEOUT = 300.0
_MOST_DIMENSIONS = 64


class SyncRefusedError(RuntimeError):
    """A receiver refused the announced weights; nothing was sent, nothing was written."""


class PeerLostError(SyncBrokenError):
    """The other side closed the link or died."""


class SyncTimeoutError(SyncBrokenError, TimeoutError):
    """The other side did not do its part within the timeout."""


@dataclass(frozen=True)
class Base:
    """The weights that a delta is a difference to."""

    version: int
    digest: str


@dataclass(frozen=True)
class Announcement:
    """`casts`: what the sender casts, and from what, as a report says it."""

    specs: dict[str, TensorSpec]
    base: Base | None = None
    casts: tuple[str, ...] = ()

    def to_json(self) -> str:
        tensors = [[name, list(spec.shape), dtype_name(spec.dtype)] for name, spec in self.specs.items()]
        base = asdict(self.base) if self.base else None
        return json.dumps({"tensors": tensors, "base": base, "casts": self.casts})

    @classmethod
    def from_json(cls, text: str | bytes) -> Announcement:
        body = parse_object(text)
        specs: dict[str, TensorSpec] = {}
        for entry in _list(body.get("tensors")):
            name, shape, dtype = _three(entry)
            dims = _list(shape)
            known = isinstance(name, str) and isinstance(dtype, str) and dtype in DTYPES
            if not known or name in specs or len(dims) > _MOST_DIMENSIONS:
                raise SyncBrokenError(f"an announcement that is not valid: {entry!r}")
            specs[name] = TensorSpec(name, tuple(_count(dim) for dim in dims), DTYPES[dtype])
        base = body.get("base")
        casts = tuple(_text(cast) or "" for cast in _list(body.get("casts")))
        return cls(specs, None if base is None else _base(base), casts)


@dataclass(frozen=True)
class Answer:
    """`refused`: why nothing may be sent; `full`: a delta will not do, send all."""

    refused: str | None = None
    full: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Answer:
        body = parse_object(text)
        return cls(_text(body.get("refused")), bool(body.get("full")))

    @classmethod
    def of_all(cls, answers: Iterable[Answer]) -> Answer:
        """What several answers come to."""
        each = list(answers)
        reasons = [answer.refused for answer in each if answer.refused is not None]
        return cls("; ".join(reasons) if reasons else None, any(answer.full for answer in each))


@dataclass(frozen=True)
class Outcome:
    """The version and digest that a receiver has now, or why it failed."""

    version: int = 0
    digest: str = ""
    failed: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Outcome:
        body = parse_object(text)
        return cls(_count(body.get("version")), _text(body.get("digest")) or "", _text(body.get("failed")))


class SenderLink(Closing, ABC):
    """The trainer's end. `bucket_bytes` is the size of each of the two buckets of a sync."""

    bucket_bytes: int

    @abstractmethod
    def announce(self, announcement: Announcement) -> Answer:
        """Begin a sync; what the receivers' answers come to."""

    @abstractmethod
    def open_bucket(self) -> Writer:
        """A bucket to fill, once the receivers are done with what was in it."""

    def readable(self, tensor: Tensor) -> Any:
        """The bits of a tensor as the writer takes them."""
        return readable_bytes(tensor)

    @abstractmethod
    def publish(self, header: BucketHeader) -> None:
        """Send the bucket that was opened last."""

    @abstractmethod
    def outcomes(self) -> list[Outcome]:
        """Wait for what each receiver says at the end of the sync."""


class ReceiverLink(Closing, ABC):
    """The worker's end: a source for `receive_weights`."""

    @abstractmethod
    def listen(self) -> Announcement:
        """Wait for the next sync."""

    @abstractmethod
    def answer(self, answer: Answer) -> Answer:
        """Say whether this may begin; what all answers come to."""

    @abstractmethod
    def next_records(
        self, *, sequence: int, sizes: Sequence[int], kinds: frozenset[Kind]
    ) -> tuple[BucketHeader, list[Record]]:
        """Wait for a bucket; what is in it, checked as `open_records` says, and valid until the next call."""

    def destination(self, spec: TensorSpec, target: Tensor) -> Destination:
        """Where records of a tensor go."""
        return Destination(spec, target)

    @abstractmethod
    def finish(self, outcome: Outcome) -> None:
        """Say how it ended."""


def parse_object(text: str | bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SyncBrokenError(f"a message that is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise SyncBrokenError(f"a message that is not an object but {type(body).__name__}")
    return body


def check_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    return float(timeout)


def _base(value: object) -> Base:
    if not isinstance(value, dict):
        raise SyncBrokenError(f"a base that is not valid: {value!r}")
    return Base(_count(value.get("version")), _text(value.get("digest")) or "")


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise SyncBrokenError(f"a list was expected, got {value!r}")
    return value


def _three(value: object) -> tuple[Any, Any, Any]:
    entry = _list(value)
    if len(entry) != 3:
        raise SyncBrokenError(f"name, shape and dtype were expected, got {value!r}")
    return entry[0], entry[1], entry[2]


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SyncBrokenError(f"a number from 0 up was expected, got {value!r}")
    return value


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise SyncBrokenError(f"text was expected, got {value!r}")
    return value
