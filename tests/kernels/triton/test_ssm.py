"""The convolution and the scan in Triton are near the oracle by several routes through the states, gradients too."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from samebit.kernels.layout.states.mamba import SSMShape

from ..helpers import assert_near, memory
from ..mamba_layer import Case, Layer, layer_of, oracle, step_context, through_states
from ..routes import ROUTES, packed_context
from .gpu import DEVICE, few

pytestmark = pytest.mark.usefixtures("on_gpu")

LENGTHS = (1, 3, 34)
BLOCK = 32


CASES = (
    (Case(SSMShape(heads=4, head_dim=24, groups=2, state_size=100, taps=4), 16), torch.bfloat16),
    (Case(SSMShape(heads=5, head_dim=16, groups=1, state_size=24, taps=4), 16), torch.float32),
    (Case(SSMShape(heads=2, head_dim=33, groups=1, state_size=7, taps=2), 16, (0.01, 0.5)), torch.float32),
)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_every_route_through_the_states_gives_the_training_bits(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype, LENGTHS)
    expected = oracle(case, layer, LENGTHS)
    context = packed_context(LENGTHS)
    context = replace(context, positions=context.positions.to(DEVICE))
    trained = layer.rows(np.arange(sum(LENGTHS)), device=DEVICE).run(context, case.options).cpu()
    assert_near(trained, expected, 4)
    for route in ("whole", "chunks"):
        found = through_states(case, layer, LENGTHS, ROUTES[route], block_size=BLOCK, padding=1, device=DEVICE)
        assert torch.equal(found, trained), route


def test_a_checkpoint_continues_where_it_was_taken() -> None:
    case, dtype = CASES[1]
    lengths = (3, 49)
    layer = layer_of(case, dtype, lengths)
    first = sum(lengths[:-1])
    expected = oracle(case, layer, lengths)[first:]
    states = memory(case, dtype, slots=3, checkpoints=2, device=DEVICE)

    def run(start: int, end: int, slot: int, captures: list[tuple[int, int, int]]) -> torch.Tensor:
        context = step_context(
            [end - start], [start], [slot], states, block_size=BLOCK, captures=captures, padding=1, device=DEVICE
        )
        return layer.rows(np.arange(first + start, first + end), 1, DEVICE).run(context, case.options)[:-1]

    run(0, 40, 1, [(0, 16, 0)])
    states.take_checkpoints([(1, 1)])  # as of token 32, the last block boundary
    states.restore_checkpoints([(0, 2)])
    assert_near(run(16, 49, 2, []), expected[16:], 4)
    states.restore_checkpoints([(1, 2)])
    assert_near(run(32, 49, 2, []), expected[32:], 4)
    assert_near(run(40, 49, 1, []), expected[40:], 4)


@pytest.mark.parametrize(("case", "dtype"), few(CASES), ids=str)
def test_gradients_are_near_the_oracle(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype, LENGTHS)
    mine = Layer(**{name: part.to(DEVICE, copy=True).requires_grad_() for name, part in vars(layer).items()})
    exact = Layer(**{name: part.double().requires_grad_() for name, part in vars(layer).items()})
    context = packed_context(LENGTHS)
    context = replace(context, positions=context.positions.to(DEVICE))
    out, expected = mine.run(context, case.options), oracle(case, exact, LENGTHS)
    assert_near(out, expected, 4)
    upstream = torch.randn(out.shape).to(dtype)
    out.backward(upstream.to(DEVICE))
    expected.backward(upstream.double())
    for name, part in vars(mine).items():
        gradient = vars(exact)[name].grad
        assert part.grad is not None, name
        assert_near(part.grad.to(dtype), gradient, 16 if dtype == torch.float32 else 8)
