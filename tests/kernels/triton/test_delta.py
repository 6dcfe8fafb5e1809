"""The gates and the delta rule in Triton have the bits of training by several routes, and are near the oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from samebit.kernels.layout.states.delta import DeltaShape

from ...campaign import first_of
from ..delta_layer import Case, Layer, layer_of, oracle, through_states
from ..helpers import assert_near, memory
from ..mamba_layer import step_context
from ..routes import ROUTES, packed_context
from .gpu import DEVICE

pytestmark = pytest.mark.usefixtures("on_gpu")

LENGTHS = (2, 19)
BLOCK = 16


CASES = (
    (Case(DeltaShape(key_heads=2, value_heads=2, key_dim=24, value_dim=16, taps=4), 16), torch.bfloat16),
    (Case(DeltaShape(key_heads=1, value_heads=2, key_dim=20, value_dim=40, taps=2), 16, 2.0), torch.float32),
    (
        Case(DeltaShape(key_heads=2, value_heads=2, key_dim=20, value_dim=24, taps=3, by_channel=True), 16),
        torch.float32,
    ),
)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_every_route_through_the_states_gives_the_training_bits(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype, LENGTHS)
    context = packed_context(LENGTHS)
    context = replace(context, positions=context.positions.to(DEVICE))
    trained = layer.rows(np.arange(sum(LENGTHS)), device=DEVICE).run(context, case).cpu()
    assert_near(trained, oracle(case, layer, LENGTHS), 4)
    for route in ("whole", "chunks"):
        found = through_states(case, layer, LENGTHS, ROUTES[route], block_size=BLOCK, padding=1, device=DEVICE)
        assert torch.equal(found, trained), route


@pytest.mark.parametrize(("case", "dtype"), first_of(CASES[1:]), ids=str)
def test_a_checkpoint_continues_where_it_was_taken(case: Case, dtype: torch.dtype) -> None:
    lengths = (2, 35)
    layer = layer_of(case, dtype, lengths)
    first = sum(lengths[:-1])
    expected = oracle(case, layer, lengths)[first:]
    states = memory(case, dtype, slots=3, checkpoints=2, device=DEVICE)

    def run(start: int, end: int, slot: int, captures: list[tuple[int, int, int]]) -> torch.Tensor:
        context = step_context(
            [end - start], [start], [slot], states, block_size=BLOCK, captures=captures, padding=1, device=DEVICE
        )
        return layer.rows(np.arange(first + start, first + end), 1, DEVICE).run(context, case)[:-1]

    run(0, 33, 1, [(0, 16, 0)])
    states.take_checkpoints([(1, 1)])  # as of token 32, the last block boundary
    states.restore_checkpoints([(0, 2)])
    captured = run(16, 35, 2, [])
    assert_near(captured, expected[16:], 4)
    states.restore_checkpoints([(1, 2)])
    assert torch.equal(run(32, 35, 2, []), captured[16:])
    assert torch.equal(run(33, 35, 1, []), captured[17:])


@pytest.mark.parametrize(("case", "dtype"), CASES[1:], ids=str)
def test_gradients_are_near_the_oracle(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype, LENGTHS)
    mine = Layer(**{name: part.to(DEVICE, copy=True).requires_grad_() for name, part in vars(layer).items()})
    exact = Layer(**{name: part.double().requires_grad_() for name, part in vars(layer).items()})
    context = packed_context(LENGTHS)
    context = replace(context, positions=context.positions.to(DEVICE))
    out, expected = mine.run(context, case), oracle(case, exact, LENGTHS)
    upstream = torch.randn(out.shape).to(dtype)
    out.backward(upstream.to(DEVICE))
    expected.backward(upstream.double())
    for name, part in vars(mine).items():
        gradient = vars(exact)[name].grad
        assert part.grad is not None, name
        assert_near(part.grad, gradient, 16)
