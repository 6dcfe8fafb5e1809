"""Give the tests of kernels thread counts, memory of states, and distances from the float64 oracle."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numba
import numpy as np
import torch

from samebit.kernels.layout.options import Filters
from samebit.kernels.layout.states.memory import StateLayout, StateMemory, StateShape

DTYPES = (torch.float32, torch.bfloat16)
THREADS = range(1, min(2, numba.config.NUMBA_NUM_THREADS) + 1)
RELATIVE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Holds the error that is allowed relative to the largest element: float32 sums in another order, the others have one
rounding (Triton's interpreter truncates).
"""


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(count)
    numba.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        numba.set_num_threads(before[1])


def filters(rows: Sequence[int], temperature: float, top_k: int, top_p: float, min_p: float) -> Filters:
    """Return the same filters for all these rows."""
    each = np.ones(len(rows))
    return Filters(np.array(rows), temperature * each, top_k * each.astype(np.int64), top_p * each, min_p * each)


def rounded_up(vocab: int, peak: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows of two likely tokens, `peak` and the 16th behind it, with temperatures and numbers to draw by: the
    two weigh 1 + 6.5e-8, which is 1 + 1.19e-7 as a float32, and all numbers but the first lie beyond the weights.
    """
    row = torch.full((vocab,), -100.0)
    row[peak], row[peak + 16] = 0.0, -16.55
    uniform = 1 - torch.tensor([0.1, 2.0**-25, 2.0**-26, 2.0**-40, 2.0**-53], dtype=torch.float64)
    return row.expand(len(uniform), -1).contiguous(), torch.ones(len(uniform)), uniform


class StatesCase(Protocol):
    """Has the sizes of a recurrent layer, and its chunk."""

    @property
    def shape(self) -> StateShape:
        """Return its sizes."""

    @property
    def chunk(self) -> int:
        """Return the chunk of its grid."""


def memory(
    case: StatesCase, dtype: torch.dtype, slots: int, checkpoints: int = 0, device: str = "cpu", guesses: int = 0
) -> StateMemory:
    """Allocate state memory that holds NaN everywhere."""
    states = StateLayout(1, case.shape, case.chunk, guesses).allocate(slots, dtype, checkpoints, device)
    for part in (*states.layers, *states.checkpoints):
        for tensor in vars(part).values():
            tensor.fill_(torch.nan)
    return states


def assert_near(actual: torch.Tensor, oracle: torch.Tensor, factor: float = 1.0) -> None:
    """Check that all is within `factor` of the dtype's rounding, relative to the largest element of the oracle."""
    assert actual.shape == oracle.shape
    actual, oracle = actual.detach().cpu(), oracle.detach().cpu()
    assert actual.isfinite().all(), "NaN or infinity"
    error = (actual.double() - oracle.double()).abs().max()
    allowed = factor * RELATIVE[actual.dtype] * oracle.abs().max()
    assert error <= allowed, f"off by {error:.2e}, allowed {allowed:.2e}"


def leaves(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.clone().requires_grad_() for tensor in tensors)


LOW_TEMPERATURES = (1.0, 0.3, 0.1, 0.01)


def far_ahead(temperature: float) -> torch.Tensor:
    """Draw logits of which two are far ahead of all others, and near each other at this temperature: 7 rows."""
    torch.manual_seed(0)
    logits = torch.randn(7, 1009) * 4
    logits[:, 0] = torch.linspace(25, 30, 7)
    logits[:, 1] = logits[:, 0] - temperature
    logits[:, 2] = -1e9
    return logits


def assert_gradient_of_rows(found: torch.Tensor, oracle: torch.Tensor, logprobs: torch.Tensor) -> None:
    """Check that the gradient of each row is near the oracle's and adds up to what the oracle's does, near 0, and that
    it is 0, and not subnormal, of tokens of these log-probabilities that are below -60."""
    assert_near(found, oracle, 8)  # logits and peaks that are divided by a low temperature are rounded
    off = (found.cpu().double() - oracle).sum(1).abs().max()
    assert off <= 1e-6 * oracle.abs().max(), f"all tokens of a row are off by a common factor: {off:.1e}"
    assert not found.cpu()[logprobs < -60.1].any()
    assert found[found != 0].abs().min() >= torch.finfo(torch.float32).tiny
