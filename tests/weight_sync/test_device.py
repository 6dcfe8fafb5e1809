"""Buckets on a device, here the CPU in its place, are scanned, announced over the channel, and refused if wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, replace

import pytest
import torch
from torch import Tensor, nn

from samebit.weight_sync import (
    CudaIpcReceiver,
    CudaIpcSender,
    Manifest,
    NonFiniteWeightError,
    SyncBrokenError,
    SyncRefusedError,
    UpdateTerms,
    WeightMismatchError,
    apply_weights,
    arithmetic,
    open_update,
)
from samebit.weight_sync.digest import DTYPES, Lanes, readable_bytes, scan_bytes
from samebit.weight_sync.transports.cuda import memory as cuda_memory
from samebit.weight_sync.transports.cuda.buckets import placed
from samebit.weight_sync.transports.cuda.cuda_ipc import DeviceSenderEnd
from samebit.weight_sync.transports.cuda.memory import CudaBuckets, MemoryHandle
from samebit.weight_sync.transports.cuda.scan import device_bytes, scan_device_bytes
from samebit.weight_sync.transports.unix_socket import Full
from samebit.weight_sync.wire.buckets import BucketHeader, Ending, Kind, RecordHeader
from samebit.weight_sync.wire.decoding import decode, encode
from samebit.weight_sync.wire.sender import WeightSender

from ..noted_stream import noted_stream
from ..patience import HANG

BUCKET = 1024
HANDLE = MemoryHandle("GPU-1", 2048, "ab" * 64, 4096, 512, "cd" * 20, 3, "ef" * 64, True)


# -- the scan --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 100), (129,), (1000, 7)], ids=str)
def test_it_finds_what_the_scan_of_the_host_finds(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)
    flat = device_bytes(tensor)
    for offset in (0, 64, 1 << 20):
        expected = scan_bytes(readable_bytes(tensor), Lanes.of(dtype), offset=offset)
        assert scan_device_bytes(flat, Lanes.of(dtype), offset=offset) == expected


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.is_floating_point], ids=str)
def test_any_bits_are_told_apart_as_on_the_host(dtype: torch.dtype) -> None:
    """A scan on the device finds in random bits (NaN, infinities, both signs) what a scan on the host finds."""
    torch.manual_seed(1)
    bits = torch.randint(0, 256, (8000,), dtype=torch.uint8)
    for begin in range(0, 512, 8):
        piece = bits[begin : begin + 8 + begin % 72]
        assert scan_device_bytes(piece, Lanes.of(dtype)) == scan_bytes(piece.numpy(), Lanes.of(dtype))


def test_a_long_tensor_is_scanned_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.arange(0, 100_003, dtype=torch.int32).view(torch.uint8)[:400_003].clone()
    expected = scan_bytes(bits.numpy(), Lanes.of(torch.int32))
    monkeypatch.setattr("samebit.weight_sync.transports.cuda.scan._CHUNK", 1000)
    assert scan_device_bytes(bits, Lanes.of(torch.int32)) == expected


# -- a sync, with memory of this process in the place of the GPU's ---------------------------------


class Model(nn.Module):
    """Has tensors of all kinds: larger than a bucket, empty, transposed, not aligned, tied, an integer buffer."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(100, 129, dtype=dtype)
        self.head = nn.Linear(129, 100, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.none = nn.Parameter(torch.randn(0, 3, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(33, 65, dtype=dtype).t())
        self.shifted = nn.Parameter(torch.randn(101, dtype=dtype)[1:])
        self.register_buffer("steps", torch.arange(3))


class Sender(WeightSender):
    def __init__(self) -> None:
        link = DeviceSenderEnd(torch.device("cpu"), BUCKET, 20)
        super().__init__(link)
        self.address = link.address


class Receiver(CudaIpcReceiver):
    """Receives what `damage(header, memory)` makes of each bucket."""

    damage: Callable[[BucketHeader, CudaBuckets], BucketHeader] | None = None

    def _next_full(self) -> tuple[Full, CudaBuckets]:
        full, memory = super()._next_full()
        if self.damage is not None:
            full = replace(full, header=self.damage(full.header, memory))
        return full, memory


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Sender, Receiver]]:
    made: dict[str, Tensor] = {}

    def handle(buckets: CudaBuckets) -> MemoryHandle:
        size = buckets._memory.numel()
        name = f"{len(made):04x}"
        made[name] = buckets._memory
        return MemoryHandle("here", size, name, size, 0, "00", 0, "00", False)

    def attach(cls: type[CudaBuckets], handle: MemoryHandle, device: torch.device) -> CudaBuckets:
        return cls(made[handle.storage_handle])

    monkeypatch.setattr(CudaBuckets, "handle", handle)
    monkeypatch.setattr(CudaBuckets, "attach", classmethod(attach))
    monkeypatch.setattr("samebit.weight_sync.transports.cuda.cuda_ipc.cuda_device", torch.device)
    with Sender() as sender, Receiver(sender.address, "cpu", timeout=HANG) as end:
        yield sender, end


