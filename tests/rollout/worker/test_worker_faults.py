"""No room, damaged memory or a base that changes give a clear error and no mixture; a full sync heals the worker."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from samebit.rollout.errors import WorkerStateError
from samebit.rollout.sampling_params import SamplingParams
from samebit.weight_sync import (
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncBrokenError,
    VerificationError,
)

from ...patience import HANG
from ..inside import spill_file

MakeWorker = Callable[..., tuple[Any, Any]]
FEW = SamplingParams(max_tokens=5)
LIMIT = 1 << 16


@contextmanager
def no_room() -> Iterator[None]:
    """Let files of this process not grow beyond `LIMIT` bytes: what a full disk or /dev/shm does to them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def larger() -> nn.Module:
    """Make a module with weights of more than `LIMIT` bytes."""
    return nn.Sequential(nn.Linear(1000, 129), nn.Linear(129, 100))


def copies(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(module: nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())


def test_a_full_shared_memory_ends_the_sync_on_both_sides_and_the_next_one_works(make_worker: MakeWorker) -> None:
    module = larger()
    worker, _ = make_worker(module=module)
    before = copies(module)
    trainer = larger()
    with (
        SharedMemorySender(bucket_bytes=1 << 20, timeout=HANG) as sender,
        SharedMemoryReceiver(sender.address, timeout=HANG) as end,
        ThreadPoolExecutor(1) as beside,
    ):
        with no_room():
            received = beside.submit(worker.receive_weights, end)
            with pytest.raises(OSError, match="no room for 2097152 bytes of shared memory"):
                sender.send(trainer)
            with pytest.raises(SyncBrokenError, match=r"the sender broke off: .* no room for 2097152 bytes"):
                received.result(HANG)
        assert same(module, before)
        assert len(worker.generate([[1]], FEW)) == 1
        sending = threading.Thread(target=sender.send, args=(trainer,))
        sending.start()
        assert worker.receive_weights(end, verify=True).version == 1
        sending.join(HANG)
    assert same(module, copies(trainer))
    assert len(worker.generate([[1]], FEW)) == 1


def test_no_room_for_the_copy_of_weights_that_are_to_sleep(make_worker: MakeWorker) -> None:
    module = larger()
    worker, _ = make_worker(module=module)
    before = copies(module)
    with no_room(), pytest.raises(OSError, match="too large"):
        worker.sleep("weights")
    assert same(module, before), "nothing was released"
    assert not worker._weights.memory.has_copy
    assert len(worker.generate([[1]], FEW)) == 1
    worker.sleep("weights")
    worker.wake_up()
    assert same(module, before)


@pytest.mark.parametrize("place", [-1, -1000, -400_000])
def test_a_flipped_bit_in_the_copy_of_sleeping_weights(make_worker: MakeWorker, place: int) -> None:
    module = larger()
    worker, _ = make_worker(module=module, while_asleep="wait")
    whole = copies(module)
    worker.sleep()
    flip(spill_file(worker), place)
    with pytest.raises(VerificationError, match="copy of the weights that slept is damaged"):
        worker.wake_up()
    worker.wake_up()
    with pytest.raises(WorkerStateError, match="weights incomplete: the copy"):
        worker.generate([[1]], FEW)
    worker.receive_weights(whole)
    assert same(module, whole)
    assert len(worker.generate([[1]], FEW)) == 1


def flip(file: int, place: int) -> None:
    """Flip a bit of the byte so far from the file's end."""
    place += os.fstat(file).st_size
    os.pwrite(file, bytes([os.pread(file, 1, place)[0] ^ 4]), place)


def test_a_copy_of_sleeping_weights_that_is_cut_off(make_worker: MakeWorker) -> None:
    module = larger()
    worker, _ = make_worker(module=module)
    whole = copies(module)
    worker.sleep("weights")
    os.ftruncate(spill_file(worker), LIMIT)
    with pytest.raises(VerificationError, match="copy of the weights that slept is damaged"):
        worker.wake_up()
    with pytest.raises(WorkerStateError, match="weights incomplete: the copy"):
        worker.submit([1], FEW)
    worker.receive_weights(whole)
    assert len(worker.generate([[1]], FEW)) == 1


def test_a_base_that_changes_between_the_check_of_a_delta_and_its_write(make_worker: MakeWorker) -> None:
    """A base that changes between the check of a delta and its write, without a word to the worker, is noticed. (One
    that was told refuses the delta.)
    """
    module = larger()
    worker, _ = make_worker(module=module)
    trainer = larger()
    with (
        SharedMemorySender(timeout=HANG) as sender,
        SharedMemoryReceiver(sender.address, timeout=HANG) as end,
        ThreadPoolExecutor(1) as beside,
    ):

        def send() -> Any:
            return beside.submit(sender.send, trainer, delta=True)

        sending = send()
        worker.receive_weights(end)
        assert not sending.result(HANG).delta
        with torch.no_grad():
            trainer[0].weight[3, 5] += 1
        agree = end.answer

        def agree_and_be_overtaken(answer: Any) -> Any:
            decided = agree(answer)
            with torch.no_grad():
                module[0].weight[3, 6] += 1
            return decided

        end.answer = agree_and_be_overtaken
        sending = send()
        with pytest.raises(SyncBrokenError, match="wrong checksum of the weights after the changes"):
            worker.receive_weights(end)
        with pytest.raises(SyncBrokenError, match="wrong checksum of the weights after the changes"):
            sending.result(HANG)
        with pytest.raises(WorkerStateError, match="weights incomplete"):
            worker.generate([[1]], FEW)
        end.answer = agree
        sending = send()
        worker.receive_weights(end, verify=True)
        assert not sending.result(HANG).delta, "all of it came"
    assert same(module, copies(trainer))
    assert len(worker.generate([[1]], FEW)) == 1
