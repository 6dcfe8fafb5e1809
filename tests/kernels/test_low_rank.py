"""What an adapter adds to a linear layer is near float64, and a row's own."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from samebit.kernels.binding.lora.loaded import DeltaShape, new_delta
from samebit.kernels.layout.lora.adapters import Delta, Deltas
from samebit.kernels.ops.linear import linear
from samebit.kernels.ops.lora.low_rank import add_low_rank

ROWS = 70
INPUTS, OUTPUTS = 129, (300, 30, 7)


def deltas(rank: int, dtype: torch.dtype) -> list[Delta]:
    torch.manual_seed(rank)
    made = [new_delta(DeltaShape(rank, INPUTS, outputs, 1.7), dtype, torch.device("cpu")) for outputs in OUTPUTS]
    for delta in made:
        nn.init.normal_(delta.down.weight, std=0.2)
        nn.init.normal_(delta.up.weight, std=0.2)
    return made


def copies(bases: list[torch.Tensor], first: int = 0, last: int = ROWS) -> list[torch.Tensor]:
    """Return rows of these matrices, to give away."""
    return [base[first:last].clone() for base in bases]


@pytest.mark.parametrize(
    ("rank", "dtype", "adapters"),
    [
        (1, torch.float32, torch.float32),
        (16, torch.bfloat16, torch.float32),
        (100, torch.float32, torch.float32),
        (200, torch.bfloat16, torch.float32),  # more than are summed in one chain, and wider than is turned at a time
        (5, torch.bfloat16, torch.bfloat16),
    ],
)
def test_rows(rank: int, dtype: torch.dtype, adapters: torch.dtype) -> None:
    made = deltas(rank, adapters)
    x = torch.randn(ROWS, INPUTS).to(dtype)
    bases = [torch.randn(ROWS, outputs).to(dtype) for outputs in OUTPUTS]
    with torch.no_grad():
        whole = add_low_rank(copies(bases), x, Deltas(tuple(made)))
        for first, last in ((0, 1), (1, 3), (2, 9), (0, 16), (3, 67)):
            part = add_low_rank(copies(bases, first, last), x[first:last], Deltas(tuple(made)))
            assert all(torch.equal(found, all_[first:last]) for found, all_ in zip(part, whole, strict=True))
        (alone,) = add_low_rank(copies(bases[1:2]), x, Deltas(tuple(made[1:2])))
        of_trainer = Deltas(tuple(replace(delta, fixed=False) for delta in made))
        for first, last in ((0, 1), (2, 9), (0, ROWS)):
            part = add_low_rank(copies(bases, first, last), x[first:last], of_trainer)
            assert all(torch.equal(found, all_[first:last]) for found, all_ in zip(part, whole, strict=True))
    assert torch.equal(alone, whole[1])
    with_gradient = add_low_rank(bases, x.clone().requires_grad_(), Deltas(tuple(made)))
    for found, again, base, delta in zip(whole, with_gradient, bases, made, strict=True):
        assert found.dtype == dtype
        assert torch.equal(found, again)
        product = linear(x.double().to(torch.float32), delta.down.weight.float()).double() @ delta.up.weight.double().T
        exact = base.double() + 1.7 * product
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        assert (found.double() - exact).norm() < tolerance * exact.norm()


def test_matrices_that_a_trainer_writes_to_are_read_at_each_call() -> None:
    made = Deltas(tuple(replace(delta, fixed=False) for delta in deltas(16, torch.float32)))
    x = torch.randn(3, INPUTS)
    with torch.no_grad():
        before = add_low_rank([torch.zeros(3, outputs) for outputs in OUTPUTS], x, made)
        for delta in made.each:
            delta.up.weight.data.mul_(2.0)  # raises no version counter
        after = add_low_rank([torch.zeros(3, outputs) for outputs in OUTPUTS], x, made)
    assert all(torch.equal(two, 2 * one) for one, two in zip(before, after, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    made = deltas(4, torch.float32)
    x = torch.zeros(2, INPUTS)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"base \[2, 3\].*allowed"):
            add_low_rank([torch.zeros(2, 3)], x, Deltas(tuple(made[:1])))
        with pytest.raises(TypeError, match=r"x is torch.float32, .* down torch.bfloat16"):
            add_low_rank([torch.zeros(2, 300)], x, Deltas(tuple(deltas(4, torch.bfloat16)[:1])))
