"""Shared by the tests of the Triton kernels."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RELATIVE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Of the largest element; the interpreter truncates to bfloat16 where a GPU rounds."""


def assert_near(actual: torch.Tensor, oracle: torch.Tensor, factor: float = 1.0) -> None:
    """Within `factor` of the dtype's rounding, relative to the largest element of the oracle."""
    assert actual.shape == oracle.shape
    actual, oracle = actual.detach().cpu(), oracle.detach().cpu()
    assert actual.isfinite().all(), "NaN or infinity"
    error = (actual.double() - oracle.double()).abs().max()
    allowed = factor * RELATIVE[actual.dtype] * oracle.abs().max()
    assert error <= allowed, f"off by {error:.2e}, allowed {allowed:.2e}"


def poisoned(x: torch.Tensor, pad: int = 3) -> torch.Tensor:
    """``x`` on the device as a part of a tensor that is NaN around it, before its first and after its last row."""
    whole = x.new_full((len(x) + 2 * pad, *x.shape[1:]), torch.nan).to(DEVICE)
    whole[pad : pad + len(x)] = x.to(DEVICE)
    return whole[pad : pad + len(x)]


def leaf(x: torch.Tensor) -> torch.Tensor:
    return (poisoned(x) if x.dim() > 1 else x.to(DEVICE, copy=True)).requires_grad_()
