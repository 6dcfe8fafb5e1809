"""Weights that come to a worker over a link or from an iterator arrive whole, and no fault leaves a mixture in use."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from samebit.rollout.errors import WorkerStateError
from samebit.rollout.sampling_params import SamplingParams
from samebit.weight_sync import (
    NonFiniteWeightError,
    PeerLostError,
    SendReport,
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncBrokenError,
    SyncRefusedError,
    SyncTimeoutError,
    TensorSpec,
    VerificationError,
    WeightMismatchError,
    WeightStream,
    apply,
)
from samebit.weight_sync.digest import digest_of
from samebit.weight_sync.transports.unix_socket import Full
from samebit.weight_sync.wire import receiver
from samebit.weight_sync.wire.buckets import BucketHeader, Ending
from samebit.weight_sync.wire.link import Announcement

from ...noted_stream import noted_stream
from ...patience import HANG, wait_until
from ...weight_sync.expert_models import expert_model
from ..conftest import weights_of
from ..inside import num_waiting
from ..named_memory import named_memory
from ..step_gate import StepGate

MakeWorker = Callable[..., tuple[Any, Any]]
FEW = SamplingParams(max_tokens=5)
BUCKET = 1024


class Odd(nn.Module):
    """Has odd sizes, tensors larger than a bucket, one empty, one transposed, a tie, an integer buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 129, dtype=dtype)
        self.head = nn.Linear(129, 100, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.proj = nn.Linear(1000, 7, dtype=dtype)
        self.one = nn.Parameter(torch.randn(1, dtype=dtype))
        self.none = nn.Parameter(torch.randn(0, 3, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(33, 65, dtype=dtype).t())
        self.register_buffer("steps", torch.arange(3))


def same_weights(left: nn.Module, right: nn.Module) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def serves(worker: Any) -> bool:
    return len(worker.generate([[1]], FEW)) == 1


class Sending:
    """Runs a sender in another thread; its report or its error is `result()`."""

    def __init__(self, sender: Any, weights: object, **options: object) -> None:
        self._outcome: list[object] = []
        self._thread = threading.Thread(target=self._run, args=(sender, weights, options), daemon=True)
        self._thread.start()

    def _run(self, sender: Any, weights: object, options: dict[str, Any]) -> None:
        try:
            self._outcome.append(sender.send(weights, **options))
        except BaseException as error:
            self._outcome.append(error)

    def result(self) -> Any:
        self._thread.join(HANG)
        return self._outcome[0]


class Faulty(SharedMemoryReceiver):
    """Receives what `damage(number, header, bytes)` makes of each bucket."""

    damage: Callable[[int, BucketHeader, Any], tuple[BucketHeader, Any]] | None = None

    def next_bucket(self) -> tuple[BucketHeader, Any]:
        header, buffer = super().next_bucket()
        if self.damage is None:
            return header, buffer
        return self.damage(header.sequence, header, buffer.copy())


@pytest.fixture
def pair() -> Iterator[tuple[SharedMemorySender, Faulty]]:
    with SharedMemorySender(bucket_bytes=BUCKET, timeout=HANG) as sender, Faulty(sender.address, timeout=HANG) as end:
        yield sender, end


@pytest.fixture
def odd_worker(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a worker on an `Odd` model, with other weights than any other."""
    worker, _ = make_worker(module=Odd())
    return worker


# -- what arrives ----------------------------------------------------------------------------------


def test_everything_arrives_bit_for_bit(odd_worker: Any, pair: tuple[Any, Any]) -> None:
    sender, end = pair
    trainer = Odd()
    sending = Sending(sender, trainer)
    report = odd_worker.receive_weights(end, verify=True)
    sent = sending.result()
    assert same_weights(trainer, odd_worker.module)
    assert (report.version, report.tensors, report.verified) == (1, 7, True)
    assert set(report.changed) == {"embed.weight", "proj.weight", "proj.bias", "one", "turned"}
    assert report.sent_bytes == report.dense_bytes == sent.sent_bytes == sum(_bytes(t) for t in _untied(trainer))
    assert (report.digest, sent.versions) == (sent.digest, (1,))
    sending = Sending(sender, trainer)
    assert odd_worker.receive_weights(end, version=9).changed_tensors == 0, "nothing changed, and it says so"
    assert sending.result().versions == (9,)
    assert serves(odd_worker)


def _untied(model: nn.Module) -> list[Tensor]:
    return [tensor for name, tensor in model.state_dict().items() if name != "head.weight"]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("cast_by", ["sender", "receiver"])
def test_casts_are_asked_for_and_reported(make_worker: MakeWorker, pair: tuple[Any, Any], cast_by: str) -> None:
    sender, end = pair
    own, other = (torch.bfloat16, torch.float32)
    odd_worker, _ = make_worker(module=Odd(own))
    trainer = Odd(other)
    before = weights_of(odd_worker)
    for source in (end, trainer, WeightStream.of(trainer)):
        sending = Sending(sender, trainer) if source is end else None
        with pytest.raises(WeightMismatchError, match=r"nothing was written; [67] of another dtype \(send with"):
            odd_worker.receive_weights(source)
        assert sending is None or "receive with cast=True): one: offered" in str(sending.result())
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(odd_worker).items())
    sending = Sending(sender, trainer, dtype=own if cast_by == "sender" else None)
    report = odd_worker.receive_weights(end, cast=cast_by == "receiver", verify=True)
    assert sending.result().casts == (report.casts if cast_by == "sender" else ())
    assert "proj.weight: float32 -> bfloat16" in report.casts
    assert len(report.casts) == 6
    assert same_weights(trainer.to(own), odd_worker.module)


def test_an_iterator_is_read_once_and_checksummed(odd_worker: Any) -> None:
    trainer = Odd()
    whole = odd_worker.receive_weights(WeightStream.of(trainer), verify=True)
    assert same_weights(trainer, odd_worker.module)
    assert (whole.tensors, whole.changed_tensors, whole.sent_bytes, whole.verified) == (7, 5, 0, True)
    assert odd_worker.receive_weights(trainer).digest == whole.digest, "the digest depends on the bits alone"
    stream = WeightStream.of({"one": torch.ones(1)})
    assert odd_worker.receive_weights(stream, partial=True).changed == ("one",)
    with pytest.raises(RuntimeError, match="was read already"):
        odd_worker.receive_weights(stream, partial=True)


def test_verify_reads_back_what_was_written(odd_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Odd()
    real = receiver.Destination.settle

    def a_bit_falls_over(self: Any) -> None:
        settled = self._settled
        real(self)
        if self.spec.name == "proj.bias" and not settled:
            self.target.data.view(torch.int32)[3] ^= 1

    monkeypatch.setattr(receiver.Destination, "settle", a_bit_falls_over)
    odd_worker.receive_weights(WeightStream.of(trainer))
    with pytest.raises(VerificationError, match=r"proj\.bias"):
        odd_worker.receive_weights(WeightStream.of(trainer), verify=True)
    monkeypatch.undo()
    with pytest.raises(WorkerStateError, match="weights incomplete"):
        odd_worker.submit([1], FEW)
    assert odd_worker.receive_weights(trainer, verify=True).verified
    assert serves(odd_worker)


def test_verify_on_a_shared_module_reads_the_parameters(make_worker: MakeWorker) -> None:
    worker, _ = make_worker(shared=True)
    assert worker.receive_weights().digest is None, "nothing was read"
    first = worker.receive_weights(verify=True)
    with torch.no_grad():
        worker.module.proj.bias.add_(1)
    second = worker.receive_weights(verify=True)
    assert second.verified
    assert second.changed == ("proj.bias",)
    assert first.digest != second.digest


# -- refused ---------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_by_name_on_both_sides(make_worker: MakeWorker, pair: tuple[Any, Any]) -> None:
    worker, _ = make_worker()
    sender, end = pair
    before = weights_of(worker)
    gave: list[str] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        gave.append("one")
        yield "proj.bias", torch.zeros(6)

    specs = {"proj.bias": TensorSpec("proj.bias", (6,), torch.float32), "nose": TensorSpec("nose", (1,), torch.int8)}
    sending = Sending(sender, WeightStream(specs, weights()))
    with pytest.raises(WeightMismatchError) as caught:
        worker.receive_weights(end)
    error = sending.result()
    assert isinstance(error, SyncRefusedError)
    for text in (str(caught.value), str(error)):
        assert "1 unknown: nose" in text
        assert "proj.bias: offered [6] float32, the model has [5] float32" in text
        assert "embed.weight or head.weight" in text
    assert gave == ["one"], "the stream was gone through: other ranks may be gathering it"
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(worker).items())
    assert serves(worker)
    sending = Sending(sender, worker.module)
    assert worker.receive_weights(end).version == 1
    assert isinstance(sending.result(), SendReport)


def test_the_sender_hears_of_a_version_that_is_too_low(make_worker: MakeWorker, pair: tuple[Any, Any]) -> None:
    worker, _ = make_worker()
    sender, end = pair
    worker.load_state_dict(weights_of(worker))
    sending = Sending(sender, worker.module)
    with pytest.raises(ValueError, match="above the current 1"):
        worker.receive_weights(end, version=1)
    error = sending.result()
    assert isinstance(error, SyncBrokenError)
    assert "above the current 1" in str(error)
    assert serves(worker)


def begin(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("meanwhile", ["update", "sleep"])
def test_a_delta_is_not_written_over_weights_that_changed_while_it_waited(
    make_worker: MakeWorker, pair: tuple[Any, Any], meanwhile: str
) -> None:
    """A delta that was agreed to while a step ran is not written over weights that changed before it came: by another
    update, or a sleep that discards them.
    """
    worker, runner = make_worker()
    sender, end = pair
    trained = weights_of(worker)
    sending = Sending(sender, trained, delta=True)
    assert worker.receive_weights(end).version == 1
    assert not sending.result().delta, "there is no base yet"
    runner.gate = StepGate()
    handle = worker.submit([1, 2], FEW)
    runner.gate.wait_for_a_step()
    acts: list[Callable[[], object]] = [lambda: worker.load_state_dict({**trained, "scale": trained["scale"] + 1})]
    if meanwhile == "sleep":
        acts = [lambda: worker.sleep("weights", level=2), worker.wake_up]
    for number, act in enumerate(acts, 1):
        begin(act)
        wait_until(lambda number=number: num_waiting(worker) == number)
    trained["proj.bias"] = trained["proj.bias"] + 1
    sending = Sending(sender, trained, delta=True)
    broken: list[BaseException] = []

    def receive() -> None:
        with pytest.raises(SyncBrokenError) as caught:
            worker.receive_weights(end)
        broken.append(caught.value)

    receiver = begin(receive)
    wait_until(lambda: num_waiting(worker) > len(acts))
    runner.gate.release(1000)
    receiver.join(HANG)
    why = "version 1 -> 2" if meanwhile == "update" else "discarded by sleep"
    for error in (broken[0], sending.result()):
        assert isinstance(error, SyncBrokenError)
        assert why in str(error)
        assert "nothing was written" in str(error)
    assert (worker.trouble() is None) == (meanwhile == "update")
    sending = Sending(sender, trained, delta=True)
    worker.receive_weights(end)
    assert not sending.result().delta
    assert all(torch.equal(trained[name], tensor) for name, tensor in weights_of(worker).items())
    assert handle.result(HANG).samples[0].finish_reason == "length"


def test_weights_that_sleep_take_no_delta_of_experts_apart(make_worker: MakeWorker, pair: tuple[Any, Any]) -> None:
    """Weights that sleep take no delta of experts apart, and their memory, which is not there, is not looked at for its
    base.
    """
    worker, _ = make_worker(module=expert_model("Qwen3Moe"))
    sender, end = pair
    before = weights_of(worker)
    trained = revert_weight_conversion(worker.module, before)
    assert any(".experts.4." in name for name in trained)
    sending = Sending(sender, trained, delta=True)
    worker.receive_weights(end)
    assert isinstance(sending.result(), SendReport)
    worker.sleep("weights")
    sending = Sending(sender, trained, delta=True)
    with pytest.raises(WorkerStateError, match="the weights are asleep"):
        worker.receive_weights(end)
    error = sending.result()
    assert isinstance(error, SyncBrokenError)
    assert "the weights are asleep" in str(error)
    worker.wake_up()
    assert all(torch.equal(worker.module.state_dict()[name], tensor) for name, tensor in before.items())


def test_incomplete_weights_take_no_delta(
    make_worker: MakeWorker, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incomplete weights are sent whole and not as a delta, even where they happen to have the bits of its base."""
    worker, _ = make_worker()
    sender, end = pair
    trained = weights_of(worker)
    sending = Sending(sender, trained, delta=True)
    worker.receive_weights(end)
    sending.result()

    def fails(*_: object) -> NoReturn:
        raise OSError("disk gone")

    with monkeypatch.context() as patched:
        patched.setattr(apply, "copy_scanned", fails)
        with pytest.raises(OSError, match="disk gone"):
            worker.load_state_dict(trained)
    sending = Sending(sender, trained, delta=True)
    assert worker.receive_weights(end).version == 2
    assert not sending.result().delta
    assert serves(worker)


def test_tied_weights_that_came_with_different_values_break_the_update(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    both = weights_of(worker)
    assert worker.receive_weights(WeightStream.of(both)).tensors == 4
    both["head.weight"] = both["head.weight"] + 1
    with pytest.raises(SyncBrokenError, match=r"tied weights .* embed\.weight, head\.weight"):
        worker.receive_weights(WeightStream.of(both))
    with pytest.raises(WorkerStateError, match="weights incomplete"):
        worker.submit([1], FEW)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([("proj.bias", torch.zeros(4))], "gave [4] float32 for proj.bias, not [5] float32"),
        ([("proj.bias", torch.zeros(5)), ("proj.bias", torch.zeros(5))], "'proj.bias', which was not announced or"),
        ([("nose", torch.zeros(5))], "'nose', which was not announced"),
        ([], "ended without proj.bias"),
    ],
)
def test_a_stream_that_is_not_what_it_announced(
    make_worker: MakeWorker, given: list[tuple[str, Tensor]], says: str
) -> None:
    worker, _ = make_worker()
    stream = WeightStream({"proj.bias": TensorSpec("proj.bias", (5,), torch.float32)}, given)
    with pytest.raises(SyncBrokenError) as caught:
        worker.receive_weights(stream, partial=True)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ({"colour": "red"}, TypeError),
        ({"in_flight": "never"}, ValueError),
        ({"version": 0}, ValueError),
        ({}, WeightMismatchError),  # it is a part of the weights
    ],
)
def test_a_stream_is_gone_through_whatever_ends_its_update(
    make_worker: MakeWorker, ends: dict[str, Any], error: type[Exception]
) -> None:
    """A stream is read to its end whatever ends its update: the trainer's other ranks gather it too, and would wait."""
    worker, _ = make_worker()
    gathered: list[str] = []

    with pytest.raises(error):
        worker.receive_weights(noted_stream({"proj.bias": torch.zeros(5)}, gathered), **ends)
    assert gathered == ["proj.bias"]
    assert serves(worker)


