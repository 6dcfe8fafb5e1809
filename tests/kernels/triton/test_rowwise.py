"""Linear, norms, activations and rotary in Triton are near the float64 oracle, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from samebit.kernels.layout.forward_context import training_context
from samebit.kernels.layout.options import GatedNormOptions
from samebit.kernels.ops.activation import ACTIVATIONS, TOWER_ACTIVATIONS, activated, gated
from samebit.kernels.ops.linear import gradient_of_weight, linear
from samebit.kernels.ops.norm import gated_rms_norm, layer_norm, rms_norm
from samebit.kernels.ops.rope import RotaryTables, rotate
from samebit.kernels.triton import matmul, norm

from .. import reference
from ..helpers import assert_near
from .gpu import DEVICE, DTYPES, EVERY, leaf

pytestmark = pytest.mark.usefixtures("on_gpu")

EPS = 1e-6
ROWS = 130 if EVERY else 70
"""Is more than a tile of a product has, and than one program sums for the gradient of a norm's weight."""

CASES = {
    torch.float32: [(1, 100), (3, 1000), (ROWS, 100)],
    torch.bfloat16: [(2, 1000), (7, 129)],
    torch.float16: [(3, 129)],
}


@dataclass(frozen=True)
class Op:
    """Holds an operation. `inputs`: tensors of so many rows and such a width, in the order of `run`'s arguments."""

    inputs: Callable[[int, int], list[torch.Tensor]]
    run: Callable[..., torch.Tensor]
    oracle: Callable[..., torch.Tensor]


def gate_and_up(rows: int, width: int) -> list[torch.Tensor]:
    return [torch.randn(rows, width) * 3, torch.randn(rows, width)]


OPS = {
    "linear": Op(
        lambda rows, width: [torch.randn(rows, width), torch.randn(77, width) / width**0.5, torch.randn(77)],
        linear,
        reference.linear,
    ),
    "linear without bias": Op(
        lambda rows, width: [torch.randn(rows, width), torch.randn(130, width) / width**0.5], linear, reference.linear
    ),
    "rms_norm": Op(
        lambda rows, width: [torch.randn(rows, width) * 3, torch.randn(width)],
        lambda x, w: rms_norm(x, w, EPS, 1.0),
        lambda x, w: reference.rms_norm(x, w, EPS, 1.0),
    ),
    "layer_norm": Op(
        lambda rows, width: [torch.randn(rows, width) + 1, torch.randn(width), torch.randn(width)],
        lambda x, w, b: layer_norm(x, w, b, EPS),
        lambda x, w, b: reference.layer_norm(x, w, b, EPS),
    ),
    **{
        name: Op(
            gate_and_up,
            lambda gate, up, name=name: gated(name, gate, up),
            lambda gate, up, name=name: reference.gated(name, gate, up),
        )
        for name in ACTIVATIONS
        if name not in ("swish", "gelu_new")
    },
    **{
        f"plain {name}": Op(
            lambda rows, width: [torch.randn(rows, width) * 3],
            lambda x, name=name: activated(name, x),
            lambda x, name=name: reference.activated(name, x),
        )
        for name in TOWER_ACTIVATIONS
        if name != "gelu_new"
    },
}


