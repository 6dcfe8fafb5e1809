"""Broadcast to several receivers and from shards, with gloo, in three processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from samebit.weight_sync import BroadcastReceiver, BroadcastSender, apply_weights, gloo_group, listening_store

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
        group = gloo_group(TCPStore("127.0.0.1", store.port), rank, 3, timeout=30)
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