# -- faults ----------------------------------------------------------------------------------------


def assert_old_or_incomplete(worker: Any, before: dict[str, Tensor]) -> bool:
    """Check that either nothing was written or the worker refuses; return whether it refuses."""
    if worker.trouble() is None:
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(worker).items())
        assert serves(worker)
        return False
    with pytest.raises(WorkerStateError, match="weights incomplete"):
        worker.submit([1], FEW)
    return True


def assert_recovers(worker: Any, sender: Any, end: Any) -> None:
    end.damage = None
    trainer = Odd()
    sending = Sending(sender, trainer)
    worker.receive_weights(end, verify=True)
    assert isinstance(sending.result(), SendReport)
    assert same_weights(trainer, worker.module)
    assert serves(worker)


def flipped(place: int) -> Callable[..., tuple[BucketHeader, Any]]:
    def damage(number: int, header: BucketHeader, buffer: Any) -> tuple[BucketHeader, Any]:
        if number == place // BUCKET:
            buffer[place % BUCKET] ^= 16
        return header, buffer

    return damage


@pytest.mark.parametrize("place", [0, 8, 16, 30, 33, 64, 65, 900, 1023, 1024, 1100, 7 * 1024 + 500, 40 * 1024 + 64])
def test_a_flipped_bit_is_found(odd_worker: Any, pair: tuple[Any, Any], place: int) -> None:
    sender, end = pair
    before = weights_of(odd_worker)
    end.damage = flipped(place)
    sending = Sending(sender, Odd())
    with pytest.raises(SyncBrokenError, match=r"wrong checksum|cut off|was not|expected|not valid"):
        odd_worker.receive_weights(end)
    assert isinstance(sending.result(), SyncBrokenError)
    refuses = assert_old_or_incomplete(odd_worker, before)
    assert refuses or place < BUCKET, "the first bucket is checked before anything is written"
    assert_recovers(odd_worker, sender, end)


