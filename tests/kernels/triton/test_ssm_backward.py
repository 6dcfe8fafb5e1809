"""Gradients of the convolution and of the scan in Triton are near the float64 oracle, and the same each time."""

from dataclasses import dataclass, replace

import pytest
import torch

from samebit.kernels.layout.forward_context import ForwardContext, training_context
from samebit.kernels.layout.options import SSMOptions
from samebit.kernels.ops.conv import causal_conv
from samebit.kernels.ops.ssd import scan

from .. import reference
from ..helpers import assert_near
from .gpu import DEVICE, poisoned

pytestmark = pytest.mark.usefixtures("on_gpu")

FACTOR = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of a scan."""

    heads: int
    head_dim: int
    groups: int
    size: int
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def splits(self) -> list[int]:
        return [self.heads * self.head_dim, self.groups * self.size, self.groups * self.size]


SIZES = (
    Sizes(heads=2, head_dim=8, groups=2, size=16, lengths=(1, 2, 63, 64, 65)),
    Sizes(heads=3, head_dim=20, groups=1, size=20, lengths=(65, 130, 1), dt_limits=(0.02, 0.4)),
    Sizes(heads=6, head_dim=20, groups=2, size=40, lengths=(70, 3), dtype=torch.bfloat16),
    Sizes(heads=3, head_dim=64, groups=1, size=128, lengths=(130, 2)),
    Sizes(heads=2, head_dim=8, groups=1, size=16, lengths=(66,), dtype=torch.float16, dt_limits=(0.05, 0.3)),
    Sizes(heads=2, head_dim=40, groups=2, size=24, lengths=(40,), dtype=torch.bfloat16),
)


def with_padding(lengths: tuple[int, ...]) -> tuple[ForwardContext, torch.Tensor]:
    """Lay out sequences with two rows of padding more than the longest has, on alternating sides; return also which
    rows are real.
    """
    width = max(lengths) + 2
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for s, length in enumerate(lengths):
        start = width - length if s % 2 == 0 else 0
        mask[s, start : start + length] = 1
    context = training_context((len(lengths), width), mask, None, DEVICE)
    return context, mask.flatten().bool()


def spread(rows: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Put the rows where there are sequences, NaN in padding rows and around the tensor."""
    whole = rows.new_full((len(real), *rows.shape[1:]), torch.nan)
    whole[real] = rows
    return poisoned(whole)


