"""Weights from one rank of a `torch.distributed` group to all others, by broadcast.

Invariants
----------
* Every rank of the group makes the same collectives in the same order, whatever goes wrong at one of them: a
  receiver that failed goes on taking buckets until the last, and says so at the end.
* A rank that dies or is late breaks the group, as it does for any collective. Nobody waits longer than the
  timeout; the link refuses to be used again, and a new group is needed.
* A bucket travels whole, its header in front: a receiver can wait for the next one while it empties this one.
* Buckets are filled and emptied on the host; on another `device` (NCCL) each is copied there to travel.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from samebit.weight_sync.buckets import (
    ALIGN,
    MIN_BUCKET,
    BucketHeader,
    BucketWriter,
    Ending,
    Kind,
    Record,
    check_bucket_bytes,
    open_records,
)
from samebit.weight_sync.checksum import Bytes
from samebit.weight_sync.link import (
    DEFAULT_TIMEOUT,
    Announcement,
    Answer,
    Outcome,
    PeerLostError,
    ReceiverLink,
    SenderLink,
    SyncTimeoutError,
    check_timeout,
)
from samebit.weight_sync.report import SyncBrokenError
from samebit.weight_sync.sender import WeightSender

BROADCAST_BUCKET = 32 << 20
_DELTA_BUCKET = 1 << 20
_HEADER_WORDS = 5
_MESSAGE_BYTES = 4096
_LONGEST = 600
_MOST_ANNOUNCED = 64 << 20
_CAME = "samebit/came"
Group = dist.ProcessGroup | dist.ProcessGroupGloo
Heard = TypeVar("Heard", Answer, Outcome)
T = TypeVar("T")


def listening_store(host: str, port: int = 0) -> TCPStore:
    """Where the ranks of a new group find each other: a port of this machine, any if 0, on this address alone."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, port))
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connected_store(host: str, port: int, *, timeout: float = DEFAULT_TIMEOUT) -> TCPStore:
    """The `listening_store` of another process. Raises `PeerLostError` if nobody listens there within the timeout."""
    try:
        return TCPStore(host, port, timeout=timedelta(seconds=check_timeout(timeout)))
    except RuntimeError as error:
        raise PeerLostError(f"no sender at {host}:{port}: {str(error).splitlines()[0]}") from error


def gloo_group(store: Store, rank: int, size: int, *, timeout: float = DEFAULT_TIMEOUT) -> dist.ProcessGroupGloo:
    """A group of processes that need not be of one `torch.distributed` world. Waits for all of them.

    Raises:
        SyncTimeoutError: not all of them came within the timeout.
        PeerLostError: the store, or a rank that had come, went away.
    """
    limit = timedelta(seconds=check_timeout(timeout))
    if not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to {size - 1}, in a group of {size}, got {rank}")
    try:
        store.add(_CAME, 1)
        return dist.ProcessGroupGloo(store, rank, size, timeout=limit)
    except RuntimeError as error:
        raise _not_joined(store, size, timeout, error) from error


def _not_joined(store: Store, size: int, timeout: float, error: RuntimeError) -> SyncBrokenError:
    """Why there is no group: not all ranks came, or what torch says."""
    with suppress(RuntimeError):
        if isinstance(error, dist.DistStoreError):  # a wait for the others that took too long
            came = store.add(_CAME, 0)
            return SyncTimeoutError(f"{came} of {size} ranks of the group came within {timeout:g} seconds")
    return PeerLostError(f"the group could not be made: {str(error).splitlines()[0]}")