@pytest.mark.parametrize("field", ["sequence", "used", "total", "seal", "ending"])
@pytest.mark.parametrize("number", [0, 5])
def test_a_wrong_header_is_found(odd_worker: Any, pair: tuple[Any, Any], field: str, number: int) -> None:
    sender, end = pair
    before = weights_of(odd_worker)

    def damage(at: int, header: BucketHeader, buffer: Any) -> tuple[BucketHeader, Any]:
        if at == number:
            wrong = Ending.LAST if field == "ending" else getattr(header, field) + 64
            header = replace(header, **{field: wrong})
        return header, buffer

    end.damage = damage
    sending = Sending(sender, Odd())
    with pytest.raises(SyncBrokenError):
        odd_worker.receive_weights(end)
    assert isinstance(sending.result(), SyncBrokenError)
    assert assert_old_or_incomplete(odd_worker, before) == (number > 0)
    assert_recovers(odd_worker, sender, end)


def test_damage_is_found_where_it_is(odd_worker: Any, pair: tuple[Any, Any]) -> None:
    sender, end = pair
    end.damage = flipped(7 * BUCKET + 500)
    sending = Sending(sender, Odd())
    with pytest.raises(SyncBrokenError, match=r"wrong checksum of turned from byte \d+"):
        odd_worker.receive_weights(end)
    sending.result()


