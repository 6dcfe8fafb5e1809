"""Gradients of norms are as near the float64 oracle as torch's, with the same bits by any number of threads."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from samebit.kernels import openmp
from samebit.kernels.cpu.base import jit
from samebit.kernels.layout.options import GatedNormOptions
from samebit.kernels.ops.norm import gated_rms_norm, layer_norm, rms_norm

from . import reference
from .helpers import DTYPES, leaves, threads

EPS = 1e-6
WIDTHS = (1, 7, 32, 100, 129, 1000)
ROWS = (1, 2, 3, 7, 64, 700)
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
"""Holds the most that is between a number and the next one, relative to it."""


def gate_of(gate: torch.Tensor, options: GatedNormOptions) -> torch.Tensor:
    return gate.sigmoid() if options.sigmoid else F.silu(gate)


@dataclass(frozen=True)
class Norm:
    """Holds a norm, its oracle, and what torch computes it by; of ``rows`` inputs ``[T, W]``, ``shared`` weights
    ``[W]``.

    `by_torch` is given float32.
    """

    rows: int
    shared: int
    run: Callable[..., torch.Tensor]
    oracle: Callable[..., torch.Tensor]
    by_torch: Callable[..., torch.Tensor]


def gated(options: GatedNormOptions) -> Norm:
    def by_torch(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        factor, groups = gate_of(gate, options), options.groups
        value = (x * factor if options.gate_first else x).unflatten(-1, (groups, -1))
        normed = F.rms_norm(value, value.shape[-1:], None, options.eps).flatten(-2) * weight
        return normed if options.gate_first else normed * factor

    return Norm(
        2,
        1,
        lambda x, gate, weight: gated_rms_norm(x, gate, weight, options),
        lambda x, gate, weight: reference.gated_rms_norm(x, gate, weight, options),
        by_torch,
    )


NORMS = {
    "rms_norm": Norm(
        1,
        1,
        lambda x, w: rms_norm(x, w, EPS, 1.0),
        lambda x, w: reference.rms_norm(x, w, EPS, 1.0),
        lambda x, w: F.rms_norm(x, w.shape, w + 1.0, EPS),
    ),
    "layer_norm": Norm(
        1,
        2,
        lambda x, w, b: layer_norm(x, w, b, EPS),
        lambda x, w, b: reference.layer_norm(x, w, b, EPS),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
    ),
    **{
        f"gated_rms_norm {'of gated' if first else 'before the gate'}, {'sigmoid' if by_sigmoid else 'silu'}": gated(
            GatedNormOptions(EPS, 1, first, by_sigmoid)
        )
        for first in (True, False)
        for by_sigmoid in (True, False)
    },
}


def inputs(norm: Norm, rows: int, width: int, dtype: torch.dtype, of_weights: torch.dtype) -> list[torch.Tensor]:
    """Return what the norm is given, and last the gradient of the result."""
    torch.manual_seed(rows * width)
    given = [torch.randn(rows, width).to(dtype) + 1 for _ in range(norm.rows)]
    weights = [torch.randn(width).to(of_weights) for _ in range(norm.shared)]
    return [*given, *weights, torch.randn(rows, width).to(dtype)]


def gradients(run: Callable[..., torch.Tensor], *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of all that the norm is given; the last of ``given`` is that of the result."""
    *operands, upstream = given
    operands = leaves(*operands)
    return torch.autograd.grad(run(*operands), operands, upstream)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


MIXED = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


