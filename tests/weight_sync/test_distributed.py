"""Weights are broadcast to several receivers and from shards, with gloo, in three processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from samebit.weight_sync import (
    BroadcastReceiver,
    BroadcastSender,
    Manifest,
    PeerLostError,
    SyncBrokenError,
    SyncRefusedError,
    SyncTimeoutError,
    UpdateTerms,
    WeightMismatchError,
    apply_weights,
    connected_store,
    gloo_group,
    listening_store,
    nccl_group,
    open_update,
)

from ..forked import run_ranks
from ..patience import HANG, wait_until

SCRIPT = Path(__file__).with_name("ranks.py")


class OfHosts(dist.ProcessGroupGloo):
    """Stands in for NCCL's backend with one that travels between hosts."""

    class Options:
        """Stands in for the options that NCCL's backend is made with."""

        _timeout = timedelta()

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:  # type: ignore[name-defined]
        super().__init__(store, rank, size, timeout=options._timeout)


@pytest.fixture(params=[gloo_group, nccl_group])
def make_group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", OfHosts, raising=False)
    make: Callable[..., Any] = request.param
    return make


def test_three_ranks(tmp_path: Path) -> None:
    codes, said = run_ranks(SCRIPT, 3, tmp_path, patience=HANG)
    assert codes == [0, 0, -signal.SIGKILL], said
    assert said.count("all went well") == 2


def test_a_group_without_a_world(make_group: Callable[..., Any]) -> None:
    """A receiver needs to know nothing but where the sender listens; here each of the two receivers is a thread."""
    torch.manual_seed(1)
    source, targets = nn.Linear(33, 129), [nn.Linear(33, 129) for _ in range(2)]
    store = listening_store("127.0.0.1")

    def receive(rank: int) -> None:
        group = make_group(connected_store("127.0.0.1", store.port), rank, 3, timeout=HANG)
        apply_weights(targets[rank - 1], BroadcastReceiver(0, group, timeout=HANG))

    with ThreadPoolExecutor(2) as threads:
        received = [threads.submit(receive, rank) for rank in (1, 2)]
        with BroadcastSender(make_group(store, 0, 3, timeout=HANG), timeout=HANG) as sender:
            report = sender.send(source)
        for one in received:
            one.result(HANG)
    assert report.tensors == 2
    for target in targets:
        assert torch.equal(target.weight, source.weight)
        assert torch.equal(target.bias, source.bias)


def test_a_store_listens_where_another_has_just_ended() -> None:
    """A trainer that is started again listens at its old port, whose connections the system remembers for a minute."""
    store = listening_store("127.0.0.1")
    port = store.port
    client = connected_store("127.0.0.1", port)
    client.set("known", "to it")
    del store
    assert listening_store("127.0.0.1", port).port == port


def test_a_group_that_a_rank_does_not_join(make_group: Callable[..., Any]) -> None:
    store = listening_store("127.0.0.1")
    with ThreadPoolExecutor(1) as other:
        joining = other.submit(make_group, connected_store("127.0.0.1", store.port), 1, 3, timeout=0.5)
        for join in (lambda: make_group(store, 0, 3, timeout=0.5), joining.result):
            with pytest.raises(SyncTimeoutError, match=r"[12] of 3 ranks of the group came within 0\.5 seconds"):
                join()


def test_a_group_whose_store_is_gone(make_group: Callable[..., Any]) -> None:
    store = listening_store("127.0.0.1")
    client = connected_store("127.0.0.1", store.port)
    del store
    with pytest.raises(PeerLostError, match="the group could not be made"):
        make_group(client, 1, 3, timeout=0.5)


def test_a_rank_beyond_the_group(make_group: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="rank must be from 0 to 2, in a group of 3, got 3"):
        make_group(dist.HashStore(), 3, 3)


def test_a_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="this torch has no NCCL"):
        nccl_group(dist.HashStore(), 0, 2)


def test_a_store_that_nobody_listens_at() -> None:
    with pytest.raises(PeerLostError, match=r"no sender at 127\.0\.0\.1:1: "):
        connected_store("127.0.0.1", 1, timeout=0.1)