def test_an_end_that_comes_too_early_is_seen(make_worker: MakeWorker, pair: tuple[Any, Any]) -> None:
    worker, _ = make_worker()
    sender, end = pair

    def lie() -> None:
        sender.link.announce(Announcement((TensorSpec("proj.bias", (5,), torch.float32),)))
        nothing = sender.link.open_bucket()
        sender.link.send_bucket(nothing.seal(0, Ending.LAST, digest_of({"proj.bias": 0})))

    liar = threading.Thread(target=lie)
    liar.start()
    with pytest.raises(SyncBrokenError, match=r"ended without all of proj\.bias"):
        worker.receive_weights(end, partial=True)
    liar.join(HANG)


def test_a_bucket_that_never_came_is_missed(odd_worker: Any, pair: tuple[Any, Any]) -> None:
    sender, end = pair

    def damage(number: int, header: BucketHeader, buffer: Any) -> tuple[BucketHeader, Any]:
        if number != 3:
            return header, buffer
        return SharedMemoryReceiver.next_bucket(end)

    end.damage = damage
    sending = Sending(sender, Odd())
    with pytest.raises(SyncBrokenError, match="expected bucket 3, got 4"):
        odd_worker.receive_weights(end)
    sending.result()
    assert_recovers(odd_worker, sender, end)


