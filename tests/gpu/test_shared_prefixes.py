"""A row of attention on a GPU has the same bits alone and beside rows that read the same blocks, and whether one
program walks its splits or many do.
"""

import pytest
import torch

from samebit.kernels.layout import attention_work

from ..kernels.attention_layer import Shape
from ..kernels.shared_prefixes import Decode, Group

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SHAPES = (
    Shape(32, 8, 128),
    Shape(2, 2, 32),
    Shape(8, 1, 64, softcap=5.0),
    Shape(6, 2, 100, window=100),
    Shape(8, 2, 256, window=200, softcap=20.0),
    Shape(64, 8, 64, window=128, has_sinks=True),
)
GROUPS = (
    Group(64, (65,)),
    Group(1000, tuple(range(1001, 1018))),
    Group(200, (201, 230, 265, 420, 1000)),
    Group(63, (70, 90)),
    Group(65, (66, 130, 129)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_group_changes_no_bit(shape: Shape, dtype: torch.dtype) -> None:
    for mixed in (False, True):
        decode = Decode(shape, dtype, GROUPS, mixed)
        for block_size in (64, 128):
            grouped, context = decode.found(block_size, "cuda")
            apart, other = decode.found(block_size, "cuda", shared=False)
            assert len(context.work.places) > 20
            assert not len(other.work.places)
            for number, (one, two) in enumerate(zip(grouped, apart, strict=True)):
                alone, _ = decode.found(block_size, "cuda", only=number)
                assert torch.equal(one, two), number
                assert torch.equal(one, alone[0]), number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_split_changes_no_bit(shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Decode(shape, dtype, (Group(0, (512, 513, 1024, 3000)), Group(1300, (1400, 2000))))
    split, context = decode.found(64, "cuda")
    monkeypatch.setattr(attention_work, "SLOTS", 0)
    whole, other = decode.found(64, "cuda")
    kept = [len(items.kept) for one in (context, other) for items in one.on_device.items_of.values()]
    assert kept[0] > kept[1]
    assert torch.equal(torch.cat(split), torch.cat(whole))
