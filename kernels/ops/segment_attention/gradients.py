"""Compute the gradients of attention within segments, by torch's products on every device.

Segments of one length are computed together. Equal calls give equal bits; other calls agree to rounding.

S segments of N rows, T rows, H heads, D head size.
"""

import numpy as np
import torch

from samebit.kernels.layout.vision.segments import Segments

_SCORES = 1 << 20
"""The most scores that are worked out at once, or those of one row: three arrays of 4 MB."""


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, segments: Segments, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v`` ``[T, H, D]``, each in its dtype."""
    of_q, of_k, of_v = (torch.empty_like(part, memory_format=torch.contiguous_format) for part in (q, k, v))
    for length in np.unique(segments.lengths).tolist():
        firsts = segments.firsts[segments.lengths == length]
        rows = torch.from_numpy(firsts[:, None] + np.arange(length)).to(q.device)
        queries, keys, values, upstream = (_by_head(part[rows]) for part in (q, k, v, grad))
        found = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        few = max(1, _SCORES // length**2)
        for part in zip(*(whole.split(few) for whole in (queries, keys, values, upstream, *found)), strict=True):
            _add_gradients(scale, *part)
        for whole, heads in zip((of_q, of_k, of_v), found, strict=True):
            whole[rows] = heads.unflatten(0, (len(rows), -1)).transpose(1, 2).to(whole.dtype)
    return of_q, of_k, of_v


def _by_head(part: torch.Tensor) -> torch.Tensor:
    """Return ``[S, N, H, D]`` as float32 ``[S * H, N, D]``."""
    return part.float().transpose(1, 2).flatten(0, 1)


def _add_gradients(
    scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, of_q: torch.Tensor,
    of_k: torch.Tensor, of_v: torch.Tensor,
) -> None:  # fmt: skip
    """Write the gradients of queries, and add those of keys and values, of a few heads ``[M, N, D]``.

    Rows of a long segment are computed some at a time, in order.
    """
    some = max(1, _SCORES // (len(q) * q.shape[1]))
    for few, upstream, to_few in zip(*(part.split(some, dim=1) for part in (q, grad, of_q)), strict=True):
        weights = torch.softmax(torch.bmm(few, k.mT).mul_(scale), dim=-1)
        of_v.baddbmm_(weights.mT, upstream)
        of_scores = torch.bmm(upstream, v.mT)
        total = (of_scores * weights).sum(-1, keepdim=True)
        of_scores.sub_(total).mul_(weights).mul_(scale)
        to_few.copy_(torch.bmm(of_scores, k))
        of_k.baddbmm_(of_scores.mT, few)
