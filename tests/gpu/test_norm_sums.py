"""A residual and its norm in one launch have the bits, on a GPU, of torch's sum and the norm alone."""

import pytest
import torch

from samebit.kernels.triton.norm import added_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [100, 129, 1024, 2560, 4096, 5120, 8192])
def test_one_launch_has_the_bits_of_a_launch_each(width: int, dtype: torch.dtype) -> None:
    assert added_equal(torch.device("cuda", torch.cuda.current_device()), width, dtype, dtype)
