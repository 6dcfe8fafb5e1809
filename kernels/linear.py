"""Row-invariant linear layer.

Contract: ``linear(x, w, b)[i]`` depends on ``x[i]`` alone, not on how many rows are multiplied with it nor
on the number of threads. torch's GEMMs keep that promise only while every thread has at least four rows, so
the rows are padded with zeros to a multiple of `ROW_TILE`. Measured, not proved: ``samebit check`` repeats
the measurement with the shapes of your model on your machine. Gradients are torch's own.
"""

import torch
from torch.nn import functional as F

ROW_TILE = 16
"""Rows of a GEMM are padded to a multiple of this."""

FEWEST_OUTPUTS = 16
"""With fewer outputs a row's bits depend on its address, and so on its place among the rows: zeros are added."""


def padded_rows(rows: int, tile: int = ROW_TILE) -> int:
    """``rows`` rounded up to a whole number of row tiles."""
    return -(-rows // tile) * tile


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` with bits that do not depend on the other rows.

    Args:
        x: ``[..., K]``, the dtype of ``weight``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.

    Returns:
        ``[..., N]`` in the same dtype.
    """
    if weight.shape[0] < FEWEST_OUTPUTS:
        return _narrow(x, weight, bias)
    missing = -(x.numel() // x.shape[-1]) % ROW_TILE
    if missing == 0 and x.dim() <= 3:
        return F.linear(x.contiguous(), weight, bias)  # torch folds these into the same matrix product
    rows = x.reshape(-1, x.shape[-1])
    padded = F.linear(F.pad(rows, (0, 0, 0, missing)), weight, bias)
    return padded[: rows.shape[0]].view(*x.shape[:-1], weight.shape[0])


def _narrow(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    outputs = weight.shape[0]
    missing = FEWEST_OUTPUTS - outputs
    wide_bias = None if bias is None else F.pad(bias, (0, missing))
    return linear(x, F.pad(weight, (0, 0, 0, missing)), wide_bias)[..., :outputs].contiguous()
