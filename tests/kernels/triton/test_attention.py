"""Paged attention in Triton: near the float64 oracle by several routes through the pages, and its gradients."""

import pytest
import torch

from samebit.kernels import device
from samebit.kernels.attention import attention
from samebit.kernels.context import training_context

from ..attention_layer import Shape, oracle, tensors, through_pages
from ..helpers import assert_near, leaves
from ..routes import ROUTES, left_padding, padded
from .gpu import DEVICE, leaf

LENGTHS = (1, 3, 66, 129)


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)


CASES = (
    (Shape(2, 2, 32), torch.float32),
    (Shape(4, 2, 50, window=20), torch.bfloat16),
    (Shape(6, 2, 64, softcap=2.0), torch.float16),
    (Shape(7, 1, 80, window=65), torch.float32),
    (Shape(2, 1, 129, window=64, softcap=5.0), torch.bfloat16),
)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_every_route_through_the_pages_is_near_the_oracle(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype, LENGTHS)
    expected = oracle(*parts, shape, LENGTHS)
    for block_size, route in ((16, "whole"), (4, "chunks")):
        found = through_pages(parts, shape, LENGTHS, block_size, ROUTES[route], padding=1, device=DEVICE)
        assert_near(found, expected, 4)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_training_and_its_gradients_are_near_the_oracle(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype, LENGTHS)
    mask = left_padding(LENGTHS)
    real = mask.flatten().bool()
    mine, exact = [leaf(padded(x, mask)) for x in parts], leaves(*(x.double() for x in parts))
    context = training_context(mask.shape, mask, None, DEVICE)
    out, expected = attention(*mine, context, shape.options), oracle(*exact, shape, LENGTHS)
    upstream = torch.randn(len(real), *out.shape[1:]).to(dtype)
    out.backward(upstream.to(DEVICE))
    expected.backward(upstream[real].double())
    assert_near(out[real.to(DEVICE)], expected, 4)
    assert not out[~real.to(DEVICE)].any()
    for x, y in zip(mine, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert_near(x.grad[real.to(DEVICE)], y.grad, 8)
        assert not x.grad[~real.to(DEVICE)].any()
