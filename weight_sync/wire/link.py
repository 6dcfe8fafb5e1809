"""Define the two ends of a link, which each transport implements, and the messages between them.

A sync: the sender announces, each receiver answers, buckets follow, each receiver tells the outcome.

Invariants
----------
* Nothing is sent before every receiver has answered. A receiver that refuses stops the sync for all; one that lacks
  the base of a delta makes it a full update for all.
* Neither end waits longer than its `Patience` (`SyncTimeoutError`). A peer that goes away is a `PeerLostError`.
* What comes from a peer is JSON and bytes, checked before use (`wire.decoding`); nothing is unpickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from samebit.weight_sync.closing import Closing
from samebit.weight_sync.digest import readable_bytes
from samebit.weight_sync.manifest import TensorSpec
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.wire.buckets import ALIGN, BucketHeader, Kind, Record, Writer, open_records
from samebit.weight_sync.wire.decoding import encode
from samebit.weight_sync.wire.destination import Destination

DEFAULT_BUCKET = 8 << 20
DEFAULT_TIMEOUT = 300.0
MOST_BYTES = 1 << 20
"""The most bytes of a message, except for the announcement of a model that needs more."""

_MOST_DIMENSIONS = 64


class SyncRefusedError(RuntimeError):
    """A receiver refused the announced weights; nothing was sent, nothing was written."""


class PeerLostError(SyncBrokenError):
    """The other side closed the link or died."""


class SyncTimeoutError(SyncBrokenError, TimeoutError):
    """The other side did not do its part within the timeout."""


@dataclass(frozen=True)
class Base:
    """Names the weights that a delta is a difference to."""

    version: int
    digest: str


@dataclass(frozen=True)
class Tie:
    """Says that two of the announced tensors are one at the sender."""

    first: str
    later: str


@dataclass(frozen=True)
class Announcement:
    """Begins a sync: the first message.

    casts: the sender's casts, as in a report. sync: the number that tells the syncs on one socket apart. arithmetic:
    what decides the bits of the sender's forward on a GPU (`weight_sync.arithmetic`), empty without one. ties: the
    later names do not come, and are not in the base, unless a receiver asks for tied tensors `apart`. of_images: nor do
    these tensors, unless one has a use for them.
    """

    tensors: tuple[TensorSpec, ...]
    base: Base | None = None
    casts: tuple[str, ...] = ()
    sync: int = 0
    arithmetic: str = ""
    ties: tuple[Tie, ...] = ()
    of_images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        specs, later = self.specs, self.later
        if len(specs) < len(self.tensors):
            raise ValueError("a tensor is announced twice")
        if len(later) < len(self.ties) or not all(
            name in specs and first in specs and first not in later for name, first in later.items()
        ):
            raise ValueError("a tie is not of a tensor that comes, and another that is announced")
        if not specs.keys() - {*later, *later.values()} >= set(self.of_images):
            raise ValueError("a tensor of images is tied to another, or not announced")
        if any(len(spec.shape) > _MOST_DIMENSIONS for spec in self.tensors):
            raise ValueError(f"a tensor has more than {_MOST_DIMENSIONS} dimensions")

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    @property
    def later(self) -> dict[str, str]:
        """Return the first name of each tensor that is announced under another one too, by the later name."""
        return {tie.later: tie.first for tie in self.ties}

    def agreed(self, decided: Answer) -> Announcement:
        """Return what will come, once all receivers have answered: the base only of a delta."""
        left_out = {*(() if decided.apart else self.later), *(() if decided.images else self.of_images)}
        tensors = tuple(spec for spec in self.tensors if spec.name not in left_out)
        return replace(self, tensors=tensors, base=None if decided.full else self.base, ties=(), of_images=())

    @property
    def most_payload(self) -> int:
        """Return the most bytes that the buckets of this sync hold together, headers included."""
        return 4 * ALIGN + sum(4 * ALIGN + 2 * spec.num_bytes for spec in self.tensors)


@dataclass(frozen=True)
class Answer:
    """Answers an announcement, from one receiver. `refused`: why nothing may be sent; `full`: all weights are needed,
    not a delta; `apart`: what is tied at the sender is not tied here, and is needed under each name; `images`: so are
    the tensors that only images go through."""

    refused: str | None = None
    full: bool = False
    sync: int = 0
    apart: bool = False
    images: bool = False

    def shortened(self, most: int) -> Answer:
        return self if self.refused is None else replace(self, refused=shortened(self.refused, most))

    @classmethod
    def of_all(cls, answers: Iterable[Answer]) -> Answer:
        """Return the one answer that several come to."""
        each = list(answers)
        reasons = [answer.refused for answer in each if answer.refused is not None]
        return cls(
            "; ".join(reasons) if reasons else None,
            any(answer.full for answer in each),
            apart=any(answer.apart for answer in each),
            images=any(answer.images for answer in each),
        )


@dataclass(frozen=True)
class Outcome:
    """Ends a sync: the version and digest that a receiver has now, or why it failed."""

    version: int = 0
    digest: str = ""
    failed: str | None = None
    sync: int = 0

    def shortened(self, most: int) -> Outcome:
        return self if self.failed is None else replace(self, failed=shortened(self.failed, most))


def most_announced(specs: Iterable[TensorSpec]) -> int:
    """Return the most bytes that an announcement to a model that takes these tensors may have."""
    return MOST_BYTES + 4 * sum(len(encode(spec)) for spec in specs)


def shortened(text: str, most: int) -> str:
    """Return a reason as it can travel: without lone surrogates, and cut after `most` characters."""
    clean = text.encode(errors="backslashreplace").decode()
    if len(clean) <= most:
        return clean
    return f"{clean[:most]} ... ({len(clean) - most} more characters: see the error at that receiver)"


class SenderLink(Closing, ABC):
    """Defines the trainer's end. `bucket_bytes` is the size of each of the two buckets of a sync."""

    bucket_bytes: int

    @abstractmethod
    def announce(self, announcement: Announcement) -> Answer:
        """Begin a sync; return what the receivers' answers come to."""

    @abstractmethod
    def open_bucket(self) -> Writer:
        """Return a bucket to fill, once the receivers are done with its previous content."""

    def readable(self, tensor: Tensor) -> Any:
        """Return the bits of a tensor as the writer takes them."""
        return readable_bytes(tensor)

    @abstractmethod
    def send_bucket(self, header: BucketHeader) -> None:
        """Send the bucket that was opened last."""

    @abstractmethod
    def outcomes(self) -> list[Outcome]:
        """Wait for the end of the sync; return what each receiver says of it."""