@pytest.mark.usefixtures("nan_in_empty")
@pytest.mark.parametrize(("dtype", "of_weights"), MIXED)
@pytest.mark.parametrize("name", NORMS)
def test_gradients_are_as_near_the_oracle_as_those_of_torch(
    name: str, dtype: torch.dtype, of_weights: torch.dtype
) -> None:
    """Gradients are within 1.1 times torch's error and a unit in the last place; torch computes in float32 and rounds
    once.
    """
    norm = NORMS[name]
    for width in (32, 100, 129, 1000):
        for rows in ROWS:
            given = inputs(norm, rows, width, dtype, of_weights)
            exact = gradients(norm.oracle, *(part.double() for part in given))
            by_torch = gradients(norm.by_torch, *(part.float() for part in given))
            for found, theirs, oracle in zip(gradients(norm.run, *given), by_torch, exact, strict=True):
                allowed = 1.1 * error(theirs.to(found.dtype), oracle) + ROUNDING[found.dtype]
                assert error(found, oracle) <= allowed, (width, rows)


@pytest.mark.parametrize("name", NORMS)
def test_weights_of_many_rows_get_gradients_no_less_exact_than_torchs_sum(name: str) -> None:
    """Gradients of a weight of many rows are no less exact than torch's sum, where rows have a mean and where they
    cancel each other.
    """
    norm = NORMS[name]
    for rows, width, mean in ((12288, 32, 0.0), (12288, 32, 1.0), (50_000, 16, 1.0)):
        *given, upstream = inputs(norm, rows, width, torch.float32, torch.float32)
        given = [*given, upstream + mean]
        exact = gradients(norm.oracle, *(part.double() for part in given))
        by_torch = gradients(norm.by_torch, *given)
        for found, theirs, oracle in list(zip(gradients(norm.run, *given), by_torch, exact, strict=True))[norm.rows :]:
            assert error(found, oracle) <= max(1.1 * error(theirs, oracle), ROUNDING[torch.float32]), (rows, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_gradients_have_the_same_bits_by_any_number_of_threads(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients have the same bits by one to three threads, more than there are processors too, and for the smallest
    work.
    """
    norm = NORMS[name]
    monkeypatch.setattr(jit, "_PARALLEL_WORK", 0)
    for width in WIDTHS:
        for rows in ROWS:
            given, found = inputs(norm, rows, width, dtype, torch.float32), []
            for number in (1, 2, 3):
                monkeypatch.setattr(openmp, "num_threads", lambda number=number: number)
                with threads(1):  # Numba takes the threads of a thread's last kernel for its wish
                    found.append(gradients(norm.run, *given))
            for of_one, *others in zip(*found, strict=True):
                assert all(torch.equal(of_one, other) for other in others), (width, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_a_rows_gradient_has_the_same_bits_in_every_call(name: str, dtype: torch.dtype) -> None:
    """A row's gradient has the same bits in every call, also where the result's gradient is a part of something wider,
    or one number for all.
    """
    norm = NORMS[name]
    for width in WIDTHS:
        given = inputs(norm, 700, width, dtype, torch.float32)
        whole = gradients(norm.run, *given)
        for number in range(norm.rows):
            for rows in (1, 2, 3, 7, 64):
                last = [part[-rows:] if part.dim() == 2 else part for part in given]
                assert torch.equal(gradients(norm.run, *last)[number], whole[number][-rows:]), (width, rows)
        wide = torch.zeros(width, 1400, dtype=dtype)
        wide[:, ::2] = given[-1].T
        apart = gradients(norm.run, *given[:-1], wide[:, ::2].T)
        assert all(map(torch.equal, apart, whole))
        one = torch.full((), 0.7, dtype=dtype)
        of_one = gradients(norm.run, *given[:-1], one.expand(700, width))
        assert all(map(torch.equal, of_one, gradients(norm.run, *given[:-1], one.repeat(700, width))))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_rows_of_any_shape(name: str) -> None:
    """Rows may be a single one, none, or of several dimensions that lie apart."""
    norm = NORMS[name]
    x, *others = inputs(norm, 12, 20, torch.float32, torch.float32)
    *weights, upstream = others
    for shape in ((3, 4, 20), (2, 3, 2, 20)):
        of_shape = gradients(norm.run, x.view(shape), *weights, upstream.view(shape))
        for found, expected in zip(of_shape, gradients(norm.run, x, *weights, upstream), strict=True):
            assert torch.equal(found.reshape(expected.shape), expected)
    turned = gradients(norm.run, x.view(3, 4, 20).transpose(0, 1), *weights, upstream.view(3, 4, 20).transpose(0, 1))
    assert torch.equal(turned[0].transpose(0, 1).reshape(12, 20), gradients(norm.run, x, *weights, upstream)[0])
    alone = gradients(norm.run, x[0], *weights, upstream[0])
    for found, expected in zip(alone, gradients(norm.run, x[:1], *weights, upstream[:1]), strict=True):
        assert torch.equal(found, expected.view(20))


@pytest.mark.usefixtures("nan_in_empty")
@pytest.mark.parametrize("name", NORMS)
def test_no_rows_give_weights_a_gradient_of_zero(name: str) -> None:
    norm = NORMS[name]
    found = gradients(norm.run, *inputs(norm, 0, 20, torch.float32, torch.bfloat16))
    assert [part.shape for part in found] == [(0, 20)] * norm.rows + [(20,)] * norm.shared
    assert not any(part.count_nonzero() for part in found)


@pytest.mark.parametrize("name", NORMS)
def test_frozen_parts_get_no_gradient_and_change_no_other(name: str) -> None:
    norm = NORMS[name]
    *given, upstream = inputs(norm, 33, 100, torch.float32, torch.float32)
    expected = gradients(norm.run, *given, upstream)
    for number, of_one in enumerate(expected):
        parts = [part.clone().requires_grad_(place == number) for place, part in enumerate(given)]
        norm.run(*parts).backward(upstream)
        assert torch.equal(parts[number].grad, of_one)
        assert all(part.grad is None for place, part in enumerate(parts) if place != number)


@pytest.mark.parametrize("options", [GatedNormOptions(EPS, 4, True), GatedNormOptions(EPS, 4, False, True)])
def test_groups_of_a_gated_norm_are_rows_by_themselves(options: GatedNormOptions) -> None:
    """Each group of a gated norm is a row by itself, and a weight that all groups share gets the sum of their
    gradients.
    """
    torch.manual_seed(0)
    x, gate, weight, upstream = torch.randn(21, 100), torch.randn(21, 100), torch.randn(25), torch.randn(21, 100)
    norm = gated(options)
    of_groups = gradients(norm.run, x, gate, weight, upstream)
    of_whole = gradients(norm.run, x, gate, weight.repeat(4), upstream)
    assert all(map(torch.equal, of_groups[:2], of_whole[:2]))
    assert torch.equal(of_groups[2], of_whole[2].view(4, 25).sum(0))
    alone = gated(GatedNormOptions(EPS, 1, options.gate_first, options.sigmoid))
    for group in range(4):
        here = slice(25 * group, 25 * (group + 1))
        found = gradients(alone.run, x[:, here], gate[:, here], weight, upstream[:, here])
        assert torch.equal(found[0], of_whole[0][:, here])
        assert torch.equal(found[1], of_whole[1][:, here])
        assert torch.equal(found[2], of_whole[2][here])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_may_be_a_part_of_wider_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide, options = torch.randn(21, 203).to(dtype), GatedNormOptions(EPS, 2, True)
    x, weight, upstream = torch.randn(21, 100).to(dtype), torch.randn(100).to(dtype), torch.randn(21, 100).to(dtype)
    for gates in (wide[:, 3:103], wide[:, ::2][:, :100]):
        expected = gradients(gated(options).run, x, gates, weight, upstream)
        operands = x.clone().requires_grad_(), gates.detach().requires_grad_(), weight.clone().requires_grad_()
        assert operands[1].stride() == gates.stride() != (100, 1)
        found = torch.autograd.grad(gated_rms_norm(*operands, options), operands, upstream)
        assert all(map(torch.equal, found, expected))
