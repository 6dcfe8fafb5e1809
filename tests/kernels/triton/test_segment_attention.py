"""Attention within segments in Triton is near the oracle, and a segment has the same bits alone."""

import pytest
import torch

from samebit.kernels.layout.vision.segments import Segments
from samebit.kernels.ops.segment_attention import segment_attention

from .. import reference
from ..helpers import assert_near, leaves
from .gpu import DEVICE, EVERY, leaf, poisoned

pytestmark = pytest.mark.usefixtures("on_gpu")

LENGTHS = (65, 1, 64, 7, 600) if EVERY else (65, 1, 7)
CASES = ((2, 80, torch.float32), (1, 64, torch.bfloat16), (1, 72, torch.float16), (3, 128, torch.bfloat16))


@pytest.mark.parametrize(("heads", "size", "dtype"), CASES if EVERY else CASES[:2])
def test_it_is_near_the_oracle_and_a_segment_has_the_same_bits_alone(heads: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    q, k, v = (torch.randn(sum(LENGTHS), heads, size).to(dtype) for _ in range(3))
    parts, upstream = (q * 3, k, v), torch.randn(q.shape).to(dtype)
    mine, exact = [leaf(part) for part in parts], leaves(*(part.double() for part in parts))
    out = segment_attention(*mine, Segments.of(LENGTHS, DEVICE), size**-0.5)
    split = zip(*(part.split(LENGTHS) for part in exact), strict=True)
    oracle = torch.cat([reference.full_attention(*part, scale=size**-0.5) for part in split])
    out.backward(upstream.to(DEVICE))
    oracle.backward(upstream.double())
    assert_near(out, oracle, 4)
    for x, y in zip(mine, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert_near(x.grad, y.grad, 8)
    first = 0
    for length in LENGTHS:
        alone = segment_attention(*(poisoned(part[first : first + length]) for part in parts), [length], size**-0.5)
        assert torch.equal(alone, out[first : first + length]), length
        first += length