class ReceiverLink(Closing, ABC):
    """Defines the worker's end, a source for `receive_weights`. Closing it in any thread ends a wait for the sender."""

    @abstractmethod
    def listen(self, most_bytes: int = MOST_BYTES) -> Announcement:
        """Wait for the next sync, whose announcement has at most `most_bytes`."""

    @abstractmethod
    def answer(self, answer: Answer) -> Answer:
        """Tell the sender whether it may begin; return what all receivers' answers come to."""

    @abstractmethod
    def next_bucket(self) -> tuple[BucketHeader, Any]:
        """Wait for a bucket; return its header and its memory, valid until the next call."""

    def next_records(
        self, *, sequence: int, sizes: Sequence[int], kinds: frozenset[Kind]
    ) -> tuple[BucketHeader, list[Record]]:
        """Wait for a bucket; return its records, checked by `open_records` and valid until the next call."""
        header, buffer = self.next_bucket()
        return header, open_records(header, buffer, sequence=sequence, sizes=sizes, kinds=kinds)

    def destination(self, spec: TensorSpec, target: Tensor) -> Destination:
        """Return what writes the records of a tensor into `target`."""
        return Destination(spec, target)

    @abstractmethod
    def tell_outcome(self, outcome: Outcome) -> None:
        """Tell the sender how the sync ended."""

    def leave(self) -> None:
        """Close an end on which nothing is under way; a sender that calls there just now waits for the next to come,
        where its link can."""
        self.close()