class BroadcastSender(WeightSender):
    """Sends from this rank to all others of `group`, which holds nobody but them.

    group: the default group if None. device: where the group's backend wants its tensors. timeout: the longest wait
    for the others, in seconds.
    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        bucket_bytes: int = BROADCAST_BUCKET,
        timeout: float = DEFAULT_TIMEOUT,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(_SenderEnd(_Collectives(group, None, timeout, device), bucket_bytes))


class BroadcastReceiver(ReceiverLink):
    """A source for `receive_weights`: this rank's end of the `BroadcastSender` at rank `sender`.

    sender: its global rank; in a group of its own (`gloo_group`), its rank there.
    """

    def __init__(
        self,
        sender: int,
        group: Group | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        device: str | torch.device = "cpu",
    ) -> None:
        self._group = _Collectives(group, sender, timeout, device)
        self._bucket_bytes = 0
        self._announced = Announcement({})
        self._frames: list[Tensor] = []
        self._next = 0
        self._coming: _Broadcast | None = None
        self._ended = True
        self._closed = False

    def listen(self) -> Announcement:
        if self._closed:
            raise PeerLostError("the link is closed")
        sizes = self._group.broadcast(torch.empty(2, dtype=torch.int64))
        announced, bucket_bytes = (int(size) for size in sizes)
        if not 0 < announced <= _MOST_ANNOUNCED or not bucket_bytes > 0:
            raise self._group.broken(f"an announcement of {announced} bytes and buckets of {bucket_bytes}")
        text = self._group.broadcast(torch.empty(announced, dtype=torch.uint8))
        self._bucket_bytes = bucket_bytes
        self._announced = Announcement.from_json(text.numpy().tobytes())
        return self._announced

    def answer(self, answer: Answer) -> Answer:
        decided = Answer.of_all(self._group.hear(answer, Answer))
        self._ended = decided.refused is not None
        if not self._ended:
            self._frames = _frames(self._frames, _needed(self._bucket_bytes, self._announced, decided))
            self._next = 0
        return decided

    def next_records(
        self, *, sequence: int, sizes: Sequence[int], kinds: frozenset[Kind]
    ) -> tuple[BucketHeader, list[Record]]:
        header, buffer = self.next_bucket()
        return header, open_records(header, buffer, sequence=sequence, sizes=sizes, kinds=kinds)

    def next_bucket(self) -> tuple[BucketHeader, Bytes]:
        """Wait for a bucket, valid until the next call."""
        work, self._coming = self._coming, None
        self._group.wait(work or self._group.start(self._frames[self._next]))
        frame = self._frames[self._next]
        self._next = 1 - self._next
        header = _header(frame[:ALIGN])
        self._ended = header.ending is not Ending.MORE
        if not self._ended:
            self._coming = self._group.start(self._frames[self._next])
        return header, _payload(frame)

    def finish(self, outcome: Outcome) -> None:
        while not self._ended:
            self.next_bucket()
        self._group.hear(outcome, Outcome)

    def close(self) -> None:
        self._closed = True
        self._frames = []


class _SenderEnd(SenderLink):
    """A bucket is on its way while the other is filled."""

    def __init__(self, group: _Collectives, bucket_bytes: int) -> None:
        self.bucket_bytes = self._most = check_bucket_bytes(bucket_bytes)
        self._group = group
        self._frames: list[Tensor] = []
        self._going: list[_Broadcast | None] = [None, None]
        self._filling = 0
        self._closed = False

    def announce(self, announcement: Announcement) -> Answer:
        if self._closed:
            raise PeerLostError("the link is closed")
        text = torch.frombuffer(bytearray(announcement.to_json().encode()), dtype=torch.uint8)
        self._group.broadcast(torch.tensor([text.numel(), self._most]))
        self._group.broadcast(text)
        decided = Answer.of_all(self._group.hear(Answer(), Answer))
        self.bucket_bytes = _needed(self._most, announcement, decided)
        self._frames = _frames(self._frames, self.bucket_bytes)
        return decided

    def open_bucket(self) -> BucketWriter:
        self._filling = 1 - self._filling
        self._wait(self._filling)
        return BucketWriter(_payload(self._frames[self._filling]))

    def publish(self, header: BucketHeader) -> None:
        frame = self._frames[self._filling]
        frame[:ALIGN] = _words(header)
        self._going[self._filling] = self._group.start(frame)

    def outcomes(self) -> list[Outcome]:
        for number in (1 - self._filling, self._filling):
            self._wait(number)
        return self._group.hear(Outcome(), Outcome)

    def close(self) -> None:
        self._closed = True
        self._frames = []

    def _wait(self, number: int) -> None:
        going, self._going[number] = self._going[number], None
        if going is not None:
            self._group.wait(going)


@dataclass(frozen=True)
class _Broadcast:
    """One that is under way: from or into `host`, by way of `wire`."""

    host: Tensor
    wire: Tensor
    work: dist.Work


class _Collectives:
    """The group, and what it does with host tensors within the timeout."""

    def __init__(self, group: Group | None, sender: int | None, timeout: float, device: str | torch.device) -> None:
        """`sender`: None for this rank itself, else another."""
        found = dist.group.WORLD if group is None else group
        if found is None:
            raise ValueError("there is no default group: call torch.distributed.init_process_group, or give a group")
        self._group: Any = found
        self._timeout = timedelta(seconds=check_timeout(timeout))
        self._device = torch.device(device)
        self._broken: str | None = None
        ranks = _ranks(found)
        if sender is not None and sender not in ranks:
            raise ValueError(f"the sender, rank {sender}, is not in the group, which holds {ranks}")
        self._root = found.rank() if sender is None else ranks.index(sender)
        if sender is not None and self._root == found.rank():
            raise ValueError(f"sender must be another rank, and {sender} is this one")

    def start(self, host: Tensor) -> _Broadcast:
        """Begin to broadcast from, or into, a host tensor, which belongs to the group until `wait`."""
        wire = host.to(self._device)
        options = dist.BroadcastOptions()
        options.rootRank = self._root
        work: dist.Work = self._guarded(lambda: self._group.broadcast([wire], options))
        return _Broadcast(host, wire, work)

    def wait(self, under_way: _Broadcast) -> None:
        self._guarded(lambda: under_way.work.wait(self._timeout))
        if under_way.wire is not under_way.host:
            under_way.host.copy_(under_way.wire)

    def broadcast(self, host: Tensor) -> Tensor:
        """Broadcast from, or into, a host tensor, and wait for it."""
        self.wait(self.start(host))
        return host

    def hear(self, own: Heard, kind: type[Heard]) -> list[Heard]:
        """What every receiver says; `own` is what this rank says."""
        wire = _message(own.to_json()).to(self._device)
        said = [torch.empty_like(wire) for _ in range(self._group.size())]
        work: dist.Work = self._guarded(lambda: self._group.allgather([said], [wire]))
        self._guarded(lambda: work.wait(self._timeout))
        texts = [bytes(message.cpu().numpy()).rstrip(b"\0") for message in said]
        return [kind.from_json(text) for rank, text in enumerate(texts) if rank != self._root]

    def broken(self, why: str) -> SyncBrokenError:
        self._broken = why
        return SyncBrokenError(why)

    def _guarded(self, act: Callable[[], T]) -> T:
        """Once a collective has failed, the ranks no longer agree on which comes next."""
        if self._broken is not None:
            raise PeerLostError(f"the group is broken ({self._broken}): make another")
        try:
            return act()
        except RuntimeError as error:
            self._broken = str(error).splitlines()[0]
            raise PeerLostError(f"a rank of the group died or was late: {self._broken}") from error


def _ranks(group: Group) -> list[int]:
    """Global ranks, by the rank in the group; those themselves where the group is not of a world."""
    if isinstance(group, dist.ProcessGroupGloo):
        return list(range(group.size()))
    return dist.get_process_group_ranks(group)


def _needed(most: int, announced: Announcement, decided: Answer) -> int:
    """Bytes of a bucket of this sync, the same at every rank: no more than there is to send, little for a delta."""
    if announced.base is not None and not decided.full:
        return min(most, _DELTA_BUCKET)
    records = sum(2 * ALIGN + spec.num_bytes for spec in announced.specs.values())
    return min(most, max(MIN_BUCKET, -(-records // ALIGN) * ALIGN))


def _frames(kept: list[Tensor], bucket_bytes: int) -> list[Tensor]:
    """Two buckets, each with room for its header before it; those from before if they fit."""
    if kept and kept[0].numel() == ALIGN + bucket_bytes:
        return kept
    return [torch.zeros(ALIGN + bucket_bytes, dtype=torch.uint8) for _ in range(2)]


def _payload(frame: Tensor) -> Bytes:
    array: Bytes = frame[ALIGN:].numpy()
    return array


def _words(header: BucketHeader) -> Tensor:
    words = np.zeros(ALIGN // 8, np.uint64)
    words[:_HEADER_WORDS] = [header.sequence, header.used, header.ending, header.total, header.seal]
    return torch.from_numpy(words.view(np.uint8))


def _header(frame: Tensor) -> BucketHeader:
    sequence, used, ending, total, seal = (int(word) for word in frame.numpy().view(np.uint64)[:_HEADER_WORDS])
    if ending not in list(Ending):
        raise SyncBrokenError(f"a bucket header that is not valid: ending {ending}")
    return BucketHeader(sequence, used, Ending(ending), total, seal)


def _message(text: str) -> Tensor:
    """JSON of bounded size, padded with zeros; a reason that is too long is cut, and says so."""
    content = text.encode()
    if len(content) > _MESSAGE_BYTES:
        body = json.loads(text)
        cut = {key: _cut(value) if isinstance(value, str) else value for key, value in body.items()}
        content = json.dumps(cut).encode()
    return torch.frombuffer(bytearray(content.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)


def _cut(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} ... ({len(text) - _LONGEST} more characters: see the error at that receiver)"
