"""Weights for a tensor whose memory the host can not write go through a copy: as a model's on a GPU do."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from samebit.weight_sync import WeightStream, apply_weights
from samebit.weight_sync.wire import destination
from samebit.weight_sync.wire.destination import Destination


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 129), nn.LayerNorm(129), nn.Linear(129, 3))


def test_memory_that_is_elsewhere_is_copied_one_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on a GPU refused every update but that of a folder, a dictionary or another module."""
    monkeypatch.setattr(destination, "in_place_bytes", lambda tensor: None)
    copies: list[weakref.ref[torch.Tensor]] = []
    copy = Destination._copy_of

    def watched(self: Destination, target: torch.Tensor) -> torch.Tensor:
        assert [number for number, one in enumerate(copies) if one() is not None] == []
        made = copy(self, target)
        copies.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Destination, "_copy_of", watched)
    ours, theirs = model(0), model(1)
    versions = [part._version for part in ours.parameters()]
    report = apply_weights(ours, WeightStream.of(theirs), verify=True)
    assert len(copies) == 6
    assert len(report.changed) == 4, "the norm's weights are the same"
    for name, part in ours.state_dict().items():
        assert torch.equal(part, theirs.state_dict()[name])
    moved = [part._version > before for part, before in zip(ours.parameters(), versions, strict=True)]
    assert moved == [True, True, False, False, True, True]
