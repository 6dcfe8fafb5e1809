"""A peer that says what it may not gets one of the documented errors, in little time and memory."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from samebit.weight_sync import (
    NonFiniteWeightError,
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncBrokenError,
    SyncRefusedError,
    SyncTimeoutError,
    TensorSpec,
    WeightMismatchError,
    apply_weights,
)
from samebit.weight_sync.digest import Lanes
from samebit.weight_sync.transports.cuda.memory import MemoryHandle
from samebit.weight_sync.transports.shared_memory import SharedFile
from samebit.weight_sync.transports.unix_socket import Free, Full, Left, NoMemory
from samebit.weight_sync.wire.buckets import BucketHeader, BucketWriter, Ending, Kind, RecordHeader, open_records
from samebit.weight_sync.wire.decoding import decode, encode
from samebit.weight_sync.wire.link import MOST_BYTES, Announcement, Answer, Base, Outcome, Tie
from samebit.weight_sync.wire.patience import Patience

from ..patience import HANG
from .strangers import (
    BUCKET,
    DEEP,
    EVIL,
    RawSender,
    framed,
    mutated,
    receiving_from_a_stranger,
    sending_to_a_stranger,
)

WEIGHT = TensorSpec("weight", (3, 100), torch.bfloat16)
HEADER = BucketHeader(0, 128, Ending.LAST, (1 << 64) - 1, 7)
MESSAGES = [
    Announcement((WEIGHT, TensorSpec("ä\0\U0001f600", (), torch.bool)), Base(3, "ab"), ("weight: cast",), 4, "sm_90"),
    Announcement((WEIGHT, replace(WEIGHT, name="tied")), ties=(Tie("weight", "tied"),)),
    Announcement((WEIGHT, replace(WEIGHT, name="seen")), of_images=("seen",)),
    Announcement(()),
    Answer("no, \U0001f600", True, 3),
    Answer(apart=True),
    Answer(images=True),
    Outcome(7, "0f", None, 2),
    Outcome(failed="it did"),
    Full(3, 1, HEADER, (RecordHeader(0, Kind.BITMAP, 64, 9, 1 << 63),)),
    Full(3, 0, HEADER, ()),
    Free(3, 1),
    Left(),
    NoMemory("none"),
    SharedFile(),
    MemoryHandle("GPU-1", 2048, "ab" * 64, 4096, 512, "cd" * 20, 3, "ef" * 64, True),
]  # fmt: skip
KINDS = tuple({type(message) for message in MESSAGES})
CASES = int(os.environ.get("SAMEBIT_SOAK_CASES", "20"))
DOCUMENTED = (SyncBrokenError, SyncRefusedError, WeightMismatchError, NonFiniteWeightError)


class Model(nn.Module):
    """Has tensors that are larger than a bucket, smaller, and empty."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Parameter(torch.randn(3, 129, dtype=dtype))
        self.one = nn.Parameter(torch.randn(1, dtype=dtype))
        self.none = nn.Parameter(torch.randn(0, 3, dtype=dtype))


ANNOUNCED = tuple(TensorSpec.of(name, one) for name, one in Model().state_dict().items())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_what_it_was_after_its_journey(message: object) -> None:
    assert decode(encode(message), *KINDS) == message


@pytest.mark.soak
@settings(max_examples=8 * CASES, deadline=None)
@given(content=mutated([encode(message) for message in MESSAGES]))
def test_a_mutated_message_is_valid_or_a_documented_error(content: bytes) -> None:
    said = ""
    try:
        found = decode(content, *KINDS)
    except SyncBrokenError as error:
        said = str(error)
    else:
        assert decode(encode(found), *KINDS) == found
    assert len(said) < 1000, "it is bounded too"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"3", b'"kind"', b"{}", b'{"kind": []}', b'{"kind": "Free"}', DEEP, b'{"a":' * 9999]
    + [b'{"kind": "Free", "sync": %s, "bucket": 0}' % n for n in (b"9" * 4300, b"9" * 400_000, b"1e5", b"-1", b"true")]
    + [b'{"kind": "Free", "sync": 0, "bucket": 0, "more": 0}', b'{"kind": "Answer", "sync": 0, "bucket": 0}']
    + [b'{"kind": "NoMemory", "reason": "\\ud800"}', b'{"kind": "NoMemory", "reason": "\xed\xa0\x80"}'],
)
def test_what_is_no_message_is_a_broken_sync(content: bytes) -> None:
    with pytest.raises(SyncBrokenError):
        decode(content, Free, NoMemory)


