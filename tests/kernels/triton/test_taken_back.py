"""Tokens that recurrent layers compute in Triton and take back leave no trace: in no row and no state."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ..routes import packed_context
from ..taken_back import KINDS, Guessing
from .gpu import DEVICE

pytestmark = pytest.mark.usefixtures("on_gpu")

LENGTH = 70
BLOCK = 32
CASES = [
    ("convolution, three taps", torch.bfloat16),
    ("Mamba2, two taps", torch.float32),
    ("delta rule, three taps", torch.float32),
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_guesses_change_no_bit_of_rows_and_states(name: str, dtype: torch.dtype) -> None:
    kind = KINDS[name]
    context = packed_context((LENGTH,))
    context = replace(context, positions=context.positions.to(DEVICE))
    for seed in range(3):
        guessing = Guessing(kind, dtype, LENGTH, wrong=-3.0, block=BLOCK, device=DEVICE)
        trained = kind.run(guessing.layer.rows(np.arange(LENGTH), device=DEVICE), context, kind.case).cpu()
        assert torch.equal(guessing.run_all(np.random.default_rng(seed)), trained), seed
