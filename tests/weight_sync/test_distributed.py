"""Broadcast to several receivers and from shards, with gloo, in three processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

from samebit.weight_sync import (
    BroadcastReceiver,
    BroadcastSender,
    PeerLostError,
    SyncRefusedError,
    SyncTimeoutError,
    WeightMismatchError,
    apply_weights,
    connected_store,
    gloo_group,
    listening_store,
)

SCRIPT = Path(__file__).with_name("ranks.py")


def test_three_ranks(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
        )
        for rank in range(3)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    codes = [rank.returncode for rank in ranks]
    assert codes == [0, 0, -signal.SIGKILL], "\n".join(said)
    assert all("all went well" in text for text in said[:2])


def test_a_group_without_a_world() -> None:
    """Two receivers that know nothing but where the sender listens; here each is a thread."""
    torch.manual_seed(1)
    source, targets = nn.Linear(33, 129), [nn.Linear(33, 129) for _ in range(2)]
    store = listening_store("127.0.0.1")

    def receive(rank: int) -> None:
        group = gloo_group(connected_store("127.0.0.1", store.port), rank, 3, timeout=30)
        apply_weights(targets[rank - 1], BroadcastReceiver(0, group, timeout=30))

    with ThreadPoolExecutor(2) as threads:
        received = [threads.submit(receive, rank) for rank in (1, 2)]
        with BroadcastSender(gloo_group(store, 0, 3, timeout=30), timeout=30) as sender:
            report = sender.send(source)
        for one in received:
            one.result(30)
    assert report.tensors == 2
    for target in targets:
        assert torch.equal(target.weight, source.weight)
        assert torch.equal(target.bias, source.bias)


def test_a_group_that_a_rank_does_not_join() -> None:
    store = listening_store("127.0.0.1")
    with ThreadPoolExecutor(1) as other:
        joining = other.submit(gloo_group, connected_store("127.0.0.1", store.port), 1, 3, timeout=0.5)
        for join in (lambda: gloo_group(store, 0, 3, timeout=0.5), joining.result):
            with pytest.raises(SyncTimeoutError, match=r"2 of 3 ranks of the group came within 0\.5 seconds"):
                join()


def test_a_group_whose_store_is_gone() -> None:
    store = listening_store("127.0.0.1")
    client = connected_store("127.0.0.1", store.port)
    del store
    with pytest.raises(PeerLostError, match="the group could not be made"):
        gloo_group(client, 1, 3, timeout=0.5)


def test_a_rank_beyond_the_group() -> None:
    with pytest.raises(ValueError, match="rank must be from 0 to 2, in a group of 3, got 3"):
        gloo_group(dist.HashStore(), 3, 3)


def test_a_store_that_nobody_listens_at() -> None:
    with pytest.raises(PeerLostError, match=r"no sender at 127\.0\.0\.1:1: "):
        connected_store("127.0.0.1", 1, timeout=0.1)


def test_a_long_refusal_says_that_it_was_cut() -> None:
    store = listening_store("127.0.0.1")

    def receive() -> None:
        group = gloo_group(connected_store("127.0.0.1", store.port), 1, 2, timeout=30)
        apply_weights(nn.Linear(3, 3), BroadcastReceiver(0, group, timeout=30))

    with ThreadPoolExecutor(1) as other:
        received = other.submit(receive)
        sender = BroadcastSender(gloo_group(store, 0, 2, timeout=30), timeout=30)
        with pytest.raises(SyncRefusedError, match=r"unknown: \w+, .* \.\.\. \(\d+ more characters: see the error at"):
            sender.send({f"unknown{number}": torch.zeros(1) for number in range(1000)})
        with pytest.raises(WeightMismatchError, match="unknown999"):
            received.result(30)