def test_an_announcement_is_one_of_different_tensors_that_torch_can_hold() -> None:
    for tensors in ((WEIGHT, WEIGHT), (replace(WEIGHT, shape=(1,) * 65),)):
        body = {**vars(Announcement(())), "kind": "Announcement"}
        listed = [{"name": one.name, "shape": one.shape, "dtype": "bfloat16"} for one in tensors]
        with pytest.raises(SyncBrokenError, match=r"announced twice|more than 64 dimensions"):
            decode(json.dumps({**body, "tensors": listed}).encode(), Announcement)


@pytest.mark.parametrize(
    "ties",
    [
        (Tie("weight", "weight"),),
        (Tie("weight", "gone"),),
        (Tie("gone", "b"),),
        (Tie("weight", "b"), Tie("b", "c")),
        (Tie("weight", "b"), Tie("weight", "b")),
    ],
)
def test_a_tie_is_of_one_tensor_that_comes_and_one_that_does_not(ties: tuple[Tie, ...]) -> None:
    tensors = tuple(replace(WEIGHT, name=name) for name in ("weight", "b", "c"))
    content = encode(Announcement(tensors)).replace(
        b'"ties": []', b'"ties": ' + json.dumps([*map(vars, ties)]).encode()
    )
    with pytest.raises(SyncBrokenError, match="a tie is not of a tensor that comes"):
        decode(content, Announcement)


@pytest.mark.parametrize("of_images", [("gone",), ("b", "gone"), ("weight",), ("c",)])
def test_a_tensor_of_images_is_announced_and_not_tied(of_images: tuple[str, ...]) -> None:
    tensors = tuple(replace(WEIGHT, name=name) for name in ("weight", "b", "c"))
    content = encode(Announcement(tensors, ties=(Tie("weight", "c"),))).replace(
        b'"of_images": []', b'"of_images": ' + json.dumps(of_images).encode()
    )
    with pytest.raises(SyncBrokenError, match="a tensor of images is tied to another, or not announced"):
        decode(content, Announcement)


# -- a bucket --------------------------------------------------------------------------------------