def test_a_long_refusal_says_that_it_was_cut() -> None:
    store = listening_store("127.0.0.1")

    def receive() -> None:
        group = gloo_group(connected_store("127.0.0.1", store.port), 1, 2, timeout=HANG)
        apply_weights(nn.Linear(3, 3), BroadcastReceiver(0, group, timeout=HANG))

    with ThreadPoolExecutor(1) as other:
        received = other.submit(receive)
        sender = BroadcastSender(gloo_group(store, 0, 2, timeout=HANG), timeout=HANG)
        with pytest.raises(SyncRefusedError, match=r"unknown: \w+, .* \.\.\. \(\d+ more characters: see the error at"):
            sender.send({f"unknown{number}": torch.zeros(1) for number in range(1000)})
        with pytest.raises(WeightMismatchError, match="unknown999"):
            received.result(HANG)


@pytest.mark.parametrize(
    "reason", ["\U0001f600" * 342, "\U0001f600" * 9000, "\x01" * 5000, "\ud800" * 5000, '"\\' * 5000]
)
def test_a_reason_of_any_characters_leaves_the_group_of_use(reason: str) -> None:
    """A failure's reason in any alphabet fits into the message, which has a set size, and the next sync goes well."""
    store = listening_store("127.0.0.1")
    model, trainer = nn.Linear(3, 5), nn.Linear(3, 5)

    def receive() -> None:
        group = gloo_group(connected_store("127.0.0.1", store.port), 1, 2, timeout=HANG)
        end = BroadcastReceiver(0, group, timeout=HANG)
        with pytest.raises(RuntimeError), open_update(end, model, Manifest.of(model), UpdateTerms(), version=0):
            raise RuntimeError(reason)
        apply_weights(model, end)

    with ThreadPoolExecutor(1) as other:
        received = other.submit(receive)
        sender = BroadcastSender(gloo_group(store, 0, 2, timeout=HANG), timeout=30)
        with pytest.raises(SyncBrokenError, match="1 of 1 receivers failed: RuntimeError: "):
            sender.send(trainer)
        sender.send(trainer)
        received.result(HANG)
    assert torch.equal(model.weight, trainer.weight)


def test_closing_a_receiver_ends_its_wait() -> None:
    store = listening_store("127.0.0.1")
    with ThreadPoolExecutor(1) as other:
        joined = other.submit(gloo_group, connected_store("127.0.0.1", store.port), 1, 2, timeout=HANG)
        group = gloo_group(store, 0, 2, timeout=HANG)
        end = BroadcastReceiver(0, joined.result(), timeout=300)
        received = other.submit(apply_weights, nn.Linear(3, 3), end)
        time.sleep(0.1)
        end.close()
        with pytest.raises(PeerLostError, match=r"the link (was|is) closed"):
            received.result(HANG)
        with pytest.raises(PeerLostError, match="the link is closed"):
            end.listen()
    del group


class _EndsAsItsSliceIsOver(dist.Work):
    """Completes between the end of a slice of its wait and the look at whether it has completed."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work
        self._tired = False

    def wait(self, timeout: timedelta) -> bool:
        if not self._tired:
            self._tired = True
            wait_until(self._work.is_completed)
            raise RuntimeError("Operation timed out!")
        return self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._tired and self._work.is_completed()


class _BusyGroup(dist.ProcessGroupGloo):
    """Ends each of its broadcasts at the most awkward moment."""

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work:
        return _EndsAsItsSliceIsOver(super().broadcast(tensors, options))


def test_a_collective_that_ends_as_its_slice_is_over() -> None:
    """A collective that completes just as a slice of its wait ends is no timeout: the update is whole, and the next
    goes well. (A link broke so once, and left incomplete weights.)
    """
    store = listening_store("127.0.0.1")
    model, trainer = nn.Linear(300, 129), nn.Linear(300, 129)
    limit = timedelta(seconds=HANG)

    def receive() -> None:
        group = _BusyGroup(connected_store("127.0.0.1", store.port), 1, 2, timeout=limit)
        for _ in range(2):
            apply_weights(model, BroadcastReceiver(0, group, timeout=HANG))

    with ThreadPoolExecutor(1) as other:
        received = other.submit(receive)
        sender = BroadcastSender(_BusyGroup(store, 0, 2, timeout=limit), bucket_bytes=1 << 13, timeout=HANG)
        for _ in range(2):
            sender.send(trainer)
        received.result(HANG)
    assert torch.equal(model.weight, trainer.weight)
