"""Shared by the tests of the Triton kernels."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def poisoned(x: torch.Tensor, pad: int = 3) -> torch.Tensor:
    """``x`` on the device as a part of a tensor that is NaN around it, before its first and after its last row."""
    whole = x.new_full((len(x) + 2 * pad, *x.shape[1:]), torch.nan).to(DEVICE)
    whole[pad : pad + len(x)] = x.to(DEVICE)
    return whole[pad : pad + len(x)]


def leaf(x: torch.Tensor) -> torch.Tensor:
    return (poisoned(x) if x.dim() > 1 else x.to(DEVICE, copy=True)).requires_grad_()
