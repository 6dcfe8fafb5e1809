"""Weights for a tensor whose memory the host can not write go through a copy: as a model's on a GPU do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn

from samebit.weight_sync import (
    SharedMemoryReceiver,
    SharedMemorySender,
    SyncBrokenError,
    TensorSpec,
    WeightStream,
    apply_weights,
)
from samebit.weight_sync.wire import destination
from samebit.weight_sync.wire.destination import Destination

from ..patience import HANG


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 129), nn.LayerNorm(129), nn.Linear(129, 3))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """Lists the copies that are made, and checks that those before are gone when the next one is made."""
    monkeypatch.setattr(destination, "in_place_bytes", lambda tensor: None)
    made: list[weakref.ref[torch.Tensor]] = []
    copy: Callable[[Destination, torch.Tensor], torch.Tensor] = Destination._copy_of

    def watched(self: Destination, target: torch.Tensor) -> torch.Tensor:
        assert [number for number, one in enumerate(made) if one() is not None] == []
        new = copy(self, target)
        made.append(weakref.ref(new))
        return new

    monkeypatch.setattr(Destination, "_copy_of", watched)
    return made


def test_memory_that_is_elsewhere_is_copied_one_tensor_at_a_time(copies: list[weakref.ref[torch.Tensor]]) -> None:
    """Each tensor goes through a copy that is gone before the next one is made. (A worker on a GPU refused such
    updates.)
    """
    ours, theirs = model(0), model(1)
    versions = [part._version for part in ours.parameters()]
    report = apply_weights(ours, WeightStream.of(theirs), verify=True)
    assert len(copies) == 6
    assert len(report.changed) == 4, "the norm's weights are the same"
    for name, part in ours.state_dict().items():
        assert torch.equal(part, theirs.state_dict()[name])
    moved = [part._version > before for part, before in zip(ours.parameters(), versions, strict=True)]
    assert moved == [True, True, False, False, True, True]


def test_a_delta_is_written_one_tensor_at_a_time_too(copies: list[weakref.ref[torch.Tensor]]) -> None:
    ours, theirs = model(0), model(1)
    with (
        closing(SharedMemorySender(bucket_bytes=1024, timeout=HANG)) as sender,
        SharedMemoryReceiver(sender.address, timeout=HANG) as end,
        ThreadPoolExecutor(1) as other,
    ):
        for added in range(2):
            with torch.no_grad():
                for part in theirs.parameters():
                    part.view(-1)[::3] += added
            sending = other.submit(sender.send, theirs, delta=True)
            apply_weights(ours, end)
            assert sending.result().delta == bool(added)
    assert len(copies) == 6 + 6
    for name, part in ours.state_dict().items():
        assert torch.equal(part, theirs.state_dict()[name])


def test_a_tensor_that_comes_back_after_its_end_is_refused() -> None:
    """Bytes of a tensor that is complete already are refused, as they would reach nothing."""
    one = Destination(TensorSpec("x", (2,), torch.float32), torch.zeros(2))
    one.put(0, np.arange(8, dtype=np.uint8))
    with pytest.raises(SyncBrokenError, match="more of x came after its end"):
        one.put(0, np.arange(8, dtype=np.uint8))