def exact(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def given(sizes: Sizes) -> list[torch.Tensor]:
    """Draw xbc and dt of the real rows, A, the bias of dt, D, and the upstream gradient."""
    torch.manual_seed(0)
    rows, heads = sum(sizes.lengths), sizes.heads
    return [
        torch.randn(rows, sum(sizes.splits)).to(sizes.dtype), torch.randn(rows, heads).to(sizes.dtype),
        -torch.rand(heads) * 4, torch.randn(heads) - 2, torch.randn(heads),
        torch.randn(rows, sizes.splits[0]).to(sizes.dtype),
    ]  # fmt: skip


def found(sizes: Sizes, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients of the scan's five arguments; of the real rows, the others are seen to be zero."""
    context, real = with_padding(sizes.lengths)
    leaves = [spread(part, real) if part.dim() > 1 else part.to(DEVICE, copy=True) for part in inputs[:-1]]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    options = SSMOptions(0, 64, sizes.groups, sizes.size, sizes.dt_limits)
    scan(*leaves, context, options).backward(spread(inputs[-1], real))
    gradients = [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]
    assert not any(part[~real].any() for part in gradients[:2]), "of padding rows"
    return [part[real] for part in gradients[:2]] + gradients[2:]


def expected(sizes: Sizes, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    *leaves, upstream = exact(inputs)
    xbc, dt, *parameters = leaves
    counts = sizes.heads, sizes.groups, sizes.groups
    out = []
    for rows, steps in zip(xbc.split(sizes.lengths), dt.split(sizes.lengths), strict=True):
        x, b, c = (part.unflatten(-1, (n, -1)) for part, n in zip(rows.split(sizes.splits, -1), counts, strict=True))
        out.append(reference.ssm_scan(x, b, c, steps, *parameters, sizes.dt_limits).flatten(1))
    torch.cat(out).backward(upstream)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def scan_parts(sizes: Sizes, gradients: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    x, b, c = gradients[0].split(sizes.splits, -1)
    return dict(zip(("x", "B", "C", "dt", "A", "bias of dt", "D"), (x, b, c, *gradients[1:]), strict=True))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_of_the_scan_are_near_the_oracle(sizes: Sizes) -> None:
    inputs = given(sizes)
    mine, theirs = scan_parts(sizes, found(sizes, inputs)), scan_parts(sizes, expected(sizes, inputs))
    for name, part in mine.items():
        try:
            assert_near(part, theirs[name], FACTOR[part.dtype])
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from None


def test_what_tokens_pass_on_is_as_precise_after_one_that_forgets_everything() -> None:
    """What tokens pass on is as precise after one that forgets everything: the sums of the chunk go from 0 to -2,000 at
    token 3, and decays are the exponentials of their small differences.
    """
    sizes = replace(SIZES[0], lengths=(60,))
    inputs = given(sizes)
    inputs[1] = inputs[1] / 8 - 8
    inputs[1][3], inputs[2], inputs[3] = 5.0, torch.full((2,), -400.0), torch.zeros(2)
    mine, theirs = scan_parts(sizes, found(sizes, inputs)), scan_parts(sizes, expected(sizes, inputs))
    for name in ("x", "B", "C", "dt"):
        assert_near(mine[name][4:], theirs[name][4:], 4)


@pytest.mark.parametrize("sizes", [replace(SIZES[2], heads=2, lengths=(66,)), SIZES[5]], ids=str)
def test_the_same_gradients_each_time(sizes: Sizes) -> None:
    inputs = given(sizes)
    for one, other in zip(found(sizes, inputs), found(sizes, inputs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("width", "taps", "dtype", "lengths", "silu"),
    [
        (37, 4, torch.float32, (1, 2, 3, 63, 64, 65), True), (100, 2, torch.bfloat16, (130, 1), True),
        (8, 3, torch.float16, (5, 2), True), (72, 1, torch.float32, (3, 70), True),
        (37, 3, torch.float32, (65, 1, 2), False), (100, 4, torch.bfloat16, (66,), False),
    ],
)  # fmt: skip
def test_gradients_of_the_convolution_are_near_the_oracle(
    width: int, taps: int, dtype: torch.dtype, lengths: tuple[int, ...], silu: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(lengths), width).to(dtype)
    weight, bias = torch.randn(width, 1, taps).to(dtype), torch.randn(width).to(dtype)
    upstream = torch.randn(x.shape).to(dtype)
    context, real = with_padding(lengths)
    joined = spread(torch.cat([x, x.new_full((len(x), 16), torch.nan)], dim=1), real).requires_grad_()
    leaves = [joined, weight.to(DEVICE, copy=True).requires_grad_(), bias.to(DEVICE, copy=True).requires_grad_()]

    def gradients() -> list[torch.Tensor]:
        out = causal_conv(joined[:, :width], *leaves[1:], context, 0, silu=silu)
        return [part.cpu() for part in torch.autograd.grad(out, leaves, spread(upstream, real))]

    mine = gradients()
    assert all(torch.equal(one, other) for one, other in zip(mine, gradients(), strict=True)), "another each time"
    assert not mine[0][~real].any(), "of padding rows"
    mine[0] = mine[0][real][:, :width]
    theirs = exact([x, weight, bias])
    out = torch.cat([reference.causal_conv(part, *theirs[1:], silu=silu) for part in theirs[0].split(lengths)])
    for one, other in zip(mine, torch.autograd.grad(out, theirs, upstream.double()), strict=True):
        assert_near(one, other, FACTOR[dtype])
