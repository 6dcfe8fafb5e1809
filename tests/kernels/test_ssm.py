"""The convolution and the scan of Mamba2 are near the oracle, with the same bits by any route through the states,
gradients too.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.kernels.layout.forward_context import ForwardContext, training_context
from samebit.kernels.layout.states.mamba import SSMShape
from samebit.kernels.layout.states.memory import StateLayout
from samebit.kernels.ops.ssd import scan

from ..campaign import in_turns
from .helpers import DTYPES, THREADS, assert_near, leaves, memory, threads
from .mamba_layer import Case, Layer, layer_of, oracle, step_context, through_states
from .routes import ROUTES, left_padding, packed_context, padded

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LENGTHS = (1, 2, 3, 4, 63, 64, 65, 130)


CASES = (
    Case(SSMShape(4, 24, 2, 100, 4), 64),
    Case(SSMShape(18, 16, 2, 24, 4), 16),
    Case(SSMShape(3, 129, 1, 7, 2), 128, (0.01, 0.5)),
    Case(SSMShape(2, 64, 1, 128, 3), 256),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_route_through_the_states_gives_the_training_bits(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype, LENGTHS)
    expected = layer.run(packed_context(LENGTHS), case.options)
    assert_near(expected, oracle(case, layer, LENGTHS), 4)
    for number, route in enumerate(ROUTES):
        with threads(THREADS[number % len(THREADS)]):
            got = through_states(case, layer, LENGTHS, ROUTES[route], padding=number % 3)
        assert torch.equal(got, expected), route


def test_heads_that_forget_fast() -> None:
    """Heads that forget fast, by e**-1 to e**-90 a token, stay near the oracle: what is left of a token passes through
    all sizes that a float32 can have.
    """
    for case in CASES:
        layer = layer_of(case, torch.float32, LENGTHS)
        layer = replace(layer, decay_rate=-torch.logspace(0, 2, case.shape.heads), dt_bias=layer.dt_bias + 2)
        expected = layer.run(packed_context(LENGTHS), case.options)
        assert_near(expected, oracle(case, layer, LENGTHS), 4)
        for route in ROUTES.values():
            assert torch.equal(through_states(case, layer, LENGTHS, route), expected)


@pytest.mark.parametrize("place", [3, 16, 40])
def test_what_has_decayed_to_next_to_nothing_is_nothing(place: int) -> None:
    """What has decayed to next to nothing counts as nothing, in outputs and gradients: products of it would be
    subnormal, which some processors compute many times slower.
    """
    case, tokens = CASES[0], 80
    xbc = torch.randn(tokens, case.shape.conv_width)
    xbc[place:, : case.shape.inner] = 0.0
    xbc.requires_grad_()
    dt = torch.full((tokens, case.shape.heads), 1e-3).log()  # a time step of about as much
    dt[place] = 61.0
    rest = -torch.ones(case.shape.heads), torch.zeros(case.shape.heads), torch.ones(case.shape.heads)
    out = scan(xbc, dt, *rest, packed_context([tokens]), case.options)
    assert out[:place].any()
    assert not out[place:].any()
    (grad,) = torch.autograd.grad(out[place:].sum(), xbc)
    assert grad[place:].any()
    assert not grad[:place].any()


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4).map(tuple), seed=st.integers(0, 2**16))
def test_any_chunking_of_any_lengths(lengths: tuple[int, ...], seed: int) -> None:
    case = CASES[1]
    layer = layer_of(case, torch.float32, lengths)
    rng = np.random.default_rng(seed)
    got = through_states(
        case, layer, lengths, lambda sequence, done: int(rng.integers(1, 40)), padding=int(rng.integers(3))
    )
    assert torch.equal(got, layer.run(packed_context(lengths), case.options))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_depend_on_layout_or_threads(case: Case) -> None:
    layer = layer_of(case, torch.float32, LENGTHS)
    expected = layer.run(packed_context(LENGTHS), case.options)
    mask = left_padding(LENGTHS)
    real = mask.flatten().bool()
    spread = replace(layer, x=padded(layer.x, mask), dt=padded(layer.dt, mask))
    for number in THREADS:
        with threads(number):
            out = spread.run(training_context(mask.shape, mask, None), case.options)
            assert torch.equal(out[real], expected)
            assert not out[~real].any()
            with torch.no_grad():
                assert torch.equal(layer.run(packed_context(LENGTHS), case.options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints_and_copies_continue_with_the_same_bits(dtype: torch.dtype) -> None:
    case, length = CASES[1], 77
    layer = layer_of(case, dtype, (length,))
    expected = layer.run(packed_context((length,)), case.options)
    states = memory(case, dtype, slots=3, checkpoints=5)
    calls = [(0, 40), (40, 41), (41, 64), (64, 70)]  # the third ends on a boundary
    captures = {0: [(0, 16, 0), (0, 32, 1)], 2: [(0, 48, 2), (0, 64, 3)]}
    for number, (start, end) in enumerate(calls):
        context = step_context([end - start], [start], [1], states, captures=captures.get(number, ()))
        got = layer.rows(np.arange(start, end)).run(context, case.options)
        assert torch.equal(got, expected[start:end])
    states.take_checkpoints([(1, 4)])

    def go_on(slot: int, start: int) -> None:
        rows = np.arange(start, length)
        context = step_context([len(rows)], [start], [slot], states)
        assert torch.equal(layer.rows(rows).run(context, case.options), expected[start:])

    for checkpoint, start in enumerate((16, 32, 48, 64, 64)):
        states.restore_checkpoints([(checkpoint, 2)])
        go_on(2, start)
    states.copy_slots([(1, 0)])
    go_on(0, 70)
    go_on(1, 70)


@pytest.mark.soak
@pytest.mark.parametrize(("case", "dtype"), in_turns(CASES, DTYPES), ids=str)
def test_gradients_are_near_the_oracle(case: Case, dtype: torch.dtype) -> None:
    check_gradients(case, dtype, LENGTHS, 8)


@pytest.mark.parametrize("lengths", [(1,), (2,), (1, 1), (3,), (2, 1, 1)], ids=str)
def test_gradients_of_fewer_tokens_than_taps(lengths: tuple[int, ...]) -> None:
    """Gradients of fewer tokens than taps are near the oracle, though what cancels out is a larger part of such short
    sums.
    """
    check_gradients(CASES[0], torch.float32, lengths, 32)


def check_gradients(case: Case, dtype: torch.dtype, lengths: tuple[int, ...], factor: int) -> None:
    layer = layer_of(case, dtype, lengths)
    upstream = torch.randn(sum(lengths), case.shape.inner).to(dtype)
    exact = leaves(*(part.double() for part in layer.tensors))
    oracle(case, Layer(*exact), lengths).backward(upstream.double())
    mine = leaves(*layer.tensors)
    Layer(*mine).run(packed_context(lengths), case.options).backward(upstream)
    for found, wanted in zip(mine, exact, strict=True):
        assert_near(found.grad.to(dtype), wanted.grad, factor)  # bfloat16: its rounding in between


@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_rows_reach_no_gradient(case: Case) -> None:
    layer = layer_of(case, torch.float32, LENGTHS)
    mask = left_padding(LENGTHS)
    real = mask.flatten().bool()
    upstream = torch.randn(sum(LENGTHS), case.shape.inner)

    def gradients(context: ForwardContext, *rows: torch.Tensor) -> list[torch.Tensor]:
        inputs = leaves(*rows[:2], *layer.parameters)
        scan(*inputs, context, case.options).backward(rows[2])
        return [part.grad for part in inputs]

    rows = layer.x, layer.dt, upstream
    expected = gradients(packed_context(LENGTHS), *rows)
    found = gradients(training_context(mask.shape, mask, None), *(padded(part, mask) for part in rows))
    assert not any(part[~real].any() for part in found[:2]), "of padding rows"
    for one, other in zip([part[real] for part in found[:2]] + found[2:], expected, strict=True):
        assert_near(one, other)


def test_what_does_not_fit_is_named() -> None:
    case = CASES[0]
    layer = layer_of(case, torch.float32, LENGTHS)
    with pytest.raises(ValueError, match="rows, the context 3"):
        layer.run(packed_context((3,)), case.options)
    with pytest.raises(TypeError, match="then three float32"):
        replace(layer, dt=layer.dt.bfloat16()).run(packed_context(LENGTHS), case.options)
    states = memory(case, torch.bfloat16, 1)
    context = step_context([sum(LENGTHS)], [0], [0], states)
    with pytest.raises(TypeError, match="changed its dtype"):
        layer.run(context, case.options)
    with pytest.raises(ValueError, match="captures"):
        step_context([5], [0], [0], states, captures=[(0, 64, 0)])
    context = step_context([60], [0], [0], memory(case, torch.float32, 1, 1), captures=[(0, 5, 0)])
    with pytest.raises(ValueError, match="chunk"):
        layer.rows(np.arange(60)).run(context, case.options)


def test_bytes_are_those_of_the_tensors() -> None:
    layout = StateLayout(3, CASES[0].shape, 64)
    states = layout.allocate(2, torch.bfloat16, 5)
    for parts, count, size in (
        (states.layers, 2, layout.bytes_per_slot(torch.bfloat16)),
        (states.checkpoints, 5, layout.bytes_per_checkpoint(torch.bfloat16)),
    ):
        assert sum(t.nbytes for part in parts for t in vars(part).values()) == count * size
    assert [len(part.state) for part in states.layers] == [2, 2, 2]
    assert all(
        a < b
        for a, b in pairwise((0, layout.bytes_per_checkpoint(torch.bfloat16), layout.bytes_per_slot(torch.bfloat16)))
    )
