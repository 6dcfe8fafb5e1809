"""Send weights from one rank of a `torch.distributed` group to all others, by broadcast.

Invariants
----------
* Every rank of the group makes the same collectives in the same order, whatever goes wrong at one of them: a
  receiver that failed goes on taking buckets until the last, and says so at the end.
* A rank that dies or is late breaks the group, as it does for any collective. No end waits longer than its
  `Patience`; the link refuses to be used again, and a new group is needed.
* Closing a receiver ends its wait (for gloo: within `_SLICE`), and breaks its end of the group.
* A bucket travels whole, its header in front: a receiver can wait for the next one while it empties this one.
* Buckets are filled and emptied on the host; on another `device` (`nccl_group`) each is copied there to travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from samebit.weight_sync.digest import Bytes
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.transports.cuda.memory import numbered
from samebit.weight_sync.transports.groups import Group, ranks_of
from samebit.weight_sync.wire.buckets import (
    ALIGN,
    HEADER_WORDS,
    MIN_BUCKET,
    BucketHeader,
    BucketWriter,
    Ending,
    check_bucket_bytes,
    from_words,
    padded,
)
from samebit.weight_sync.wire.decoding import decode, encode
from samebit.weight_sync.wire.link import (
    DEFAULT_TIMEOUT,
    MOST_BYTES,
    Announcement,
    Answer,
    Outcome,
    PeerLostError,
    ReceiverLink,
    SenderLink,
)
from samebit.weight_sync.wire.patience import Patience
from samebit.weight_sync.wire.sender import WeightSender

BROADCAST_BUCKET = 32 << 20
_DELTA_BUCKET = 1 << 20
_MESSAGE_BYTES = 4096
_LONGEST_REASON = 600
"""The most characters of a reason, which is cut; as JSON each has six bytes at most."""

_SLICE = 0.05
_SHORTEST = 0.001
Said = TypeVar("Said", Answer, Outcome)
T = TypeVar("T")


class BroadcastSender(WeightSender):
    """Sends from this rank to all other ranks of `group`.

    Args:
        group: The sender and its receivers, no other rank; None is the default group.
        bucket_bytes: The largest size of each of the two buckets, a multiple of 64.
        timeout: The longest wait for the other ranks, in seconds.
        device: Where the group's backend wants its tensors.
    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        bucket_bytes: int = BROADCAST_BUCKET,
        timeout: float = DEFAULT_TIMEOUT,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(_SenderEnd(_Collectives(group, None, Patience(timeout), device), bucket_bytes))


class BroadcastReceiver(ReceiverLink):
    """Receives for `receive_weights`: this rank's end of the `BroadcastSender` at rank `sender`.

    Args:
        sender: The sender's global rank; in a `gloo_group` or an `nccl_group`, its rank there.
    """

    def __init__(
        self,
        sender: int,
        group: Group | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        device: str | torch.device = "cpu",
    ) -> None:
        self.patience = Patience(timeout)
        self._group = _Collectives(group, sender, self.patience, device)
        self._bucket_bytes = 0
        self._announced = Announcement(())
        self._frames: list[Tensor] = []
        self._next = 0
        self._coming: _Broadcast | None = None
        self._ended = True

    def listen(self, most_bytes: int = MOST_BYTES) -> Announcement:
        self.patience.begin()
        announced, self._bucket_bytes = self._group.broadcast(torch.empty(2, dtype=torch.int64, device="cpu")).tolist()
        if not 0 < announced <= most_bytes:
            raise self._group.broken(f"an announcement of {announced} bytes; at most {most_bytes} are allowed")
        text = self._group.broadcast(torch.empty(announced, dtype=torch.uint8, device="cpu"))
        try:
            check_bucket_bytes(self._bucket_bytes)
            self._announced = decode(text.numpy().tobytes(), Announcement)
        except (SyncBrokenError, ValueError) as error:
            self.answer(Answer(refused=str(error)))
            raise SyncBrokenError(f"an announcement that is not valid: {error}") from error
        self.patience.begin(self._announced.most_payload)
        return self._announced

    def answer(self, answer: Answer) -> Answer:
        decided = Answer.of_all(self._group.exchange(answer, Answer))
        self._ended = decided.refused is not None
        if not self._ended:
            self._frames = _frames(self._frames, _needed(self._bucket_bytes, self._announced, decided))
            self._next = 0
        return decided

    def next_bucket(self) -> tuple[BucketHeader, Bytes]:
        work, self._coming = self._coming, None
        frame = self._frames[self._next]
        self._group.wait(work or self._group.start(frame))
        self._next = 1 - self._next
        header = from_words(BucketHeader, frame[:ALIGN].numpy())
        self.patience.progress(header.used)
        self._ended = header.ending is not Ending.MORE
        if not self._ended:
            self._coming = self._group.start(self._frames[self._next])
        return header, _payload(frame)

    def tell_outcome(self, outcome: Outcome) -> None:
        while not self._ended:
            self.next_bucket()
        self._group.exchange(outcome, Outcome)

    def close(self) -> None:
        self._group.close()


