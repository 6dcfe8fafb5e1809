"""Nobody hangs, nothing stays behind, no mixture is served after kill -9 of either side at twenty points of a sync."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from samebit.rollout.errors import WorkerStateError
from samebit.rollout.sampling_params import SamplingParams
from samebit.weight_sync import (
    BroadcastReceiver,
    PeerLostError,
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncBrokenError,
    apply_weights,
    gloo_group,
)

from ...forks import python
from ...patience import HANG, wait_until
from ..conftest import weights_of
from ..named_memory import named_memory

SCRIPT = Path(__file__).parents[2] / "weight_sync" / "dying.py"
POINTS = 20
TIMEOUT = 2 * HANG
"""Is the timeout of the links: what took less than `HANG` did not wait for it."""

MakeWorker = Callable[..., tuple[Any, Any]]


class Dying:
    """Drives the process that forks; see dying.py."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [*python(), str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            start_new_session=True,
        )
        assert self.line() == "ready"

    def start(self, role: str, calls: int | None, address: str = "") -> None:
        assert self._process.stdin is not None
        print(json.dumps({"role": role, "calls": calls, "address": address}), file=self._process.stdin, flush=True)

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # a child that lives on would keep the pipe open
        self._process.communicate()


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dying]:
    forks = Dying(tmp_path_factory.mktemp("dying"))
    yield forks
    forks.close()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 129), nn.Linear(129, 33), nn.Embedding(7, 1000))


def points(calls: int) -> list[int]:
    """Return points that are spread over the sync, the first call and the last among them."""
    return [1 + round(number * (calls - 1) / (POINTS - 1)) for number in range(POINTS)]


def test_a_sender_is_killed(make_worker: MakeWorker, dying: Dying) -> None:
    worker, _ = make_worker(module=model())
    names = named_memory()
    dying.start("sender", None)
    with SharedMemoryReceiver(dying.line(), timeout=TIMEOUT) as end:
        worker.receive_weights(end)
    outcomes = [_killed_sender(worker, dying, point) for point in points(int(dying.line()))]
    assert set(outcomes) == {"old", "incomplete", "new"}
    wait_until(lambda: named_memory() <= names)


def _killed_sender(worker: Any, dying: Dying, point: int) -> str:
    before = weights_of(worker)
    dying.start("sender", point)
    address = dying.line()
    began = time.monotonic()
    with SharedMemoryReceiver(address, timeout=TIMEOUT) as end:
        outcome = receive(worker, end)
        while Path(address).parent.exists():
            with pytest.raises(SyncBrokenError):
                end.listen()  # which clears what a dead sender left
            assert time.monotonic() - began < HANG
    check(worker, outcome, before)
    return outcome


def test_a_sender_of_a_delta_is_killed(make_worker: MakeWorker, dying: Dying) -> None:
    worker, _ = make_worker(module=model())
    dying.start("delta sender", None)
    with SharedMemoryReceiver(dying.line(), timeout=TIMEOUT) as end:
        whole, delta = worker.receive_weights(end), worker.receive_weights(end)
    assert 0 < delta.sent_bytes < whole.sent_bytes / 4
    assert delta.changed == ("0.weight",)
    outcomes = [_killed_delta_sender(worker, dying, point) for point in points(int(dying.line()))]
    assert set(outcomes) == {"old", "incomplete", "new"}


def _killed_delta_sender(worker: Any, dying: Dying, point: int) -> str:
    dying.start("delta sender", point)
    with SharedMemoryReceiver(dying.line(), timeout=TIMEOUT) as end:
        worker.receive_weights(end)
        before = weights_of(worker)
        began = time.monotonic()
        outcome = receive(worker, end)
        assert time.monotonic() - began < HANG
    check(worker, outcome, before)
    return outcome


def test_a_gloo_sender_is_killed(make_worker: MakeWorker, dying: Dying, tmp_path: Path) -> None:
    worker, _ = make_worker(module=model())
    worker.receive_weights(gloo_end(dying, tmp_path / "whole", None))
    calls = int(dying.line())
    outcomes = [_killed_gloo_sender(worker, dying, tmp_path / f"{at}", at) for at in points(calls)]
    assert {"old", "incomplete"} <= set(outcomes)
    assert worker.receive_weights(gloo_end(dying, tmp_path / "again", None), verify=True).tensors == 5
    assert int(dying.line()) > POINTS


def gloo_end(dying: Dying, store: Path, calls: int | None) -> BroadcastReceiver:
    """Return the end of a group whose sender dies at this call."""
    dying.start("gloo sender", calls, str(store))
    return BroadcastReceiver(0, gloo_group(dist.FileStore(str(store), 2), 1, 2, timeout=TIMEOUT), timeout=TIMEOUT)


def _killed_gloo_sender(worker: Any, dying: Dying, store: Path, calls: int) -> str:
    before = weights_of(worker)
    began = time.monotonic()
    try:
        end = gloo_end(dying, store, calls)
    except PeerLostError:  # it was killed while this side still joined the group
        outcome = "old"
    else:
        outcome = receive(worker, end)
        with pytest.raises(SyncBrokenError):
            end.listen()
    assert time.monotonic() - began < HANG
    check(worker, outcome, before)
    return outcome


def receive(worker: Any, end: Any) -> str:
    """Receive; return what became of the weights."""
    try:
        worker.receive_weights(end, verify=True)
    except SyncBrokenError:
        return "old" if worker.trouble() is None else "incomplete"
    return "new"


def check(worker: Any, outcome: str, before: dict[str, torch.Tensor]) -> None:
    """Check that no mixture is served, and a full update heals."""
    if outcome == "old":
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(worker).items())
    if outcome == "incomplete":
        with pytest.raises(WorkerStateError, match="weights incomplete"):
            worker.submit([1])
        worker.receive_weights(model(), verify=True)
    assert len(worker.generate([[1]], SamplingParams(max_tokens=2))) == 1


def test_a_receiver_is_killed(dying: Dying) -> None:
    weights, target = model(), model()
    names = named_memory()
    with SharedMemorySender(bucket_bytes=4096, timeout=TIMEOUT) as sender, ThreadPoolExecutor(1) as other:
        dying.start("receiver", None, sender.address)
        sender.send(weights)
        for point in points(int(dying.line()))[:-1]:
            began = time.monotonic()
            dying.start("receiver", point, sender.address)
            with pytest.raises(SyncBrokenError):
                sender.send(weights)
            assert time.monotonic() - began < HANG
        with SharedMemoryReceiver(sender.address, timeout=TIMEOUT) as end:
            received = other.submit(apply_weights, target, end)
            assert sender.send(weights).sent_bytes > 0
            received.result(HANG)
    assert all(torch.equal(a, b) for a, b in zip(weights.parameters(), target.parameters(), strict=True))
    wait_until(lambda: named_memory() <= names)
