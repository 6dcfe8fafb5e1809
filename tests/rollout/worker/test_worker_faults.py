"""No room, damaged memory or a base that changes give a clear error and no mixture; a full sync heals the worker."""

from __future__ import annotations

import gc
import os
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn

from samebit.rollout.errors import WorkerStateError
from samebit.rollout.guard import without_frames
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


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Begin without garbage, and let none go away."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_an_update_that_broke_off_holds_nothing_of_its_block(make_worker: MakeWorker) -> None:
    """The cause that a worker remembers of an update holds neither what the optimizer had, nor what its callers had;
    it says where it came from.
    """
    worker, _ = make_worker(shared=True)
    made: list[weakref.ref[torch.Tensor]] = []

    def optimizer_step() -> None:
        moments = torch.ones(3)
        made.append(weakref.ref(moments))
        raise ZeroDivisionError("in the optimizer")

    def train() -> None:
        batch = torch.ones(3)
        made.append(weakref.ref(batch))
        with worker.weight_update():
            optimizer_step()

    with nothing_collected():
        with suppress(ZeroDivisionError):  # pytest.raises would keep the traceback itself
            train()
        with pytest.raises(WorkerStateError, match="in the optimizer") as caught:
            worker.generate([[1]], FEW)
        assert [tensor() for tensor in made] == [None, None]
    cause = caught.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert "optimizer_step" in cause.__notes__[0]


def test_weights_that_were_not_taken_whole_are_not_held(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = make_worker()
    made: list[weakref.ref[torch.Tensor]] = []

    def send() -> None:
        weights = copies(worker.module)
        made.extend(map(weakref.ref, weights.values()))
        worker.receive_weights(weights)

    def fail(*_: object, **__: object) -> None:
        raise VerificationError("not those")

    monkeypatch.setattr(worker._weights, "write", fail)
    with nothing_collected():
        with suppress(VerificationError):
            send()
        assert made
        assert [tensor() for tensor in made] == [None] * len(made)
    with pytest.raises(WorkerStateError, match="VerificationError: not those"):
        worker.generate([[1]], FEW)


class OddError(Exception):
    """Can not be made of its arguments again."""

    def __init__(self, *, name: str) -> None:
        super().__init__(f"no {name}")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError(2, "gone", "file"), FileNotFoundError), (OddError(name="room"), RuntimeError), (KeyError("a"), KeyError)],
    ids=["OSError", "OddError", "KeyError"],
)
def test_what_is_kept_of_an_error_says_what_it_said(error: Exception, kind: type[Exception]) -> None:
    error.__cause__ = ValueError("before")
    kept = without_frames(error)
    assert type(kept) is kind
    assert str(error) in str(kept)
    assert isinstance(kept.__cause__, ValueError)
    assert kept.__traceback__ is None


class SilentError(Exception):
    """Fails where it is to say what happened."""

    def __str__(self) -> str:
        raise ValueError("no text")


def raised_in_a_circle() -> None:
    """Raise an error whose cause has it as its cause, as unwrapping does."""
    try:
        raise ValueError("out of range")
    except ValueError as first:
        wrapper = RuntimeError("optimizer failed")
        wrapper.__cause__ = first
        first.__cause__ = wrapper
        raise


@pytest.mark.parametrize("fails", [raised_in_a_circle, SilentError], ids=["circle", "no text"])
def test_an_update_breaks_off_whatever_its_error_is(make_worker: MakeWorker, fails: Callable[[], object]) -> None:
    worker, _ = make_worker(shared=True)

    def step() -> None:
        error = fails()
        assert isinstance(error, Exception)
        raise error

    with pytest.raises((ValueError, SilentError)), worker.weight_update():
        step()
    with pytest.raises(WorkerStateError, match=r"an update broke off \((ValueError: out of range|SilentError)\)"):
        worker.generate([[1]], FEW)


def test_what_is_kept_of_an_error_says_what_it_was_raised_behind() -> None:
    def fail() -> None:
        try:
            raise RuntimeError("device-side assert")
        except RuntimeError:
            raise KeyError("gone")  # noqa: B904  (what a handler raises by mistake)

    with pytest.raises(KeyError) as caught:
        fail()
    kept = without_frames(caught.value)
    assert str(kept.__context__) == "device-side assert"
    assert kept.__context__ is not caught.value.__context__


def test_what_is_kept_of_an_error_holds_no_other() -> None:
    kept = without_frames(OSError("all failed", [ValueError("one")]))
    assert type(kept) is RuntimeError
    assert "all failed" in str(kept)


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