@pytest.mark.parametrize("after", [0, 1, 3, 6])
@pytest.mark.parametrize("fault", ["nan", "error"])
def test_a_sender_that_breaks_off_says_why(odd_worker: Any, pair: tuple[Any, Any], after: int, fault: str) -> None:
    sender, end = pair
    before = weights_of(odd_worker)
    trainer = Odd()
    whole = {name: tensor.clone() for name, tensor in trainer.state_dict().items() if name != "head.weight"}
    specs = {name: TensorSpec.of(name, tensor) for name, tensor in whole.items()}

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number, (name, tensor) in enumerate(whole.items()):
            if number == after and fault == "error":
                raise ZeroDivisionError("in the gather")
            if number >= after and fault == "nan" and tensor.is_floating_point() and tensor.numel():
                tensor.fill_(float("nan"))
            yield name, tensor

    sending = Sending(sender, WeightStream(specs, weights()))
    with pytest.raises(SyncBrokenError, match=r"the sender broke off: .*(NaN or infinity|in the gather)"):
        odd_worker.receive_weights(end)
    assert isinstance(sending.result(), NonFiniteWeightError if fault == "nan" else ZeroDivisionError)
    assert_old_or_incomplete(odd_worker, before)
    assert_recovers(odd_worker, sender, end)


def test_a_value_that_overflows_in_the_receivers_cast_leaves_them_incomplete(
    make_worker: MakeWorker, pair: tuple[Any, Any]
) -> None:
    sender, end = pair
    odd_worker, _ = make_worker(module=Odd(torch.float16))
    trainer = Odd()
    torch.nn.init.constant_(trainer.one, 1e9)
    sending = Sending(sender, trainer)
    with pytest.raises(NonFiniteWeightError, match="one holds NaN or infinity in the dtype of the model"):
        odd_worker.receive_weights(end, cast=True)
    assert isinstance(sending.result(), SyncBrokenError)
    with pytest.raises(WorkerStateError, match="weights incomplete"):
        odd_worker.submit([1], FEW)


