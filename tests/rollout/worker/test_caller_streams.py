"""What a worker launches on a GPU comes after what its caller has launched, on whatever stream that was.

Stand-ins for streams: tests/gpu/test_streams.py has those of a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from samebit.kernels import bind
from samebit.kernels.layout.memory_pool import WHOLE_GPU
from samebit.rollout import RolloutConfig
from samebit.rollout.control.compute_threads import ComputeThreads
from samebit.rollout.runner.model_runner import ModelRunner

from ...exactness.families import make_model
from ...patience import HANG

MakeWorker = Callable[..., tuple[Any, Any]]


class Stream:
    """Notes which streams it waits for."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)


def test_the_default_stream_waits_for_that_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    default, own = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    for kind, current, waited in (("cpu", own, []), ("cuda", default, []), ("cuda", own, [own])):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, current=current: current)
        ComputeThreads(1, torch.device(kind, 0)).follow_caller()
        assert default.waited == waited
    assert own.waited == [default]


def test_all_of_the_gpu_is_waited_for_where_nobody_says_which_stream_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the GPU is waited for, and no worker records a graph meanwhile: CUDA refuses to wait then."""
    waited: list[tuple[torch.device, bool]] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append((device, WHOLE_GPU.locked())))
    config = RolloutConfig(max_num_seqs=2, num_blocks=8, max_model_len=32).with_block_size(None)
    runner = ModelRunner(bind(make_model("Qwen3", torch.float32)), config)
    runner.wait_for_writes()
    assert not waited
    runner.shape = replace(runner.shape, device=torch.device("cuda", 1))
    runner.wait_for_writes()
    assert waited == [(torch.device("cuda", 1), True)]
    assert not WHOLE_GPU.locked()


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_it_does_so_when_a_worker_starts_and_around_each_block(
    in_main_thread: bool, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[str, int]] = []

    def note(what: str) -> None:
        happened.append((what, threading.get_ident()))

    monkeypatch.setattr(ComputeThreads, "follow_caller", lambda self: note("follow"))

    def updated() -> None:
        worker, _ = make_worker(shared=True)
        note("built")
        with worker.weight_update():
            note("block")
        note("over")
        worker.receive_weights()
        worker.close()

    if in_main_thread:
        updated()
    else:
        thread = threading.Thread(target=updated)
        thread.start()
        thread.join(HANG)
        assert not thread.is_alive()
    names = [what for what, _ in happened]
    assert names[:8] == ["follow", "built", "follow", "block", "follow", "over", "follow", "follow"]
    assert len({thread for _, thread in happened}) == 1, "in the caller's thread, whose stream it is"


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_the_worker_is_free_again_where_the_wait_fails(
    in_main_thread: bool, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is free again where the wait for the caller's stream fails, as all calls do on a GPU that an error has
    stopped.
    """
    broken: list[bool] = []

    def follow(self: ComputeThreads) -> None:
        if broken:
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(ComputeThreads, "follow_caller", follow)
    worker, _ = make_worker(shared=True)

    def updated() -> None:
        with pytest.raises(RuntimeError, match="illegal") as kept, worker.weight_update():
            broken.append(True)
        broken.clear()
        assert worker.weight_version == 0, "such an update has not happened"
        worker.pause()
        assert kept.tb, "who keeps the error keeps the block"

    if in_main_thread:
        updated()
    else:
        thread = threading.Thread(target=updated)
        thread.start()
        thread.join(HANG)
        assert not thread.is_alive()
    assert worker.paused
