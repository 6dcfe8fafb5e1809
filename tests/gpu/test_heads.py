"""Norms of heads, rotation and pages in one launch have the bits, on a GPU, of a launch each."""

import pytest
import torch

from samebit.kernels.triton.heads import Heads, proved_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotated"), [(32, 8, 128, 64), (8, 4, 256, 128), (16, 2, 256, 32), (6, 3, 50, 20)]
)
def test_one_launch_has_the_bits_of_a_launch_each(
    heads: int, kv_heads: int, size: int, rotated: int, normed: bool, dtype: torch.dtype
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert proved_equal(Heads(device, dtype, heads, kv_heads, size, rotated, (dtype, dtype) if normed else None))
