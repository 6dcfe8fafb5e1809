"""Weights come through CUDA IPC between two processes on one GPU. tests/weight_sync/test_device.py has the protocol."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from samebit.weight_sync import CudaIpcReceiver, SyncBrokenError, apply_weights

from ..patience import HANG
from .sending import BUCKET, Model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SYNCS = 3


@contextmanager
def sending(*die_after: int) -> Iterator[subprocess.Popen[str]]:
    """Start the trainer's process, which can be no fork: it uses the GPU too."""
    script = str(Path(__file__).with_name("sending.py"))
    command = [sys.executable, script, str(SYNCS), *map(str, die_after)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_everything_arrives_bit_for_bit() -> None:
    model = Model(99).cuda()
    with sending() as process, CudaIpcReceiver(said(process), timeout=HANG) as end:
        for seed in range(SYNCS):
            report = apply_weights(model, end, version=seed, verify=True)
            assert said(process) == report.digest
            expected = Model(seed).state_dict()
            assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in model.state_dict().items())
        assert process.wait(HANG) == 0


@pytest.mark.parametrize("buckets", [0, 1, 3])
def test_a_sender_that_is_killed(buckets: int) -> None:
    with sending(buckets) as process:
        with CudaIpcReceiver(said(process), timeout=2 * HANG) as end:
            began = time.monotonic()
            with pytest.raises(SyncBrokenError):
                apply_weights(Model(99).cuda(), end)
            assert time.monotonic() - began < HANG
        assert process.wait(HANG) == -signal.SIGKILL


def test_no_more_memory_than_two_buckets() -> None:
    model = Model(99).cuda()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with sending() as process, CudaIpcReceiver(said(process), timeout=HANG) as end:
        for seed in range(SYNCS):
            apply_weights(model, end, version=seed)
            said(process)
    largest = max(p.numel() * p.element_size() for p in model.parameters() if not p.is_contiguous())
    assert torch.cuda.max_memory_allocated() - before <= 8 * BUCKET + 2 * largest, "the buckets are the sender's"