@pytest.mark.soak
@settings(max_examples=4 * CASES, deadline=None)
@given(data=st.data())
def test_the_bytes_of_a_bucket_are_checked(data: st.DataObject) -> None:
    buffer = np.zeros(BUCKET, np.uint8)
    writer = BucketWriter(buffer)
    writer.copy(0, 0, np.arange(200, dtype=np.uint8), Lanes.of(torch.uint8))
    writer.copy(1, 64, np.arange(65, dtype=np.uint8), Lanes.of(torch.uint8))
    header = writer.seal(0, Ending.MORE, 0)
    words = buffer.view(np.uint64)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([0, 1, 2, 3, 4, 40, 41, 42, 43, 44]) | st.integers(0, BUCKET // 8 - 1))
        words[place] = data.draw(st.sampled_from([0, 1, 3, 63, 64, 65, 1 << 62, (1 << 64) - 64, (1 << 64) - 1]))
    used = data.draw(st.sampled_from([header.used, 0, 64, 1000, 1024, 1025, 1 << 63]))
    with_used = replace(header, used=used)
    try:
        records = open_records(with_used, buffer, sequence=0, sizes=[200, 1000], kinds=frozenset({Kind.DENSE}))
    except SyncBrokenError:
        return
    assert all(0 < len(record.payload) <= 200 for record in records)


def test_a_piece_without_bytes_is_refused() -> None:
    buffer = np.zeros(BUCKET, np.uint8)
    writer = BucketWriter(buffer)
    writer.copy(0, 0, np.zeros(0, np.uint8), Lanes.of(torch.uint8))
    header = writer.seal(0, Ending.MORE, 0)
    with pytest.raises(SyncBrokenError, match="0 bytes at 0 of tensor 0"):
        open_records(header, buffer, sequence=0, sizes=[200], kinds=frozenset({Kind.DENSE}))


@pytest.mark.parametrize("cast", [False, True])
def test_an_empty_piece_over_a_link(cast: bool) -> None:
    with receiving_from_a_stranger(Model(torch.bfloat16 if cast else torch.float32)) as (stranger, received):
        stranger.hand_over()
        stranger.send(
            Announcement(tuple(TensorSpec.of(name, one) for name, one in Model().state_dict().items()), sync=1)
        )
        if not cast:
            stranger.receive(Answer)
        writer = BucketWriter(np.zeros(BUCKET, np.uint8))
        writer.copy(0, 0, np.zeros(0, np.uint8), Lanes.of(torch.float32))
        stranger.send(Full(1, 0, writer.seal(0, Ending.MORE, 0), ()))
        with pytest.raises(DOCUMENTED):
            received.result(HANG)


# -- over a socket ---------------------------------------------------------------------------------


@pytest.mark.soak
@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(stage=st.integers(0, 2), data=st.data())
def test_a_receiver_hears_a_mutated_message(stage: int, data: st.DataObject) -> None:
    said = [SharedFile(), Announcement(ANNOUNCED, sync=1), Full(1, 0, HEADER, ())]
    with receiving_from_a_stranger(Model()) as (stranger, received):
        for message in said[:stage]:
            stranger.hand_over() if message == said[0] else stranger.send(message)
        content = data.draw(mutated([encode(said[stage])]))
        stranger.raw.sendall(framed(content))
        stranger.close()
        with pytest.raises(DOCUMENTED):
            received.result(HANG)


@pytest.mark.soak
@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(stage=st.integers(0, 2), data=st.data())
def test_a_sender_hears_a_mutated_message(stage: int, data: st.DataObject) -> None:
    said = [Answer(sync=1), Free(1, 0), Outcome(1, "", "it failed", 1)]
    with (
        SharedMemorySender(bucket_bytes=BUCKET, timeout=HANG) as sender,
        sending_to_a_stranger(sender, Model()) as (stranger, raw, sent),
    ):
        stranger.receive(SharedFile)
        stranger.receive(Announcement)
        for message in said[:stage]:
            stranger.send(message)
        content = data.draw(mutated([encode(said[stage])]))
        assume(not tells_success(content))
        raw.sendall(framed(content))
        stranger.close()
        with pytest.raises(DOCUMENTED):
            sent.result(HANG)


def tells_success(content: bytes) -> bool:
    """Return whether a message is that of a receiver which has taken the weights, and which a sender believes."""
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(message, dict) and message.get("kind") == "Outcome" and message.get("failed") is None


@pytest.mark.parametrize("value", EVIL, ids=lambda value: repr(value)[:12])
def test_a_message_of_no_known_kind_leaves_the_sender_of_use(value: object) -> None:
    with SharedMemorySender(bucket_bytes=BUCKET, timeout=HANG) as sender:
        with sending_to_a_stranger(sender, Model()) as (_, raw, sent):
            raw.sendall(framed(json.dumps({"kind": value, "sync": 1}).encode()))
            with pytest.raises(SyncBrokenError):
                sent.result(HANG)
        other = Model()
        with SharedMemoryReceiver(sender.address, timeout=HANG) as end:
            receiving = threading.Thread(target=apply_weights, args=(other, end))
            receiving.start()
            sender.send(Model())
            receiving.join(HANG)
        assert torch.equal(other.wide, Model().wide)


def test_an_announcement_is_bounded_by_what_the_model_can_need() -> None:
    """An announcement that says it is too long is refused before a byte of it is read."""
    with receiving_from_a_stranger(Model()) as (stranger, received):
        stranger.hand_over()
        stranger.raw.sendall((60 << 20).to_bytes(4, "big"))
        with pytest.raises(SyncBrokenError, match=r"a message of 62914560 bytes; at most 1\d{6} are allowed"):
            received.result(HANG)


def test_an_announcement_that_is_allowed_costs_little() -> None:
    names = [{"name": f"{number}", "shape": [], "dtype": "bool"} for number in range(18_000)]
    body = json.dumps({**vars(Announcement(())), "kind": "Announcement", "tensors": names}).encode()
    assert 0.8 * MOST_BYTES < len(body) < MOST_BYTES
    tracemalloc.start()
    assert len(decode(body, Announcement).tensors) == len(names)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 32 * MOST_BYTES


def test_a_model_with_very_many_tensors_may_be_announced() -> None:
    """An announcement of very many tensors is taken, though it is longer than any other message may be."""
    many = nn.ParameterDict({f"{'a' * 1000}{number}": nn.Parameter(torch.zeros(1)) for number in range(1_200)})
    assert len(encode(Announcement(tuple(TensorSpec.of(name, one) for name, one in many.items())))) > MOST_BYTES
    with SharedMemorySender(timeout=HANG) as sender, SharedMemoryReceiver(sender.address, timeout=HANG) as end:
        sending = threading.Thread(target=sender.send, args=(many,))
        sending.start()
        assert apply_weights(many, end).tensors == 1_200
        sending.join(HANG)


# -- patience --------------------------------------------------------------------------------------


SHORT = 0.3
"""Is the number of seconds that an end waits while nothing moves. Who talks to it may be later than that, too."""


def talk(sayings: Iterable[Callable[[], object]]) -> None:
    """Say these things one after the other until nobody listens any more."""
    pause, end = threading.Event(), time.monotonic() + HANG
    with suppress(SyncBrokenError, OSError):
        for say in sayings:
            say()
            assert time.monotonic() < end, "it is still listened to"
            pause.wait(0.02)


def _empty_buckets(stranger: RawSender) -> Iterator[Callable[[], None]]:
    """Yield buckets that are whole, sealed and in turn, but have no byte of weights."""
    writer = BucketWriter(np.zeros(BUCKET, np.uint8))
    for number in itertools.count():
        yield partial(stranger.send, Full(1, number % 2, writer.seal(number, Ending.MORE, 0), ()))


def _bytes(raw: socket.socket) -> Iterator[Callable[[], None]]:
    """Yield a message a byte at a time."""
    length = (1 << 16).to_bytes(4, "big")
    return (partial(raw.sendall, part) for part in itertools.chain([length], itertools.repeat(b" ")))


def _leftovers(stranger: RawSender) -> Iterator[Callable[[], None]]:
    """Yield buckets of another sync."""
    return itertools.repeat(partial(stranger.send, Full(9, 0, HEADER, ())))


@pytest.mark.parametrize(
    "sayings",
    [_empty_buckets, _leftovers, lambda stranger: _bytes(stranger.raw)],
    ids=["empty buckets", "another sync", "a byte at a time"],
)
def test_a_sender_that_talks_without_weights_is_left_at_the_deadline(
    sayings: Callable[[RawSender], Iterable[Callable[[], object]]],
) -> None:
    with receiving_from_a_stranger(Model()) as (stranger, received):
        stranger.hand_over()
        stranger.receiver.patience.seconds = SHORT  # from the announcement on
        stranger.send(Announcement(ANNOUNCED, sync=1))
        stranger.receive(Answer)
        talk(sayings(stranger))
        with pytest.raises(SyncTimeoutError, match=r"moved no weights for 0\.3 seconds"):
            received.result(HANG)


def test_a_sender_that_talks_before_it_begins_is_left_at_the_deadline() -> None:
    with receiving_from_a_stranger(Model(), timeout=SHORT) as (stranger, received):
        talk(itertools.chain([stranger.hand_over], _leftovers(stranger)))
        with pytest.raises(SyncTimeoutError, match=r"moved no weights for 0\.3 seconds"):
            received.result(HANG)


@pytest.mark.parametrize("what", ["another sync", "a byte at a time"])
def test_a_receiver_that_talks_is_left_at_the_deadline(what: str) -> None:
    with (
        SharedMemorySender(bucket_bytes=BUCKET, timeout=HANG) as sender,
        sending_to_a_stranger(sender, Model()) as (stranger, raw, sent),
    ):
        stranger.receive(SharedFile)
        stranger.receive(Announcement)
        sender.link.patience.seconds = SHORT  # from the answer on
        stranger.send(Answer(sync=1))
        talk(itertools.repeat(partial(stranger.send, Free(9, 0))) if what == "another sync" else _bytes(raw))
        with pytest.raises(SyncTimeoutError, match=r"moved no weights for 0\.3 seconds"):
            sent.result(HANG)


def test_what_this_end_does_itself_costs_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("samebit.weight_sync.wire.patience.time", SimpleNamespace(monotonic=lambda: clock.now))
    patience = Patience(10)
    patience.begin(100)
    clock.now += 1000
    with patience.waiting() as deadline:
        assert deadline == clock.now + 10
        clock.now += 4
    clock.now += 1000
    with patience.waiting() as deadline:
        assert deadline == clock.now + 6
    for moved, left in ((0, 6), (99, 10), (1, 10), (0, 10)):
        patience.progress(moved)
        with patience.waiting() as deadline:
            assert deadline == clock.now + left
            clock.now += 1 if moved == 0 else 0
    patience.progress(1)
    with patience.waiting() as deadline:
        assert deadline == clock.now + 9, "more than was announced is no progress"


def test_the_changes_of_a_delta_come_once() -> None:
    """A change that came before is refused: a sender that repeats one for ever would keep the sync going for ever."""
    from samebit.weight_sync.wire.buckets import Record, encoded_digest
    from samebit.weight_sync.wire.destination import Destination

    target = torch.zeros(64)
    destination = Destination(TensorSpec("x", (64,), torch.float32), target)
    payload = np.arange(64, dtype=np.uint8)
    record = Record(0, Kind.DENSE, 0, encoded_digest(payload), payload)
    destination.put_change(record)
    with pytest.raises(SyncBrokenError, match="a change of x that came before, at byte 0"):
        destination.put_change(record)
    destination.put_change(replace(record, offset=64))
