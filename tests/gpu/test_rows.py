"""A row of a Triton kernel has the same bits in every call on a GPU."""

from collections.abc import Callable

import pytest
import torch

from samebit.kernels.layout.options import GatedNormOptions
from samebit.kernels.ops.activation import gated
from samebit.kernels.ops.linear import linear
from samebit.kernels.ops.logprobs import log_softmax
from samebit.kernels.ops.norm import gated_rms_norm, layer_norm, rms_norm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (64, 100, 129, 1000, 4096)


def kernels(width: int, dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    weight = torch.randn(width, device="cuda").to(dtype)
    matrix = (torch.randn(333, width, device="cuda") / width**0.5).to(dtype)
    return {
        "linear": lambda x: linear(x, matrix),
        "rms_norm": lambda x: rms_norm(x, weight, 1e-6),
        "layer_norm": lambda x: layer_norm(x, weight, weight, 1e-6),
        "gated_rms_norm": lambda x: gated_rms_norm(x, x, weight, GatedNormOptions(1e-6, 1, True)),
        "silu": lambda x: gated("silu", x, x),
        "log_softmax": lambda x: log_softmax(x, torch.full((len(x),), 0.7, device="cuda")),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_in_every_call(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    rows = torch.randn(700, width, device="cuda").to(dtype)
    order = torch.randperm(700, device="cuda")
    for name, run in kernels(width, dtype).items():
        whole = run(rows)
        assert torch.equal(run(rows[order]), whole[order]), name
        for count in (1, 2, 3, 7, 16, 63, 64, 65, 129, 512):
            for first in (0, 5, 700 - count):
                assert torch.equal(run(rows[first : first + count]), whole[first : first + count]), (name, count, first)
