"""Weights through CUDA IPC, two processes on one GPU. The protocol is tested in tests/weight_sync/test_device.py."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import nn

from samebit.weight_sync import CudaIpcReceiver, CudaIpcSender, SyncBrokenError, apply_weights

from ..patience import HANG

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BUCKET = 1 << 16
SYNCS = 3


class Model(nn.Module):
    """Larger than a bucket, empty, transposed, a tie, an integer buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(1000, 129, dtype=torch.bfloat16)
        self.head = nn.Linear(129, 1000, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.none = nn.Parameter(torch.randn(0, 3))
        self.turned = nn.Parameter(torch.randn(33, 65).t())
        self.register_buffer("steps", torch.arange(3))


def send(connection: Connection, syncs: int, die_after: int | None) -> None:
    """The trainer's process: each sync with other weights, so many buckets before it is killed."""
    with CudaIpcSender(bucket_bytes=BUCKET, timeout=HANG) as sender:
        connection.send(sender.address)
        if die_after is not None:
            real, count = sender.link.send_bucket, iter(range(1000))
            sender.link.send_bucket = (  # type: ignore[method-assign]
                lambda header: real(header) if next(count) < die_after else os.kill(os.getpid(), signal.SIGKILL)
            )
        for seed in range(syncs):
            connection.send(sender.send(Model(seed).cuda()).digest)


def start(die_after: int | None = None) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send, args=(theirs, SYNCS, die_after), daemon=True)
    process.start()
    return process, ours


def test_everything_arrives_bit_for_bit() -> None:
    process, connection = start()
    model = Model(99).cuda()
    with CudaIpcReceiver(connection.recv(), timeout=HANG) as end:
        for seed in range(SYNCS):
            report = apply_weights(model, end, version=seed, verify=True)
            assert connection.recv() == report.digest
            expected = Model(seed).state_dict()
            assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in model.state_dict().items())
    process.join(HANG)
    assert process.exitcode == 0


@pytest.mark.parametrize("buckets", [0, 1, 3])
def test_a_sender_that_is_killed(buckets: int) -> None:
    process, connection = start(die_after=buckets)
    with CudaIpcReceiver(connection.recv(), timeout=2 * HANG) as end:
        began = time.monotonic()
        with pytest.raises(SyncBrokenError):
            apply_weights(Model(99).cuda(), end)
        assert time.monotonic() - began < HANG
    process.join(HANG)
    assert process.exitcode == -signal.SIGKILL


def test_no_more_memory_than_two_buckets() -> None:
    process, connection = start()
    model = Model(99).cuda()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with CudaIpcReceiver(connection.recv(), timeout=HANG) as end:
        for seed in range(SYNCS):
            apply_weights(model, end, version=seed)
            connection.recv()
    largest = max(p.numel() * p.element_size() for p in model.parameters() if not p.is_contiguous())
    assert torch.cuda.max_memory_allocated() - before <= 8 * BUCKET + 2 * largest, "the buckets are the sender's"
    process.join(HANG)
