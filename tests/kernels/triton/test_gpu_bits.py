"""The interpreter computes what benchmarks/gpu_bits.py compares on a GPU, and finds it as expected."""

import pytest
import torch

from samebit.benchmarks import gpu_bits
from samebit.kernels.layout import device
from samebit.kernels.triton.tiles.file import AttentionTile, MatmulTile

from .gpu import DEVICE

SIZES = gpu_bits.Sizes(
    layers=((96, 77),), rows=40, counts=(1, 5), tiles=(MatmulTile(64, 64, 32, 4, 2), MatmulTile(16, 32, 64, 4, 2)),
    attention_tiles=(AttentionTile(64, 4, 2), AttentionTile(32, 2, 2)), heads=gpu_bits.Heads(4, 2, 16), tokens=70,
    vocab=1500, elements=1 << 14,
)  # fmt: skip


def test_bits_are_as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)
    found = list(gpu_bits.comparisons(SIZES, torch.device(DEVICE), ("bfloat16",)))
    assert [one for one in found if one.expected is not None and one.equal != one.expected] == []
    assert sum(one.expected is False for one in found) == 1, "the control"
    assert len(found) == (1 + 2 + 2) + 2 + 1 + 1


def test_a_tile_that_does_not_fit_is_named() -> None:
    def refused() -> bool:
        raise gpu_bits.OutOfResources(300_000, 232_448, "shared memory")

    found = gpu_bits.compared("a tile", refused, expected=True)
    assert (found.equal, found.expected) == (False, None)
    assert "shared memory" in found.note
