"""The scalar functions of the CPU kernels are near the true values."""

import numpy as np
import pytest
import torch
from numba import njit

from samebit.kernels.cpu.base import numeric


@njit
def _all(x: np.ndarray, e: np.ndarray, t: np.ndarray, s: np.ndarray) -> None:
    for i in range(len(x)):
        e[i] = numeric.exp(x[i])
        t[i] = numeric.tanh(x[i])
        s[i] = numeric.sigmoid(x[i])


@njit
def _softplus(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(x)):
        out[i] = numeric.softplus(x[i])


@njit
def _erf(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(x)):
        out[i] = numeric.erf(x[i])


@njit
def _narrow(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(x)):
        out[i] = numeric.narrow(x[i], out[i])


def evaluate(x: np.ndarray) -> np.ndarray:
    """Return exp, tanh and sigmoid of x, ``[3, len(x)]``."""
    out = np.empty((3, len(x)), np.float32)
    _all(x, *out)
    return out


@pytest.fixture(scope="module")
def points() -> np.ndarray:
    rng = np.random.default_rng(0)
    spread = np.concatenate(
        [np.linspace(-86.9, 87.9, 400_000), rng.normal(size=200_000), np.array([0.0, 0.625, -0.625])]
    )
    return spread.astype(np.float32)


def test_accuracy(points: np.ndarray) -> None:
    exp, tanh, sigmoid = evaluate(points).astype(np.float64)
    x = points.astype(np.float64)
    assert np.max(np.abs(exp / np.exp(x) - 1)) < 1e-7
    assert np.max(np.abs(tanh - np.tanh(x))) < 2e-7
    assert np.max(np.abs(sigmoid * (1 + np.exp(-x)) - 1)) < 3e-7


def test_erf_is_accurate_and_1_far_from_0(points: np.ndarray) -> None:
    x = np.concatenate([points, points / 20, np.float32([0.927734375, 1e4, 1e18, 3e38, np.inf, -np.inf, np.nan, -0.0])])
    out = np.empty(len(x), np.float32)
    _erf(x, out)
    exact = torch.from_numpy(x.astype(np.float64)).erf().numpy()
    assert np.nanmax(np.abs(out - exact)) < 1.2e-7
    near = np.abs(x) < 0.9
    near &= x != 0
    assert np.max(np.abs(out[near] / exact[near] - 1)) < 1.5e-7
    assert np.array_equal(np.isnan(out), np.isnan(x))


def test_softplus_is_accurate_relative_to_itself(points: np.ndarray) -> None:
    out = np.empty(len(points), np.float32)
    _softplus(points, out)
    x = points.astype(np.float64)
    exact = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    assert np.max(np.abs(out / exact - 1)) < 4e-7
    some = np.ascontiguousarray(points[::997])
    alone = np.empty(1, np.float32)
    for i in range(0, len(some), 7):
        _softplus(some[i : i + 1], alone)
        assert alone[0] == out[::997][i]


def test_special_values() -> None:
    exp, tanh, sigmoid = evaluate(np.array([np.nan, -np.inf, np.inf, 0.0], np.float32))
    assert np.isnan([exp[0], tanh[0], sigmoid[0]]).all()
    assert exp[1] < 1.7e-38
    assert exp[3] == 1
    assert tanh[1:].tolist() == [-1, 1, 0]
    assert sigmoid[2:].tolist() == [1, 0.5]
    assert sigmoid[1] < 1e-37


def test_an_element_has_the_same_bits_anywhere_in_the_array(points: np.ndarray) -> None:
    some = points[::9973]
    whole = evaluate(some)
    for i in range(len(some)):
        assert np.array_equal(evaluate(some[i : i + 1]), whole[:, i : i + 1])


def test_narrow_rounds_as_torch_does(points: np.ndarray) -> None:
    halfway = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    x = np.concatenate([points, halfway[~np.isnan(halfway)], np.array([np.inf, -np.inf], np.float32)])
    out = np.empty(len(x), np.uint16)
    _narrow(x, out)
    assert torch.equal(torch.from_numpy(out), torch.from_numpy(x).bfloat16().view(torch.uint16))
    _narrow(np.array([np.nan], np.float32), out)
    assert torch.from_numpy(out[:1]).view(torch.bfloat16).isnan()