@pytest.mark.parametrize("asked", ["cuda", "cuda:1"])
def test_a_gpu_is_named_where_an_end_is_made(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current GPU is read once, as the threads that send and receive later may have another current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert cuda_memory.cuda_device(asked) == torch.device("cuda", 1)
    assert cuda_memory.numbered(torch.device("cpu")) == torch.device("cpu")


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def same(left: nn.Module, right: nn.Module) -> bool:
    theirs = right.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in left.state_dict().items())


def test_everything_arrives_bit_for_bit(pair: tuple[Sender, Receiver], beside: ThreadPoolExecutor) -> None:
    sender, end = pair
    trainer, model = Model(1), Model(2)
    for changed in (4, 0):
        sending = beside.submit(sender.send, trainer)
        report = apply_weights(model, end, version=7, verify=True)
        assert sending.result(HANG).digest == report.digest
        assert same(trainer, model)
        assert report.changed_tensors == (changed and len(report.changed))
        assert report.sent_bytes == report.dense_bytes == sending.result().sent_bytes
    assert set(report.changed) == set()
    assert sending.result().versions == (7,)


def test_a_cast_at_the_receiver(pair: tuple[Sender, Receiver], beside: ThreadPoolExecutor) -> None:
    sender, end = pair
    trainer, model = Model(1), Model(2, torch.bfloat16)
    sending = beside.submit(sender.send, trainer)
    report = apply_weights(model, end, cast=True, verify=True)
    sending.result(HANG)
    assert same(trainer.to(torch.bfloat16), model)
    assert "embed.weight: float32 -> bfloat16" in report.casts