class _SenderEnd(SenderLink):
    """Sends buckets: fills one while the other is on its way."""

    def __init__(self, group: _Collectives, bucket_bytes: int) -> None:
        self.bucket_bytes = self._most = check_bucket_bytes(bucket_bytes)
        self._group = group
        self._frames: list[Tensor] = []
        self._going: list[_Broadcast | None] = [None, None]
        self._filling = 0

    def announce(self, announcement: Announcement) -> Answer:
        self._group.patience.begin()
        text = torch.frombuffer(bytearray(encode(announcement)), dtype=torch.uint8)
        self._group.broadcast(torch.tensor([text.numel(), self._most], device="cpu"))
        self._group.broadcast(text)
        decided = Answer.of_all(self._group.exchange(Answer(), Answer))
        self._group.patience.begin()
        self.bucket_bytes = _needed(self._most, announcement, decided)
        self._frames = _frames(self._frames, self.bucket_bytes)
        return decided

    def open_bucket(self) -> BucketWriter:
        self._filling = 1 - self._filling
        self._wait(self._filling)
        return BucketWriter(_payload(self._frames[self._filling]))

    def send_bucket(self, header: BucketHeader) -> None:
        frame = self._frames[self._filling]
        frame[: HEADER_WORDS * 8] = torch.from_numpy(np.array(header.words, np.uint64).view(np.uint8))
        self._going[self._filling] = self._group.start(frame)

    def outcomes(self) -> list[Outcome]:
        for number in (1 - self._filling, self._filling):
            self._wait(number)
        return self._group.exchange(Outcome(), Outcome)

    def close(self) -> None:
        self._group.close()

    def _wait(self, number: int) -> None:
        going, self._going[number] = self._going[number], None
        if going is not None:
            self._group.wait(going)
            self._group.patience.begin()


@dataclass(frozen=True)
class _Broadcast:
    """Holds a broadcast under way, from or into `host`, by way of `wire`."""

    host: Tensor
    wire: Tensor
    work: dist.Work


