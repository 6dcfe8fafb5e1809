"""A difference gives back every bit, takes the smallest form, and is never applied to other weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from samebit.weight_sync import SharedMemoryReceiver, SharedMemorySender, SyncBrokenError, apply_weights
from samebit.weight_sync.wire.buckets import Kind
from samebit.weight_sync.wire.delta import DeltaEncoder, apply_encoded

from ..patience import HANG

TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@settings(max_examples=150, deadline=None)
@given(
    element=st.sampled_from([1, 2, 4, 8]),
    size=st.sampled_from([1, 2, 7, 63, 100, 129, 1000, 65536]),
    share=st.sampled_from([0.0, 0.001, 0.03, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_piece_comes_back_bit_for_bit_in_its_smallest_form(element: int, size: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size * element, np.uint8)
    new = old.copy()
    chosen = rng.random(size) < share
    new.view(TYPES[element])[chosen] ^= rng.integers(1, 1 << 8 * element - 1, int(chosen.sum()), TYPES[element])
    base = old.copy()
    encoded = DeltaEncoder(1 << 20).encode(new, base, element)
    assert np.array_equal(base, new)
    count = int(chosen.sum())
    if encoded is None:
        assert count == 0
        return
    places = {Kind.SPARSE: -(-2 * count // 8) * 8, Kind.BITMAP: -(-size // 64) * 8}
    sizes = {kind: 16 + room + count * element for kind, room in places.items()} | {Kind.DENSE: size * element}
    assert encoded.size == sizes[encoded.kind] == min(sizes.values())
    if encoded.kind is Kind.DENSE:
        assert encoded.parts[0] is new
        return
    apply_encoded(encoded.kind, np.concatenate(encoded.parts), old, element)
    assert np.array_equal(old, new)


@settings(max_examples=200, deadline=None)
@given(kind=st.sampled_from([Kind.SPARSE, Kind.BITMAP]), payload=st.binary(max_size=80), count=st.integers(0, 70))
def test_a_payload_that_nobody_made_never_writes_outside(kind: Kind, payload: bytes, count: int) -> None:
    prefix = np.array([count, 32], np.uint64).view(np.uint8)
    damaged = np.concatenate([prefix, np.frombuffer(payload, np.uint8)])
    memory = np.zeros(100 * 2, np.uint8)
    try:
        apply_encoded(kind, damaged, memory[:64], 2)
    except SyncBrokenError:
        assert not memory.any()
    assert not memory[64:].any()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(129, 1000).to(torch.bfloat16))
        self.deep = nn.Parameter(torch.randn(7, 100))
        self.still = nn.Parameter(torch.randn(1000))
        self.turned = nn.Parameter(torch.randn(33, 65).t())
        self.one = nn.Parameter(torch.randn(1))


class Pair:
    """Holds a trainer's and a receiver's model, and what syncs them."""

    def __init__(self) -> None:
        self.trainer, self.model = Model(), Model()
        self.sender = SharedMemorySender(bucket_bytes=16384, timeout=HANG)
        self.end = SharedMemoryReceiver(self.sender.address, timeout=HANG)
        self.version = 0

    def sync(self, *, cast: bool = False, **options: Any) -> tuple[Any, Any]:
        with ThreadPoolExecutor(1) as other:
            sent = other.submit(self.sender.send, self.trainer, **options)
            received = apply_weights(self.model, self.end, version=self.version, cast=cast, verify=True)
        return sent.result(), received

    def assert_equal(self) -> None:
        for ours, theirs in zip(self.trainer.parameters(), self.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.fixture
def pair() -> Iterator[Pair]:
    torch.manual_seed(0)
    both = Pair()
    yield both
    both.end.close()
    both.sender.close()


@torch.no_grad()
def nudge(model: Model, share: float) -> None:
    """Change that share of `wide`, one element of `deep`, and the sign of a zero in `turned`."""
    chosen = torch.rand(model.wide.shape) < share
    model.wide[chosen] *= 2
    model.deep[3, 4] += 1
    model.turned[0, 0] = -0.0 if not torch.signbit(model.turned[0, 0]) else 0.0


def test_only_changes_travel_and_the_result_is_the_same(pair: Pair) -> None:
    sent, received = pair.sync(delta=True)
    assert not sent.delta, "there is no base yet"
    assert sent.sent_bytes == sent.dense_bytes
    for share, most in ((0.0, 0.01), (0.01, 0.05), (0.2, 0.4), (1.0, 1.0)):
        nudge(pair.trainer, share)
        sent, received = pair.sync(delta=True)
        pair.assert_equal()
        assert sent.delta
        assert sent.sent_bytes == received.sent_bytes <= most * sent.dense_bytes
        assert set(received.changed) == ({"wide", "deep", "turned"} if share else {"deep", "turned"})
        assert received.digest == sent.digest
        assert received.verified
    with pytest.raises(ValueError, match="delta must be"):
        pair.sender.send(pair.trainer, delta=1)  # type: ignore[arg-type]
    sent, received = pair.sync(delta=True)
    assert (sent.sent_bytes, received.changed) == (0, ())


def test_a_receiver_that_missed_an_update_gets_all_of_it(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.sync(delta=True)
    nudge(pair.trainer, 0.01)
    with torch.no_grad():
        pair.model.one += 1
    sent, _ = pair.sync(delta=True)
    assert not sent.delta
    pair.assert_equal()
    assert "asked for all weights" in caplog.text
    assert pair.sync(delta=True)[0].delta, "which is the new base"
    pair.version = 4
    nudge(pair.trainer, 0.01)
    assert not pair.sync(delta=True)[0].delta, "the same bits, but another version"
    pair.assert_equal()


def test_a_full_update_in_between_is_a_base_no_more(pair: Pair) -> None:
    pair.sync(delta=True)
    pair.sync()
    assert not pair.sync(delta=True)[0].delta
    assert pair.sync(delta=True)[0].delta


def test_a_cast_at_the_receiver_needs_all_weights(pair: Pair) -> None:
    pair.model.deep = nn.Parameter(pair.model.deep.double())
    pair.sync(delta=True, cast=True)
    assert not pair.sync(delta=True, cast=True)[0].delta


def test_after_a_failed_sync_all_is_sent(pair: Pair) -> None:
    pair.sync(delta=True)
    nudge(pair.trainer, 0.01)
    with torch.no_grad():
        pair.trainer.one.fill_(float("nan"))
    with pytest.raises(SyncBrokenError, match="NaN or infinity"):
        pair.sync(delta=True)
    with torch.no_grad():
        pair.trainer.one.zero_()
    assert not pair.sync(delta=True)[0].delta
    pair.assert_equal()
