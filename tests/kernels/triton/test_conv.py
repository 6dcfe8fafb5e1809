"""The convolution without silu is near the oracle in Triton, with the training bits by routes through windows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from samebit.kernels.layout.states.conv import ConvShape

from ..conv_layer import Case, layer_of, oracle, through_windows
from ..helpers import assert_near, memory
from ..mamba_layer import step_context
from ..routes import ROUTES, packed_context
from .gpu import DEVICE

pytestmark = pytest.mark.usefixtures("on_gpu")

LENGTHS = (1, 3, 34)
BLOCK = 32
CASES = (
    (Case(ConvShape(37, 3), biased=False), torch.bfloat16),
    (Case(ConvShape(200, 4), biased=True), torch.float32),
)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_every_route_through_the_windows_gives_the_training_bits(case: Case, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype, LENGTHS)
    context = packed_context(LENGTHS)
    context = replace(context, positions=context.positions.to(DEVICE))
    trained = layer.rows(np.arange(sum(LENGTHS)), device=DEVICE).run(context).cpu()
    assert_near(trained, oracle(layer, LENGTHS))
    for route in ("whole", "chunks"):
        found = through_windows(case, layer, LENGTHS, ROUTES[route], block_size=BLOCK, padding=1, device=DEVICE)
        assert torch.equal(found, trained), route


def test_a_checkpoint_continues_where_it_was_taken() -> None:
    case, dtype = CASES[1]
    layer = layer_of(case, dtype, (49,))
    expected = oracle(layer, (49,))
    states = memory(case, dtype, slots=4, checkpoints=2, device=DEVICE)

    def run(start: int, end: int, slot: int, captures: list[tuple[int, int, int]]) -> torch.Tensor:
        context = step_context(
            [end - start], [start], [slot], states, block_size=BLOCK, captures=captures, padding=1, device=DEVICE
        )
        return layer.rows(np.arange(start, end), 1, DEVICE).run(context)[:-1]

    run(0, 40, 1, [(0, 16, 0)])
    states.take_checkpoints([(1, 1)])  # as of token 32, the last block boundary
    states.copy_slots([(1, 3)])
    states.restore_checkpoints([(0, 2)])
    assert_near(run(16, 49, 2, []), expected[16:])
    states.restore_checkpoints([(1, 2)])
    assert_near(run(32, 49, 2, []), expected[32:])
    assert_near(run(40, 49, 3, []), expected[40:])
