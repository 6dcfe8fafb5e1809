"""Plain activations are near the oracle, their gradients too, and an element has the same bits wherever it stands."""

import pytest
import torch

from samebit.kernels.ops.activation import PLAIN_ACTIVATIONS, TOWER_ACTIVATIONS, activated, gated

from . import reference
from .helpers import DTYPES, THREADS, assert_near, leaves, threads

pytestmark = pytest.mark.usefixtures("nan_in_empty")

SIZES = (1, 7, 100, 129, 1000)


def numbers(count: int) -> torch.Tensor:
    torch.manual_seed(count)
    return torch.randn(count) * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TOWER_ACTIVATIONS)
def test_an_element_has_the_same_bits_in_every_call(name: str, dtype: torch.dtype) -> None:
    x, upstream = (numbers(count)[:70_000].to(dtype) for count in (70_000, 70_001))  # for several threads
    leaf = x.clone().requires_grad_()
    whole = activated(name, leaf)
    whole.backward(upstream)
    assert leaf.grad is not None
    for size in (*SIZES, 70_000):
        for first in {0, 5, 4090, 70_000 - size} if size < 70_000 else {0}:
            part = slice(first, first + size)
            for number in THREADS:
                mine = x[part].clone().requires_grad_()
                with threads(number):
                    out = activated(name, mine)
                    out.backward(upstream[part])
                    assert torch.equal(activated(name, x[part]), whole[part]), (size, first)
                assert torch.equal(out, whole[part]), (size, first)
                assert mine.grad is not None
                assert torch.equal(mine.grad, leaf.grad[part]), (size, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TOWER_ACTIVATIONS)
def test_values_and_gradients_are_near_the_oracle(name: str, dtype: torch.dtype) -> None:
    x, upstream = numbers(1290).to(dtype).view(10, 129), numbers(1291)[:1290].to(dtype).view(10, 129)
    [mine], [exact] = leaves(x), leaves(x.double())
    out, oracle = activated(name, mine), reference.activated(name, exact)
    out.backward(upstream)
    oracle.backward(upstream.double())
    assert_near(out, oracle)
    assert mine.grad is not None
    assert exact.grad is not None
    assert mine.grad.dtype is dtype
    assert_near(mine.grad, exact.grad)


@pytest.mark.parametrize("name", TOWER_ACTIVATIONS)
def test_far_from_zero_it_is_nothing_or_the_identity_and_nan_stays(name: str) -> None:
    for size in (30.0, 1e5, 1e18):
        [x] = leaves(torch.tensor([size, -size, 0.0, torch.nan]))
        out = activated(name, x)
        out.backward(torch.ones(4))
        assert out[0] == x[0]
        assert abs(out.tolist()[1]) < 1e-18
        assert x.grad is not None
        assert x.grad[0] == 1.0
        assert abs(x.grad.tolist()[1]) < 1e-18
        assert out[2] == 0.0
        assert x.grad[2] == 0.5
        assert out[3].isnan()


def test_the_tanh_form_has_the_bits_of_the_gated_one() -> None:
    x = numbers(1000)
    assert torch.equal(activated("gelu_pytorch_tanh", x), gated("gelu_pytorch_tanh", x, torch.ones(1000)))


@pytest.mark.parametrize("name", TOWER_ACTIVATIONS)
def test_strides_change_nothing(name: str) -> None:
    x = numbers(1000).view(10, 100)
    assert torch.equal(activated(name, x.T), activated(name, x).T)
    assert activated(name, x[:0]).shape == (0, 100)


def test_what_it_can_not_compute_is_refused_by_name() -> None:
    allowed = ", ".join(PLAIN_ACTIVATIONS + TOWER_ACTIVATIONS)
    with pytest.raises(ValueError, match=f"'mish' is not exact; allowed: {allowed}"):
        activated("mish", torch.ones(3))
    with pytest.raises(TypeError, match="float16"):
        activated("gelu", torch.ones(3).half())
    with pytest.raises(ValueError, match=r"\[\]; allowed: \[..., W\]"):
        activated("gelu", torch.tensor(1.0))