class _Collectives:
    """Runs the group's collectives over host tensors, each within this end's patience."""

    def __init__(self, group: Group | None, sender: int | None, patience: Patience, device: str | torch.device) -> None:
        """Join the group; `sender` is None at the sender itself."""
        found = dist.group.WORLD if group is None else group
        if found is None:
            raise ValueError("there is no default group: call torch.distributed.init_process_group, or give a group")
        self._group: Any = found
        self.patience = patience
        self._device = numbered(torch.device(device))
        self._broken: str | None = None
        self._closed = False
        ranks = ranks_of(found)
        if sender is not None and sender not in ranks:
            raise ValueError(f"the sender, rank {sender}, is not in the group, which holds {ranks}")
        self._root = found.rank() if sender is None else ranks.index(sender)
        if sender is not None and self._root == found.rank():
            raise ValueError(f"sender must be another rank, and {sender} is this one")

    def start(self, host: Tensor) -> _Broadcast:
        """Begin to broadcast from or into a host tensor, which belongs to the group until `wait` returns."""
        wire = host.to(self._device)
        options = dist.BroadcastOptions()
        options.rootRank = self._root
        work: dist.Work = self._guarded(lambda: self._group.broadcast([wire], options))
        return _Broadcast(host, wire, work)

    def wait(self, under_way: _Broadcast) -> None:
        self._wait(under_way.work)
        if under_way.wire is not under_way.host:
            under_way.host.copy_(under_way.wire)

    def broadcast(self, host: Tensor) -> Tensor:
        """Send or receive a host tensor by broadcast, and wait for it."""
        self.wait(self.start(host))
        return host

    def exchange(self, own: Said, kind: type[Said]) -> list[Said]:
        """Tell all ranks `own`; return what each receiver says."""
        content = encode(own.shortened(_LONGEST_REASON)).ljust(_MESSAGE_BYTES, b"\0")
        wire = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        said = [torch.empty_like(wire) for _ in range(self._group.size())]
        self._wait(self._guarded(lambda: self._group.allgather([said], [wire])))
        texts = [bytes(message.cpu().numpy()).rstrip(b"\0") for message in said]
        return [decode(text, kind) for rank, text in enumerate(texts) if rank != self._root]

    def broken(self, why: str) -> SyncBrokenError:
        self._broken = why
        return SyncBrokenError(why)

    def close(self) -> None:
        self._closed = True

    def _wait(self, work: dist.Work) -> None:
        with self.patience.waiting() as deadline:
            self._guarded(lambda: self._finish(work, deadline))

    def _finish(self, work: dist.Work, deadline: float) -> None:
        """Wait for a collective, on the host in slices: nothing else ends a wait for gloo.

        A slice that is over and a collective that failed raise the same error, and the one may turn into the end of
        the other meanwhile: so a collective that has completed is waited for once more, which tells how it ended.
        """
        while self._device.type == "cpu" and deadline - time.monotonic() > _SLICE and not work.is_completed():
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=_SLICE))
            if self._closed:
                raise PeerLostError("the link was closed")
        work.wait(timedelta(seconds=max(_SHORTEST, deadline - time.monotonic())))

    def _guarded(self, act: Callable[[], T]) -> T:
        """Run a collective; after one has failed refuse all others, since ranks no longer agree on which comes next."""
        if self._closed:
            raise PeerLostError("the link is closed")
        if self._broken is not None:
            raise PeerLostError(f"the group is broken ({self._broken}): make another")
        try:
            return act()
        except SyncBrokenError:
            raise
        except RuntimeError as error:
            self._broken = str(error).splitlines()[0]
            raise PeerLostError(f"a rank of the group died or was late: {self._broken}") from error


def _needed(most: int, announced: Announcement, decided: Answer) -> int:
    """Return the size of this sync's buckets, the same at every rank: at most what is to be sent, small for a delta."""
    if announced.base is not None and not decided.full:
        return min(most, _DELTA_BUCKET)
    records = sum(2 * ALIGN + spec.num_bytes for spec in announced.specs.values())
    return min(most, max(MIN_BUCKET, padded(records)))


def _frames(kept: list[Tensor], bucket_bytes: int) -> list[Tensor]:
    """Return two buckets with room for a header before each; the kept ones if they fit."""
    if kept and kept[0].numel() == ALIGN + bucket_bytes:
        return kept
    return [torch.zeros(ALIGN + bucket_bytes, dtype=torch.uint8, device="cpu") for _ in range(2)]


def _payload(frame: Tensor) -> Bytes:
    array: Bytes = frame[ALIGN:].numpy()
    return array
