"""Run the Triton kernels on a GPU where there is one, else in Triton's interpreter on the CPU.

The interpreter shows accuracy, masks and poison. It shows nothing about the bits of a
GPU. Equal bits in it mean equal tiles and an equal order of sums: in these tests its matrix
product adds in the order of the depth, as a GPU's does. (NumPy's, which it would take, gives a
row other bits in another place of the tile on many processors.)

It is spared work, see spared_work.py. And where a layer's first call compares one launch with a launch each, few rows
are compared, except in tests of these comparisons (`all_compared`).
"""

import warnings
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from samebit.kernels.layout import device
from samebit.kernels.triton import heads, norm
from samebit.kernels.triton.tiles import proved_equal

from . import spared_work
from .gpu import DEVICE

if not torch.cuda.is_available() and not knobs.runtime.interpret:
    pytest.skip("no GPU, and Triton was imported before its interpreter was asked for", allow_module_level=True)


@numba.njit("void(float32[:, :], float32[:, :], float32[:, ::1])", cache=True)
def _add_product(a: Any, b: Any, acc: Any) -> None:
    """Add one chain over the depth for each element: vectors run along a row, so they change no order."""
    for row in range(acc.shape[0]):
        for depth in range(a.shape[1]):
            for output in range(acc.shape[1]):
                acc[row, output] += a[row, depth] * b[depth, output]


def _dot(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, acc: TensorHandle, *precision: Any) -> Any:
    product = np.array(acc.data, np.float32, order="C")
    _add_product(a.data, b.data, product)
    return TensorHandle(product, acc.dtype.scalar)


@pytest.fixture(scope="session", autouse=True)
def _sums_in_order() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", _dot)
        yield


@pytest.fixture(scope="session", autouse=True)
def _spared_work() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        spared_work.replace_once_a_launch(patch)
        spared_work.call_at_once(patch)
        spared_work.look_at_no_overflow(patch)
        spared_work.know_dtypes(patch)
        if knobs.runtime.interpret:
            spared_work.describe_shapes_once(patch)
            spared_work.unwrap_what_is_wrapped(patch)
            spared_work.see_equals_at_once(patch)
            spared_work.round_at_once(patch)
            spared_work.broadcast_as_numpy_computes(patch)
        yield


_ROWS: list[tuple[Any, str, Any]] = [
    (proved_equal, "_ROWS", 9), (proved_equal, "_COUNTS", (1,)), (heads, "_TOKENS", 3), (norm, "_COMPARED", 3),
]  # fmt: skip
"""Holds where it stands how many rows are compared, and how many are enough to see that both ways run and agree."""

_ALL_ROWS = [(holder, name, getattr(holder, name)) for holder, name, _ in _ROWS]


@pytest.fixture(scope="session", autouse=True)
def _few_compared() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for place in _ROWS if DEVICE == "cpu" else ():
            patch.setattr(*place)
        yield


@pytest.fixture
def all_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare as many rows as a GPU does."""
    for place in _ALL_ROWS:
        monkeypatch.setattr(*place)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's kernels compute each tensor, wherever it lies."""
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Let torch fill what `torch.empty` returns with NaN. (On CUDA it complains about some operations.)"""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        warnings.filterwarnings("ignore", message="overflow encountered")  # of activations far from 0
        yield
    torch.use_deterministic_algorithms(False)