# -- waiting ---------------------------------------------------------------------------------------


def test_neither_side_waits_for_ever(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    with SharedMemorySender(bucket_bytes=BUCKET, timeout=0.3) as sender:
        with pytest.raises(SyncTimeoutError, match=r"no receiver connected .* in 0\.3 seconds"):
            sender.send(worker.module)
        with SharedMemoryReceiver(sender.address, timeout=0.3) as end, pytest.raises(SyncTimeoutError):
            worker.receive_weights(end)
    assert serves(worker)


def test_a_sender_that_stalls_midway(odd_worker: Any, pair: tuple[Any, Any]) -> None:
    sender, end = pair
    release = threading.Event()
    trainer = Odd()
    whole = {name: tensor for name, tensor in trainer.state_dict().items() if name != "head.weight"}

    def weights() -> Iterator[tuple[str, Tensor]]:
        end.patience.seconds = 0.3  # from the first bucket on
        for name, tensor in whole.items():
            yield name, tensor
            if name == "embed.weight":
                release.wait(HANG)

    stream = WeightStream({name: TensorSpec.of(name, tensor) for name, tensor in whole.items()}, weights())
    sending = Sending(sender, stream)
    with pytest.raises(SyncTimeoutError, match=r"moved no weights for 0\.3 seconds"):
        odd_worker.receive_weights(end)
    with pytest.raises(WorkerStateError, match="weights incomplete"):
        odd_worker.submit([1], FEW)
    release.set()
    assert isinstance(sending.result(), SyncBrokenError)
    end.patience.seconds = HANG
    assert_recovers(odd_worker, sender, end)


@pytest.mark.parametrize("when", ["before it connects", "before anything is sent", "while it writes", "afterwards"])
def test_closing_a_worker_ends_its_wait_for_weights(
    odd_worker: Any, pair: tuple[Any, Any], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a worker ends its wait for weights at once, whatever the timeout, in any thread; the sender hears of it
    as at once.
    """
    sender, _ = pair
    go_on, stalls = threading.Event(), threading.Event()

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in whole.items():
            yield name, tensor
            if name == "embed.weight":
                stalls.set()
                go_on.wait(HANG)

    whole = {name: tensor for name, tensor in Odd().state_dict().items() if name != "head.weight"}
    stream = WeightStream({name: TensorSpec.of(name, tensor) for name, tensor in whole.items()}, weights())
    errors: list[BaseException] = []

    def receive() -> None:
        with SharedMemoryReceiver(sender.address, timeout=300) as end:
            if when == "before it connects":
                stalls.set()
                go_on.wait(HANG)
            try:
                odd_worker.receive_weights(end)
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    sending = Sending(sender, stream) if when == "while it writes" else None
    if when == "before anything is sent":
        _silent = sender.link._endpoint.accept(time.monotonic() + HANG)
    elif when != "afterwards":
        assert stalls.wait(HANG)
    odd_worker.close()
    go_on.set()
    thread.join(HANG)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [WorkerStateError]
    assert "closed" in str(errors[0])
    assert sending is None or isinstance(sending.result(), SyncBrokenError)


@pytest.mark.parametrize("number", [0, 7])
def test_an_update_that_stalls_stops_generation_no_longer_than_a_small_timeout(odd_worker: Any, number: int) -> None:
    """An update that stalls, with a sender that talks on without sending weights while the worker holds its lock, stops
    generation no longer than a small timeout.
    """
    release = threading.Event()
    with (
        SharedMemorySender(bucket_bytes=BUCKET, timeout=HANG) as sender,
        SharedMemoryReceiver(sender.address, timeout=HANG) as end,
    ):
        real = sender.link.send_bucket

        def send_bucket(header: BucketHeader) -> None:
            if header.sequence == number:
                end.patience.seconds = 0.3  # from this bucket on
            real(header)
            while header.sequence == number and not release.wait(0.05):
                sender.link._channel.send(Full(99, 0, header, ()))

        sender.link.send_bucket = send_bucket
        sending = Sending(sender, Odd())
        with pytest.raises(SyncTimeoutError, match=r"moved no weights for 0\.3 seconds"):
            odd_worker.receive_weights(end)
        release.set()
        assert isinstance(sending.result(), SyncBrokenError)
    with pytest.raises(WorkerStateError, match="weights incomplete"):
        odd_worker.submit([1], FEW)


def test_a_version_that_no_message_can_hold_is_refused(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    with pytest.raises(ValueError, match="version must be at most 9223372036854775807, got a number of 64 bits"):
        worker.receive_weights(weights_of(worker), version=1 << 63)


def test_a_full_shared_memory_is_found_before_anything_is_announced(make_worker: MakeWorker) -> None:
    worker, _ = make_worker()
    with SharedMemorySender(bucket_bytes=1 << 50, timeout=0.1) as sender:
        with pytest.raises(OSError, match="no room for") as caught:
            sender.send(worker.module)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM)


def test_the_socket_is_for_its_owner_and_the_memory_has_no_name() -> None:
    before = named_memory()
    model = Odd()
    with SharedMemorySender(bucket_bytes=BUCKET, timeout=HANG) as sender, SharedMemoryReceiver(sender.address) as end:
        folder = Path(sender.address).parent
        assert folder.stat().st_mode & 0o077 == 0
        sending = Sending(sender, model)
        end.listen()
        wait_until(lambda: named_memory() <= before)
        memory = os.stat(f"/proc/self/fd/{sender.link._memory.descriptor}")
        assert (memory.st_mode & 0o077, memory.st_nlink, memory.st_size) == (0, 0, 2 * BUCKET)
        end.close()
        assert isinstance(sending.result(), SyncBrokenError)
    assert not folder.exists()
    with pytest.raises(PeerLostError, match="the link is closed"):
        sender.send(model)
    with pytest.raises(PeerLostError, match="no sender at"):
        SharedMemoryReceiver(sender.address).listen()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"\xff\xff\xff\xff", "a message of 4294967295 bytes"),
        (struct.pack(">I", 4) + b"nope", "not valid JSON"),
        (struct.pack(">I", 2) + b"[]", "not an object"),
        (struct.pack(">I", 8) + b"cut", "closed the connection"),
    ],
)
def test_what_a_stranger_says_is_checked(make_worker: MakeWorker, message: bytes, says: str) -> None:
    """A connected receiver that says something strange makes the sender raise, which can be used again."""
    worker, _ = make_worker()
    with SharedMemorySender(bucket_bytes=BUCKET, timeout=HANG) as sender:
        sending = Sending(sender, worker.module)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(sender.address)
            stranger.sendall(message)
            stranger.shutdown(socket.SHUT_WR)
            error = sending.result()
        assert isinstance(error, SyncBrokenError)
        assert says in str(error)
        with SharedMemoryReceiver(sender.address, timeout=HANG) as end:
            sending = Sending(sender, worker.module)
            assert worker.receive_weights(end).version == 1
            assert isinstance(sending.result(), SendReport)


def test_arguments(pair: tuple[Any, Any]) -> None:
    sender, _ = pair
    for wrong in (0, 100, 1000, True, 4096.0):
        with pytest.raises(ValueError, match="bucket_bytes must be a multiple of 64"):
            SharedMemorySender(bucket_bytes=wrong)
    for wrong in (0, -1, True, "1", float("inf"), float("nan"), 10**400):
        with pytest.raises(ValueError, match="timeout must be a positive number"):
            SharedMemorySender(timeout=wrong)
    with pytest.raises(TypeError, match=r"SharedMemorySender\.address"):
        SharedMemoryReceiver(Path("/tmp"))
    with pytest.raises(TypeError, match="a module, a dict of tensors or a WeightStream, not a list"):
        sender.send([1])
    with pytest.raises(TypeError, match="weight 'a' is a int, not a tensor"):
        sender.send({"a": 1})
    with pytest.raises(TypeError, match="weight names are strings, got 5"):
        sender.send({5: torch.zeros(1)})
    for wrong in (1, "yes", None):
        with pytest.raises(ValueError, match="delta must be True or False, got"):
            sender.send({}, delta=wrong)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"delta": 1}, "delta must be True or False"), ({"dtype": torch.float16}, "dtype= casts a module or a dict")],
)
def test_a_stream_that_is_not_sent_is_gone_through(pair: tuple[Any, Any], wrong: dict[str, Any], says: str) -> None:
    """A stream that is not sent is read to its end: the trainer's other ranks gather it too, and would wait."""
    gathered: list[str] = []
    with pytest.raises(ValueError, match=says):
        pair[0].send(noted_stream({"a": torch.zeros(2), "b": torch.zeros(2)}, gathered), **wrong)
    assert gathered == ["a", "b"]
