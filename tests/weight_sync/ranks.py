"""Run as one rank of a gloo group, which test_distributed.py forks: any wrong result raises.

Ranks 0 and 1 train on shards, rank 2 receives; in the plain syncs rank 0 sends and 1 and 2 receive.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from samebit.weight_sync import (
    BroadcastReceiver,
    BroadcastSender,
    NonFiniteWeightError,
    PeerLostError,
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncBrokenError,
    SyncRefusedError,
    TensorSpec,
    WeightMismatchError,
    WeightSourceError,
    WeightStream,
    apply_weights,
)
from samebit.weight_sync.wire import sharded

BUCKET = 4096
WORLD = 3
HANG = 900
DEATH = 30
"""Is the number of seconds that gloo waits for a rank whose death it does not see."""


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(101, 129)
        self.head = nn.Linear(129, 101, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(100, 33) for _ in range(3))
        self.one = nn.Parameter(torch.randn(1))


def raises(kind: type[BaseException], says: str) -> contextlib.AbstractContextManager[object]:
    return pytest.raises(kind, match=re.escape(says))


def check_equal(model: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def plain_syncs(rank: int) -> None:
    """Runs syncs: full, delta, without the base, refused by a receiver, damaged at one, broken off by the sender."""
    trainer, model = Model(1), Model(rank + 10)
    link: Any = BroadcastSender(bucket_bytes=BUCKET, timeout=HANG) if rank == 0 else BroadcastReceiver(0, timeout=HANG)

    def sync(version: int = 0, **options: Any) -> Any:
        if rank == 0:
            return link.send(trainer, **options)
        report = apply_weights(model, link, version=version, verify=True)
        check_equal(trainer, model)
        return report

    assert sync(delta=True).sent_bytes == sum(p.numel() * 4 for p in trainer.parameters())
    with torch.no_grad():
        trainer.one += 1
        trainer.embed.weight[5, 7:50] *= 2
    assert 0 < sync(delta=True).sent_bytes < 400

    if rank == 2:
        with torch.no_grad():
            model.one += 1
    full = sync(delta=True)
    assert full.sent_bytes == full.dense_bytes, "one receiver had missed something, so all got all"

    if rank == 0:
        odd = {"one": torch.zeros(2)}
        with raises(SyncRefusedError, "one: offered [2] float32, the model has [1] float32"):
            link.send(odd)
    else:
        with raises(WeightMismatchError, "missing: embed.weight"):
            apply_weights(model, link)

    if rank == 0:
        with raises(SyncBrokenError, "1 of 2 receivers failed: SyncBrokenError: wrong checksum"):
            link.send(trainer)
    else:
        real = link.next_bucket
        if rank == 2:
            link.next_bucket = lambda: damaged(*real())
        with raises(SyncBrokenError, "wrong checksum") if rank == 2 else contextlib.nullcontext():
            apply_weights(model, link)
        link.next_bucket = real

    if rank == 0:
        with raises(ZeroDivisionError, "in the gather"):
            link.send(broken_stream(trainer))
    else:
        with raises(SyncBrokenError, "the sender broke off: ZeroDivisionError: in the gather"):
            apply_weights(model, link)
    sync()


def damaged(header: Any, buffer: Any) -> tuple[Any, Any]:
    buffer[100] ^= 1
    return replace(header), buffer


def broken_stream(model: nn.Module) -> WeightStream:
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            if name == "layers.2.weight":
                raise ZeroDivisionError("in the gather")
            yield name, tensor

    return WeightStream({name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()}, weights())


def sharded_model(mesh: DeviceMesh) -> Model:
    model = Model(3)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_sync(rank: int) -> None:
    """Let ranks 0 and 1 hold shards; rank 0 sends to rank 2, part by part: nothing is gathered whole, and no part is
    larger than a bucket. A refusal leaves nobody waiting. Deltas and casts of shards are those of the whole.
    """
    sharded.PART_BYTES = BUCKET
    longest: list[int] = []
    real = dist.broadcast
    sharded.dist.broadcast = lambda part, *args: (longest.append(part.nbytes), real(part, *args))[1]
    pair = dist.new_group([0, 2])
    mesh = DeviceMesh("cpu", [0, 1])
    expected = Model(3)
    if rank == 2:
        model = Model(4)
        end = BroadcastReceiver(0, pair, timeout=HANG)
        with raises(WeightMismatchError, "8 unknown"):
            apply_weights(nn.Linear(3, 3), end)
        report = apply_weights(model, end, verify=True)
        check_equal(expected, model)
        assert report.tensors == 8
        apply_weights(model, end, verify=True)
        assert apply_weights(model, end, verify=True).sent_bytes == 0
        check_equal(expected, model)
        report = apply_weights(model, end, cast=True, verify=True)
        check_equal(Model(3).to(torch.bfloat16).float(), model)
        assert "one: bfloat16 -> float32" in report.casts
        return
    trainer = sharded_model(mesh)
    assert trainer.layers[0].weight.to_local().shape[0] < 33
    assert trainer.embed.weight.nbytes > 10 * BUCKET
    DTensor.full_tensor = lambda self: pytest.fail("gathered whole")
    sender: Any = BroadcastSender(pair, bucket_bytes=BUCKET, timeout=HANG) if rank == 0 else None
    for refused, delta, dtype in (
        (True, False, None),
        (False, False, None),
        *2 * [(False, True, None)],
        (False, False, torch.bfloat16),
    ):
        stream = WeightStream.of(trainer, dtype=dtype)
        longest.clear()
        if rank == 1:
            stream.exhaust()
        else:
            with raises(SyncRefusedError, "unknown") if refused else contextlib.nullcontext():
                sender.send(stream, delta=delta)
        assert BUCKET // 2 < max(longest) <= BUCKET


def a_dict_of_shards(rank: int) -> None:
    """Checks that a tied weight travels once, by both its names, and that only the sending rank says to which dtype."""
    sharded.PART_BYTES = BUCKET
    pair, mesh = dist.new_group([0, 2]), DeviceMesh("cpu", [0, 1])
    if rank == 2:
        model = Model(4)
        report = apply_weights(model, BroadcastReceiver(0, pair, timeout=HANG), verify=True)
        check_equal(Model(3).to(torch.bfloat16).float(), model)
        assert (report.tensors, report.sent_bytes) == (8, sum(p.nbytes for p in model.parameters()))
        return
    trainer = Model(3).to(torch.bfloat16)
    for layer in trainer.layers:
        fully_shard(layer, mesh=mesh)
    weights = fully_shard(trainer, mesh=mesh).state_dict()
    assert {"embed.weight", "head.weight"} <= weights.keys()
    if rank == 1:
        WeightStream.of(weights).exhaust()
        return
    with BroadcastSender(pair, bucket_bytes=BUCKET, timeout=HANG) as sender:
        sender.send(weights, dtype=torch.float32)


def sharded_in_one_process(rank: int) -> None:
    """Checks ranks 0 and 1 that have a whole copy beside their shards, while rank 2 has none. A module and a dict of
    shards are refused; an iterator may give them as they are, split by rows or otherwise.
    """
    mesh = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        return
    trainer, model = sharded_model(mesh), Model(4)
    for source in (trainer, dict(trainer.named_parameters())):
        with raises(WeightSourceError, "these tensors are sharded (DTensor): one, embed.weight"):
            apply_weights(model, source)
    given: dict[str, Any] = dict(trainer.named_parameters())
    given["layers.2.weight"] = given["layers.2.weight"].redistribute(placements=[Shard(1)])
    for gathers in (rank, 1 - rank, 1):
        stream = WeightStream({name: TensorSpec.of(name, tensor) for name, tensor in given.items()}, given.items())
        if gathers:
            apply_weights(model, stream, verify=True)
        else:
            stream.exhaust()
    check_equal(Model(3), model)


def broken_off_in_a_tensor(rank: int) -> None:
    """Ends a send between two parts of a sharded tensor: by NaN, by a receiver that fails, by a tensor that was not
    announced. Rank 1 goes through the rest, of this tensor and the others, with nobody to wait for.
    """
    sharded.PART_BYTES = BUCKET
    pair, mesh = dist.new_group([0, 2]), DeviceMesh("cpu", [0, 1])
    if rank == 2:
        receive_what_is_broken_off(pair)
        return
    trainer = sharded_model(mesh)
    if rank == 1:
        for _ in range(4):
            WeightStream.of(trainer).exhaust()
        return
    local = trainer.embed.weight.to_local().detach()
    first = local[0, 0].item()
    with BroadcastSender(pair, bucket_bytes=BUCKET, timeout=HANG) as sender:
        local[0, 0] = torch.nan
        with raises(NonFiniteWeightError, "embed.weight holds NaN or infinity"):
            sender.send(trainer)
        local[0, 0] = first
        whole = WeightStream.of(trainer)
        fewer = {name: spec for name, spec in whole.specs.items() if name != "embed.weight"}
        with raises(SyncBrokenError, "the stream gave 'embed.weight', which was not announced"):
            sender.send(WeightStream(fewer, whole.weights()))
        with SharedMemorySender(bucket_bytes=BUCKET, timeout=HANG) as to_one:
            dist.broadcast_object_list([to_one.address], 0, pair)
            with raises(SyncBrokenError, "the receiver failed: ZeroDivisionError: in the middle"):
                to_one.send(trainer)
        sender.send(trainer)


def receive_what_is_broken_off(pair: dist.ProcessGroup) -> None:
    model = Model(4)
    end = BroadcastReceiver(0, pair, timeout=HANG)
    with raises(SyncBrokenError, "the sender broke off: NonFiniteWeightError: embed.weight"):
        apply_weights(model, end)
    with raises(SyncBrokenError, "the sender broke off: SyncBrokenError: the stream gave 'embed.weight'"):
        apply_weights(model, end, partial=True)
    said: list[str] = [""]
    dist.broadcast_object_list(said, 0, pair)
    link: Any = SharedMemoryReceiver(said[0], timeout=HANG)
    link.next_bucket = failing_at(5, link.next_bucket)
    with raises(ZeroDivisionError, "in the middle"):
        apply_weights(model, link)
    apply_weights(model, end, verify=True)
    link.close()
    check_equal(Model(3), model)


def failing_at(number: int, call: Callable[[], Any]) -> Callable[[], Any]:
    count = iter(range(1, 1000))

    def counted() -> Any:
        if next(count) == number:
            raise ZeroDivisionError("in the middle")
        return call()

    return counted


def death_of_a_receiver(rank: int) -> None:
    """Checks that when rank 2 is killed in the middle, the others hear of it, and the link refuses to go on."""
    trainer, model = Model(1), Model(2)
    if rank == 0:
        with BroadcastSender(bucket_bytes=1024, timeout=DEATH) as sender:
            with raises(PeerLostError, "a rank of the group died or was late"):
                sender.send(trainer)
            with raises(PeerLostError, "make another"):
                sender.send(trainer)
    else:
        link = BroadcastReceiver(0, timeout=DEATH)
        if rank == 2:
            real, count = link.next_bucket, iter(range(100))
            link.next_bucket = lambda: real() if next(count) < 20 else os.kill(os.getpid(), signal.SIGKILL)
        with raises(PeerLostError, "a rank of the group died or was late"):
            apply_weights(model, link)


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=HANG)
    )
    plain_syncs(rank)
    sharded_in_one_process(rank)
    sharded_sync(rank)
    a_dict_of_shards(rank)
    broken_off_in_a_tensor(rank)
    dist.barrier()
    death_of_a_receiver(rank)
    os.write(1, b"all went well\n")
    os._exit(0)  # the group is broken: its teardown would wait for the dead rank
