"""Share what the tests of the Triton kernels need."""

from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import torch

from ...campaign import CAMPAIGN, first_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

EVERY = CAMPAIGN or DEVICE == "cuda"
"""Says whether all cases run at all sizes: those of a GPU take no time."""


def few(cases: Sequence[Any], count: int = 1) -> list[Any]:
    """Return the cases of a test; in the interpreter those after the first ``count`` are for `make soak`."""
    return list(cases) if DEVICE == "cuda" else first_of(cases, count)


def all_in_turns(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Return each with each; in the interpreter each of the first, which are the most, with the others in turns."""
    return list(product(first, second, third) if EVERY else zip(first, cycle(second), cycle(third), strict=False))


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` on the device as a part of a tensor that is NaN before its first and after its last row."""
    whole = x.new_full((len(x) + 6, *x.shape[1:]), torch.nan).to(DEVICE)
    whole[3:-3] = x.to(DEVICE)
    return whole[3:-3]


def leaf(x: torch.Tensor) -> torch.Tensor:
    return (poisoned(x) if x.dim() > 1 else x.to(DEVICE, copy=True)).requires_grad_()