def test_a_trainer_on_another_kind_of_gpu_is_refused_unless_bits_do_not_matter(
    pair: tuple[Sender, Receiver], beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another GPU or other compilers are refused by name; a side without a GPU is not compared."""
    sender, end = pair
    trainer, model = Model(1), Model(2)
    there, here = "sm_80, torch 2.11.0, triton 3.6.0", "sm_90, torch 2.11.0, triton 3.6.0"
    monkeypatch.setattr("samebit.weight_sync.wire.sender.arithmetic_here", lambda: there)
    monkeypatch.setattr("samebit.weight_sync.wire.receiver.arithmetic_of", lambda device: here)
    sending = beside.submit(sender.send, trainer)
    with pytest.raises(WeightMismatchError, match=f"the sender computes on {there}, the model here on {here}: "):
        apply_weights(model, end)
    with pytest.raises(SyncRefusedError, match="allowed: the same GPU and versions on both sides"):
        sending.result(HANG)
    assert not same(trainer, model)
    for sent, held, terms in (
        (there, here, UpdateTerms(other_arithmetic=True)), ("", here, UpdateTerms()), (there, "", UpdateTerms()),
        (here, here, UpdateTerms()),
    ):  # fmt: skip
        trainer = Model(len(sent) + len(held))
        monkeypatch.setattr("samebit.weight_sync.wire.sender.arithmetic_here", lambda sent=sent: sent)
        monkeypatch.setattr("samebit.weight_sync.wire.receiver.arithmetic_of", lambda device, held=held: held)
        sending = beside.submit(sender.send, trainer)
        with open_update(end, model, Manifest.of(model), terms, version=0) as update:
            update.write(model, version=1)
        sending.result(HANG)
        assert same(trainer, model)


def test_what_decides_the_bits_of_a_gpu_is_its_kind_and_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (arithmetic.arithmetic_of(torch.device("cpu")), arithmetic.arithmetic_here()) == ("", "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(arithmetic.metadata, "version", lambda name: {"torch": "2.11", "triton": "3.6"}[name])
    assert arithmetic.arithmetic_of(torch.device("cuda", 1)) == "sm_90, torch 2.11, triton 3.6"


def test_a_flipped_bit_is_found(pair: tuple[Sender, Receiver], beside: ThreadPoolExecutor) -> None:
    sender, end = pair

    def flip(header: BucketHeader, memory: CudaBuckets) -> BucketHeader:
        if header.sequence == 3:
            memory._memory[::97] ^= 1
        return header

    end.damage = flip
    sending = beside.submit(sender.send, Model(1))
    with pytest.raises(SyncBrokenError, match="wrong checksum of"):
        apply_weights(Model(2), end)
    with pytest.raises(SyncBrokenError, match="wrong checksum of"):
        sending.result(HANG)
    end.damage = None
    trainer, model = Model(3), Model(4)
    sending = beside.submit(sender.send, trainer)
    apply_weights(model, end)
    sending.result(HANG)
    assert same(trainer, model), "the next sync is fine"


@pytest.mark.parametrize("field", ["sequence", "used", "total", "seal"])
def test_a_wrong_header_is_found(pair: tuple[Sender, Receiver], beside: ThreadPoolExecutor, field: str) -> None:
    sender, end = pair
    end.damage = lambda header, _: replace(header, **{field: getattr(header, field) ^ 64})
    sending = beside.submit(sender.send, Model(1))
    with pytest.raises(SyncBrokenError):
        apply_weights(Model(2), end)
    with pytest.raises(SyncBrokenError):
        sending.result(HANG)


def test_a_sender_that_breaks_off_says_why(pair: tuple[Sender, Receiver], beside: ThreadPoolExecutor) -> None:
    sender, end = pair
    trainer = Model(1)
    with torch.no_grad():
        trainer.turned[3, 4] = float("nan")
    sending = beside.submit(sender.send, trainer)
    with pytest.raises(SyncBrokenError, match="the sender broke off: NonFiniteWeightError: turned holds NaN"):
        apply_weights(Model(2), end)
    with pytest.raises(NonFiniteWeightError, match="turned"):
        sending.result(HANG)


def test_no_room_for_the_buckets(
    pair: tuple[Sender, Receiver], beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> CudaBuckets:
        raise torch.OutOfMemoryError("CUDA out of memory")

    sender, end = pair
    monkeypatch.setattr(CudaBuckets, "create", full)
    sending = beside.submit(sender.send, Model(1))
    with pytest.raises(SyncBrokenError, match="the sender broke off: CUDA out of memory"):
        end.listen()
    with pytest.raises(torch.OutOfMemoryError):
        sending.result(HANG)


def test_what_does_not_fit_is_refused(pair: tuple[Sender, Receiver], beside: ThreadPoolExecutor) -> None:
    sender, end = pair
    sending = beside.submit(sender.send, nn.Linear(3, 3))
    with pytest.raises(WeightMismatchError, match="unknown: weight, bias"):
        apply_weights(Model(2), end)
    with pytest.raises(RuntimeError, match="unknown: weight, bias"):
        sending.result(HANG)


# -- messages and arguments ------------------------------------------------------------------------


def test_a_handle_is_what_it_was_after_its_journey() -> None:
    assert decode(encode(HANDLE), MemoryHandle) == HANDLE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu", None),
        ("gpu", ""),
        ("storage_handle", "xy"),
        ("storage_handle", ["ab"]),
        ("storage_handle", "ab" * 600),
        ("ref_counter_handle", 3),
        ("event_handle", "abc"),
        ("num_bytes", 0),
        ("num_bytes", 8192),
        ("num_bytes", 2047),
        ("num_bytes", True),
        ("num_bytes", 2.0),
        ("storage_offset_bytes", -1),
        ("storage_size_bytes", 1 << 63),
        ("ref_counter_offset", "3"),
        ("event_sync_required", 1),
    ],
)
def test_a_handle_that_nobody_made_is_refused(field: str, value: object) -> None:
    with pytest.raises(SyncBrokenError, match=r"MemoryHandle that is not valid|the number"):
        decode(json.dumps({"kind": "MemoryHandle", **asdict(HANDLE), field: value}).encode(), MemoryHandle)


def test_records_that_end_elsewhere_are_refused() -> None:
    records = [RecordHeader(0, Kind.DENSE, 0, 100, 5), RecordHeader(1, Kind.DENSE, 0, 1, 5)]
    assert [begin for begin, _ in placed(records, BucketHeader(0, 192, Ending.MORE, 0, 0))] == [0, 128]
    with pytest.raises(SyncBrokenError, match="cut off"):
        placed(records, BucketHeader(0, 256, Ending.MORE, 0, 0))


def test_a_handle_of_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "gpu_of", lambda device: "GPU-2")
    with pytest.raises(SyncBrokenError, match="buckets are on GPU GPU-1, and this end is on GPU-2"):
        CudaBuckets.attach(HANDLE, torch.device("cuda"))
    assert len(astuple(HANDLE)) == 9


@pytest.mark.parametrize("make", [CudaIpcSender, lambda device: CudaIpcReceiver("nowhere", device)])
def test_a_device_that_is_no_gpu(make: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="device='cpu' can not use CUDA IPC"):
        make("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="device='cuda' needs a GPU"):
            make("cuda")


@pytest.mark.parametrize(("delta", "says"), [(True, "takes no delta=True"), (0, "must be True or False, got 0")])
def test_a_delta_is_refused_and_its_stream_gone_through(delta: bool, says: str) -> None:
    """A delta is refused before there is a link, so that no GPU is needed, and the stream is read to its end."""
    sender, gathered = CudaIpcSender.__new__(CudaIpcSender), list[str]()
    with pytest.raises(ValueError, match=says):
        sender.send(noted_stream(dict(Model(1).named_parameters()), gathered), delta=delta)
    assert gathered