def check(op: Op, inputs: list[torch.Tensor], dtype: torch.dtype) -> None:
    inputs = [x.to(dtype) for x in inputs]
    mine, exact = [leaf(x) for x in inputs], [x.double().requires_grad_() for x in inputs]
    out, oracle = op.run(*mine), op.oracle(*exact)
    upstream = torch.randn(out.shape).to(dtype)
    out.backward(upstream.to(DEVICE))
    oracle.backward(upstream.double())
    assert_near(out, oracle, 2)
    for x, y in zip(mine, exact, strict=True):
        assert x.grad is not None
        assert_near(x.grad, y.grad, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients_are_near_the_oracle(name: str, dtype: torch.dtype) -> None:
    for rows, width in CASES[dtype]:
        torch.manual_seed(rows * width)
        check(OPS[name], OPS[name].inputs(rows, width), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gate_first", "by_sigmoid"), [(True, False), (False, False), (False, True)])
def test_gated_rms_norm(gate_first: bool, by_sigmoid: bool, dtype: torch.dtype) -> None:
    for rows, width, groups in ((1, 100, 1), (7, 258, 2), (ROWS, 24, 8)):
        torch.manual_seed(width)
        options = GatedNormOptions(1e-5, groups, gate_first, by_sigmoid)
        op = Op(
            lambda rows, width: [torch.randn(rows, width), torch.randn(rows, 2 * width + 3), torch.randn(width)],
            lambda x, joined, w, options=options: gated_rms_norm(x, joined[:, 3 : 3 + x.shape[1]], w, options),
            lambda x, joined, w, options=options: reference.gated_rms_norm(
                x, joined[:, 3 : 3 + x.shape[1]], w, options
            ),
        )
        check(op, op.inputs(rows, width), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotated"), [(32, 16), (50, 6), (80, 40)])
def test_rotary(head_dim: int, rotated: int, dtype: torch.dtype) -> None:
    frequencies = 10000.0 ** (-torch.arange(rotated) / rotated)
    context = training_context((1, 7), None, None)
    angles = context.positions[:, None] * frequencies
    tables = RotaryTables((angles.cos() * 1.25).to(DEVICE), (angles.sin() * 1.25).to(DEVICE), context)
    op = Op(
        lambda rows, width: [torch.randn(rows, 3, width)],
        lambda x: rotate(x, tables),
        lambda x: reference.rotate(x, context.positions, frequencies, 1.25),
    )
    check(op, op.inputs(7, head_dim), dtype)


def test_weights_of_norms_have_their_gradients_from_programs_enough_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough programs for an H100's 132 multiprocessors make the gradient of a norm's weight, of a prompt of 8,192
    tokens.
    """
    grids = []

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(norm, "_norm_gradients", Noted())
    monkeypatch.setattr(norm, "_gated_gradients", Noted())
    x, weight = torch.zeros(8192, 8), torch.zeros(8)
    norm.rms_norm_backward((x, weight), x, EPS, 0.0)
    norm.gated_rms_norm_backward((x, x, weight), x, GatedNormOptions(EPS, 2, True))
    assert grids == [(256,), (256, 2)]


@pytest.mark.parametrize("outputs", [1, 3])
def test_what_is_compiled_for_the_gradient_of_a_weight_is_not_of_the_rows(
    outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other counts of rows compile nothing anew for the gradient of a weight, though rows and depth have the same
    stride where there is one output, as in the gate of shared experts.
    """
    seen = set()

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda a, b, bias, out, rows, depth, *constants, **options: seen.add((*constants, *options.items()))

    monkeypatch.setattr(matmul, "_multiply", Noted())
    for rows in (5, 9):
        gradient_of_weight(torch.zeros(rows, outputs, device=DEVICE), torch.zeros(rows, 8, device=DEVICE))
    assert len(seen) == 1


def test_no_rows_are_no_rows() -> None:
    empty, width = torch.empty(0, 100, device=DEVICE), torch.ones(100, device=DEVICE)
    assert linear(empty, torch.ones(5, 100, device=DEVICE)).shape == (0, 5)
    assert rms_norm(empty, width, EPS).shape == (0, 100)
    assert gated("silu", empty, empty).shape == (0, 100)


def test_shapes_and_dtypes_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x is \[2, 3\], weight \[4, 5\]"):
        linear(torch.ones(2, 3), torch.ones(4, 5))
    with pytest.raises(TypeError, match=r"x is torch.float32, weight torch.bfloat16"):
        linear(torch.ones(2, 5), torch.ones(4, 5, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"allowed: all alike, of torch.float32, torch.bfloat16, torch.float16"):
        linear(torch.ones(2, 5).double(), torch.ones(4, 5).double())
