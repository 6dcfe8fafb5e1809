"""The convolution without silu is near the oracle, with the same bits by any route through its windows, gradients too.

That with silu is tested with the layers that have it (`test_ssm`, `test_delta`).
"""

import numpy as np
import pytest
import torch

from samebit.kernels.layout.states.conv import ConvShape
from samebit.kernels.layout.states.memory import StateLayout
from samebit.kernels.ops.conv import causal_conv

from .conv_layer import Case, Layer, layer_of, oracle, through_windows
from .helpers import DTYPES, THREADS, assert_near, leaves, memory, threads
from .mamba_layer import step_context
from .routes import ROUTES, packed_context

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LENGTHS = (1, 2, 3, 4, 63, 64, 65, 130)
CASES = (
    Case(ConvShape(37, 3), biased=False),
    Case(ConvShape(200, 4), biased=True),
    Case(ConvShape(16, 2), biased=True),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_route_through_the_windows_gives_the_training_bits(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype, LENGTHS)
    expected = layer.run(packed_context(LENGTHS))
    assert_near(expected, oracle(layer, LENGTHS))
    for number, route in enumerate(ROUTES):
        with threads(THREADS[number % len(THREADS)]):
            got = through_windows(case, layer, LENGTHS, ROUTES[route], padding=number % 3)
        assert torch.equal(got, expected), route


def test_silu_is_of_the_sum_before_it_is_rounded() -> None:
    layer = layer_of(CASES[1], torch.float32, LENGTHS)
    context = packed_context(LENGTHS)
    activated = causal_conv(layer.x, layer.weight, layer.bias, context, 0)
    assert_near(activated, torch.nn.functional.silu(layer.run(context).double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints_and_copies_continue_with_the_same_bits(dtype: torch.dtype) -> None:
    case, length = CASES[0], 77
    layer = layer_of(case, dtype, (length,))
    expected = layer.run(packed_context((length,)))
    states = memory(case, dtype, slots=3, checkpoints=3)
    captures = {0: [(0, 16, 0)], 1: [(0, 64, 1)]}
    for number, (start, end) in enumerate([(0, 40), (40, 64), (64, 70)]):
        context = step_context([end - start], [start], [1], states, captures=captures.get(number, ()))
        assert torch.equal(layer.rows(np.arange(start, end)).run(context), expected[start:end])
    states.take_checkpoints([(1, 2)])

    def go_on(slot: int, start: int) -> None:
        context = step_context([length - start], [start], [slot], states)
        assert torch.equal(layer.rows(np.arange(start, length)).run(context), expected[start:])

    for checkpoint, start in enumerate((16, 64, 64)):
        states.restore_checkpoints([(checkpoint, 2)])
        go_on(2, start)
    states.copy_slots([(1, 0)])
    go_on(0, 70)
    go_on(1, 70)


@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (2, 1)], ids=str)
@pytest.mark.parametrize(("case", "dtype"), list(zip(CASES, (*DTYPES, torch.float32), strict=True)), ids=str)
def test_gradients_are_near_the_oracle(case: Case, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    layer = layer_of(case, dtype, lengths)
    given = [part for part in (layer.x, layer.weight, layer.bias) if part is not None]
    upstream = torch.randn_like(layer.x)
    exact, mine = leaves(*(part.double() for part in given)), leaves(*given)
    oracle(_layer(*exact), lengths).backward(upstream.double())
    _layer(*mine).run(packed_context(lengths)).backward(upstream)
    for found, wanted in zip(mine, exact, strict=True):
        assert_near(found.grad, wanted.grad, 2)


def _layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Layer:
    return Layer(x, weight, bias)


def test_a_window_is_all_that_is_kept() -> None:
    layout = StateLayout(3, ConvShape(100, 4), 64)
    assert layout.bytes_per_checkpoint(torch.bfloat16) == 3 * 2 * 3 * 100
    assert layout.bytes_per_slot(torch.bfloat16) == 2 * layout.bytes_per_checkpoint(torch.bfloat16)
    states = layout.allocate(2, torch.bfloat16, 5)
    found = sum(tensor.numel() for layer in states.layers for tensor in vars(layer).values())
    assert found == 2 * 3 * 2 * 3 * 100
