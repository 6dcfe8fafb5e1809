"""Tokens that recurrent layers compute behind a sequence's end and take back leave no trace: in no row and no state."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from samebit.kernels.layout.states.delta import DeltaShape
from samebit.kernels.layout.states.memory import StateLayout

from .helpers import DTYPES, memory
from .mamba_layer import step_context
from .routes import packed_context
from .taken_back import KINDS, Guessing

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LENGTH = 163
BLOCK = 32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_guesses_change_no_bit_of_rows_and_states(name: str, dtype: torch.dtype) -> None:
    """Wrong guesses hold NaN, which whatever reads them would carry on."""
    kind = KINDS[name]
    for seed in range(5):
        guessing = Guessing(kind, dtype, LENGTH, wrong=torch.nan, block=BLOCK, device="cpu")
        expected = kind.run(guessing.layer, packed_context((LENGTH,)), kind.case)
        assert torch.equal(guessing.run_all(np.random.default_rng(seed)), expected), seed


def test_windows_grow_with_the_guesses_and_checkpoints_do_not() -> None:
    for kind in KINDS.values():
        shape, least = kind.case.shape, kind.case.shape.taps - 1
        plain = StateLayout(2, shape, kind.case.chunk)
        larger = replace(plain, guesses=kind.guesses)
        assert plain.window_rows == least
        assert least + kind.guesses <= larger.window_rows < 2 * (least + kind.guesses)
        assert kind.case.chunk % larger.window_rows == 0
        extra = 2 * (larger.window_rows - least) * shape.conv_width * 4
        assert larger.bytes_per_slot(torch.float32) == plain.bytes_per_slot(torch.float32) + extra
        assert larger.bytes_per_checkpoint(torch.float32) == plain.bytes_per_checkpoint(torch.float32)
        states = larger.allocate(3, torch.float32, 1)
        assert sum(t.nbytes for one in states.layers for t in vars(one).values()) == 3 * larger.bytes_per_slot(
            torch.float32
        )


def test_more_than_can_be_taken_back_is_refused() -> None:
    by_channel = DeltaShape(2, 2, 20, 33, taps=3, by_channel=True)
    for shape, chunk, most in (
        (by_channel, 64, 0),
        (replace(by_channel, by_channel=False), 16, 14),
        (replace(by_channel, by_channel=False), 64, 15),
    ):
        assert StateLayout(1, shape, chunk).most_guesses == most
        with pytest.raises(ValueError, match=rf"{most + 1} tokens can not be taken back; allowed: 0 to {most}"):
            StateLayout(1, shape, chunk, guesses=most + 1)


def test_windows_that_a_block_does_not_hold_are_refused() -> None:
    kind = KINDS["convolution, two taps"]
    layer = kind.make(kind.case, torch.float32, (40,))
    states = memory(replace(kind.case, chunk=64), torch.float32, 1, 1, guesses=15)  # 16 rows
    kind.run(layer, step_context([40], [0], [0], states, block_size=16, captures=[(0, 32, 0)]), kind.case)
    for block, captured in ((8, 32), (16, 8)):
        context = step_context([40], [0], [0], states, block_size=block, captures=[(0, captured, 0)])
        with pytest.raises(ValueError, match=f"16 rows, blocks of {block} tokens.*allowed: rows that divide a block"):
            kind.run(layer, context, kind.case)
