"""Linear, norms, activations and rotary are near the oracle, their gradients too, and each row stands for itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from samebit.kernels.binding.modules import KNOWN_POSITIONS, RotaryFacts
from samebit.kernels.layout.forward_context import training_context
from samebit.kernels.layout.options import GatedNormOptions
from samebit.kernels.ops.activation import ACTIVATIONS, gated
from samebit.kernels.ops.linear import linear
from samebit.kernels.ops.norm import add_rms_norm, gated_rms_norm, layer_norm, rms_norm
from samebit.kernels.ops.rope import angles_of, heads_in_halves, in_halves, join_rotated, rotary_tables, rotate

from . import reference
from .helpers import DTYPES, THREADS, assert_near, leaves, threads

WIDTHS = (100, 129, 1000)
EPS = 1e-6


@dataclass(frozen=True)
class Op:
    """Holds an operation. `rows`: inputs that have one row a token; `shared`: weights that all rows use."""

    rows: Callable[[int, int], list[torch.Tensor]]
    shared: Callable[[int], list[torch.Tensor]]
    run: Callable[..., torch.Tensor]
    oracle: Callable[..., torch.Tensor]


def one(rows: int, width: int) -> list[torch.Tensor]:
    return [torch.randn(rows, width) * 3]


def gate_and_up(rows: int, width: int) -> list[torch.Tensor]:
    return [torch.randn(rows, width) * 3, torch.randn(rows, width)]


def weight_and_bias(width: int) -> list[torch.Tensor]:
    return [torch.randn(width), torch.randn(width)]


OPS = {
    "linear": Op(one, lambda width: [torch.randn(77, width) / width**0.5, torch.randn(77)], linear, reference.linear),
    "rms_norm": Op(
        one,
        lambda width: [torch.randn(width)],
        lambda x, w: rms_norm(x, w, EPS, 1.0),
        lambda x, w: reference.rms_norm(x, w, EPS, 1.0),
    ),
    "layer_norm": Op(
        one,
        weight_and_bias,
        lambda x, w, b: layer_norm(x + 1, w, b, EPS),
        lambda x, w, b: reference.layer_norm(x + 1, w, b, EPS),
    ),
    **{
        name: Op(
            gate_and_up,
            lambda width: [],
            lambda gate, up, name=name: gated(name, gate, up),
            lambda gate, up, name=name: reference.gated(name, gate, up),
        )
        for name in ACTIVATIONS
    },
}


def inputs(op: Op, rows: int, width: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(rows * width)
    return [x.to(dtype) for x in op.rows(rows, width)], [x.to(dtype) for x in op.shared(width)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_a_row_has_the_same_bits_in_every_call(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    for width in WIDTHS:
        rows, shared = inputs(op, 700, width, dtype)  # enough for the parallel variant
        whole = op.run(*rows, *shared)
        for count in (1, 2, 3, 7, 700):
            for first in sorted({0, 5, 700 - count} if count < 700 else {0}):
                for number in THREADS:
                    with threads(number):
                        part = op.run(*(x[first : first + count] for x in rows), *shared)
                    assert torch.equal(part, whole[first : first + count]), (width, count, first, number)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients_are_near_the_oracle(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    rows, shared = inputs(op, 33, 129, dtype)
    mine = leaves(*rows, *shared)
    exact = leaves(*(x.double() for x in (*rows, *shared)))
    out, oracle = op.run(*mine), op.oracle(*exact)
    upstream = torch.randn(out.shape).to(dtype)
    out.backward(upstream)
    oracle.backward(upstream.double())
    assert_near(out, oracle, 2)
    assert torch.equal(out.detach(), op.run(*rows, *shared)), "the forward that keeps a graph has other bits"
    for x, y in zip(mine, exact, strict=True):
        assert_near(x.grad, y.grad, 3)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("width", [100, 101, 129, 500])
def test_halves_of_a_fused_projection_give_the_bits_of_whole_tensors(name: str, width: int) -> None:
    both = torch.randn(2, 9, 2 * width)
    gate, up = both.chunk(2, dim=-1)
    assert torch.equal(gated(name, gate, up), gated(name, gate.contiguous(), up.contiguous()))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_rows_lie_side_by_side_whatever_the_stride_of_an_axis_of_size_1_says(name: str) -> None:
    """torch takes such tensors for contiguous: a part of a batch that was turned around has this stride."""
    rows, width = 5, 9
    storage = torch.randn(2, rows * rows * width)
    found = []
    for strides in ((width, rows * width, 1), (width, width, 1)):
        given = [part.as_strided((rows, 1, width), strides).requires_grad_() for part in storage.clone()]
        assert all(part.is_contiguous() for part in given)
        out = gated(name, *given)
        found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gate_first", "by_sigmoid"), [(True, False), (False, False), (False, True), (True, True)])
@pytest.mark.parametrize(("width", "groups"), [(100, 1), (258, 2), (1000, 8)])
def test_gated_rms_norm(width: int, groups: int, gate_first: bool, by_sigmoid: bool, dtype: torch.dtype) -> None:
    options = GatedNormOptions(1e-5, groups, gate_first, by_sigmoid)
    joined = torch.randn(64, 2 * width + 3).to(dtype)  # the gate is a part of a projection
    x, gate, weight = torch.randn(64, width).to(dtype), joined[:, 3 : 3 + width], torch.randn(width).to(dtype)
    mine, exact = leaves(x, gate, weight), leaves(x.double(), gate.double(), weight.double())
    out = gated_rms_norm(*mine, options)
    oracle = reference.gated_rms_norm(*exact, options)
    assert_near(out, oracle, 2)
    upstream = torch.randn(out.shape).to(dtype)
    out.backward(upstream)
    oracle.backward(upstream.double())
    for a, b in zip(mine, exact, strict=True):
        assert_near(a.grad, b.grad, 3)
    for rows in (1, 2, 3, 7):
        for number in THREADS:
            with threads(number):
                assert torch.equal(gated_rms_norm(x[-rows:], gate[-rows:], weight, options), out[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [100, 129, 1000])
def test_a_sum_and_its_norm_have_the_bits_of_both_apart(width: int, dtype: torch.dtype) -> None:
    weight = torch.randn(width).to(dtype)
    for rows in (1, 2, 3, 7, 65):
        x, y = torch.randn(2, rows, width).to(dtype)
        total = torch.empty_like(x)
        assert torch.equal(add_rms_norm(x, y, total, weight, 1e-6, 1.0), rms_norm(x + y, weight, 1e-6, 1.0))
        assert torch.equal(total, x + y)


def test_an_inexact_activation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'relu' is not exact; allowed: silu"):
        gated("relu", torch.ones(1, 2), torch.ones(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [100, 129])
def test_linear_bits_do_not_depend_on_the_shape_of_the_rows(width: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = (torch.randn(*shape).to(dtype) for shape in ((77, width), (77,)))
    rows = torch.randn(48, 2 * width).to(dtype)[:, :width]
    strided = rows.view(2, 24, width).transpose(0, 1)
    for number in THREADS:
        with threads(number):
            expected = linear(rows, weight, bias if biased else None)
            for x in (rows.contiguous(), rows[None], rows.view(3, 16, width), rows.view(2, 3, 8, width)):
                assert torch.equal(linear(x, weight, bias if biased else None).reshape(48, 77), expected)
            back = linear(strided, weight, bias if biased else None).transpose(0, 1)
            assert torch.equal(back.reshape(48, 77), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotated"), [(32, 16), (50, 6), (80, 40), (128, 64)])
def test_rotary(head_dim: int, rotated: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    x = torch.randn(300, 3, head_dim).to(dtype)
    frequencies = 10000.0 ** (-torch.arange(rotated) / rotated)
    context = training_context((1, 300), None, None)
    (mine,), (exact,) = leaves(x), leaves(x.double())
    tables = rotary_tables(frequencies, 1.25, context)
    out, oracle = rotate(mine, tables), reference.rotate(exact, context.positions, frequencies, 1.25)
    upstream = torch.randn(out.shape).to(dtype)
    out.backward(upstream)
    oracle.backward(upstream.double())
    assert_near(out, oracle, 8)  # an angle of 300 radians in float32
    assert_near(mine.grad, exact.grad, 8)
    for first, count in ((0, 1), (298, 2), (7, 3)):
        layout = replace(training_context((1, count), None, None), positions=torch.arange(first, first + count))
        for number in THREADS:
            with threads(number):
                part = rotate(x[first : first + count], rotary_tables(frequencies, 1.25, layout))
            assert torch.equal(part, out[first : first + count])


@pytest.mark.parametrize(("size", "angles"), [(10, 5), (52, 13), (33, 1)])
def test_neighbours_turn_as_complex_numbers_and_lie_in_halves_then(size: int, angles: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(70, 3, size)
    tables = rotary_tables(100.0 ** -torch.arange(angles), 1.25, training_context((1, 70), None, None))
    pairs = torch.view_as_complex(x[..., : 2 * angles].double().reshape(70, 3, angles, 2))
    turned = pairs * torch.complex(tables.cos.double(), tables.sin.double())[:, None]
    expected = torch.cat([turned.real, turned.imag, x[..., 2 * angles :]], dim=-1)
    assert_near(rotate(heads_in_halves(x, angles), tables), expected, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize(("heads", "width", "size"), [(1, 33, 2), (3, 100, 10), (8, 128, 32)])
def test_what_is_rotated_behind_another_part_has_the_bits_of_rotate(
    heads: int, width: int, size: int, neighbours: bool, dtype: torch.dtype
) -> None:
    """What is rotated behind another part has the bits of `rotate`, for parts of wider rows and of fewer rows; with
    gradients it is made of other operations.
    """
    torch.manual_seed(width)
    x, wide = torch.randn(130, heads, width).to(dtype), torch.randn(130, heads, size + 5).to(dtype)
    y = wide[..., 3 : 3 + size]
    tables = rotary_tables(100.0 ** -torch.arange(size // 2), 1.25, training_context((1, 130), None, None))
    expected = torch.cat([x, rotate(in_halves(y) if neighbours else y, tables)], dim=-1)
    for number in THREADS:
        with threads(number):
            assert torch.equal(join_rotated(x, y, tables, neighbours), expected)
    few = replace(training_context((1, 3), None, None), positions=torch.arange(7, 10))
    of_few = rotary_tables(100.0 ** -torch.arange(size // 2), 1.25, few)
    assert torch.equal(join_rotated(x[7:10], y[7:10], of_few, neighbours), expected[7:10])
    found = join_rotated(*leaves(x, y.contiguous()), tables, neighbours)
    assert found.requires_grad
    assert torch.equal(found, expected)


def test_parts_that_can_not_be_joined_are_refused() -> None:
    tables = rotary_tables(torch.ones(2), 1.0, training_context((1, 3), None, None))
    x, y = torch.zeros(3, 2, 5), torch.zeros(3, 2, 4)
    with pytest.raises(ValueError, match=r"allowed: \[3, 1, W\] and \[3, 1, 4\]"):
        join_rotated(x, y[:, :1], tables, False)
    with pytest.raises(ValueError, match=r"\[3, 2, 4\]"):
        join_rotated(x, torch.zeros(3, 2, 6), tables, False)
    with pytest.raises(TypeError, match="two alike"):
        join_rotated(x, y.bfloat16(), tables, True)


@pytest.mark.parametrize("width", [100, 129, 200])
@pytest.mark.parametrize("outputs", [1, 4, 8, 15])
def test_narrow_linear_bits_do_not_depend_on_the_address_of_the_rows(width: int, outputs: int) -> None:
    x, weight = torch.randn(48, width), torch.randn(outputs, width)
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    expected = linear(x, weight)
    assert torch.equal(linear(shifted, weight), expected)
    assert torch.equal(linear(shifted[:16], weight), expected[:16])
    assert torch.equal(linear(x[1:33], weight), expected[1:33]), "rows that begin inside of a tensor"


@pytest.mark.parametrize("angles", [1, 10, 32])
def test_angles_that_a_rollout_looks_up_have_the_bits_of_those_computed(angles: int) -> None:
    """Angles that a rollout looks up have the bits of those computed: they are kept for as many positions as a call has
    needed, and computed beyond a number.
    """
    facts = RotaryFacts({"": 10000.0 ** (-torch.arange(angles) / angles)}, {"": 1.25})
    for length in (1, 3, 65, 64, 1088, KNOWN_POSITIONS):
        context = replace(training_context((1, length), None, None), pages=(torch.empty(0),))
        known = facts.known(context, "")
        assert known is not None
        for positions in (context.positions, context.positions[-1:], context.positions[length // 2 :]):
            looked_up = tuple(torch.from_numpy(part.take(positions.numpy(), axis=0)) for part in known)
            assert all(map(torch.equal, looked_up, angles_of(positions, facts.frequencies[""], 1.25)))
        assert facts.known(replace(context, pages=None), "") is None
    longer = replace(training_context((1, KNOWN_POSITIONS + 1), None, None), pages=(torch.empty(0),))
    assert facts.known(longer, "") is None
