"""The Triton kernels: on a GPU where there is one, else in Triton's interpreter on the CPU.

The interpreter shows accuracy, masks and poison. It shows nothing about the bits of a
GPU: its matrix product is NumPy's. Equal bits in it mean equal tiles and an equal order of sums.
"""

import warnings
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

if not torch.cuda.is_available() and not knobs.runtime.interpret:
    pytest.skip("no GPU, and Triton was imported before its interpreter was asked for", allow_module_level=True)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """In this mode torch fills what `torch.empty` returns with NaN. (On CUDA it complains about some operations.)"""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        yield
    torch.use_deterministic_algorithms(False)
