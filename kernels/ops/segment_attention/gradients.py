"""Compute the gradients of attention within segments, by torch's products on every device.

Segments of one length are computed together. Equal calls give equal bits; other calls agree to rounding.

S segments of N rows, T rows, H heads, D head size.
"""

from collections.abc import Iterator

import numpy as np
import torch

from samebit.kernels.layout.vision.segments import Segments

_SCORES = 1 << 22
"""The most scores that are worked out at once (or those of one row of all heads): three arrays of 16 MB."""


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, segments: Segments, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v`` ``[T, H, D]``, each in its dtype."""
    of_q, of_k, of_v = (torch.empty_like(part, memory_format=torch.contiguous_format) for part in (q, k, v))
    for rows in _alike(segments, q.shape[1]):
        chosen = rows.to(q.device)
        queries, keys, values, upstream = (_by_head(part[chosen]) for part in (q, k, v, grad))
        found = _of_alike(queries, keys, values, upstream, scale)
        for whole, part in zip((of_q, of_k, of_v), found, strict=True):
            whole[chosen] = part.unflatten(0, (len(rows), -1)).transpose(1, 2).to(whole.dtype)
    return of_q, of_k, of_v


def _alike(segments: Segments, heads: int) -> Iterator[torch.Tensor]:
    """Return the rows ``[S, N]`` of some segments of one length at a time."""
    for length in np.unique(segments.lengths).tolist():
        firsts = segments.firsts[segments.lengths == length]
        together = max(1, _SCORES // (heads * length * length))
        for begin in range(0, len(firsts), together):
            yield torch.from_numpy(firsts[begin : begin + together, None] + np.arange(length))


def _by_head(part: torch.Tensor) -> torch.Tensor:
    """Return ``[S, N, H, D]`` as float32 ``[S * H, N, D]``."""
    return part.float().transpose(1, 2).flatten(0, 1)


def _of_alike(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``[S * H, N, D]`` each; rows of a long segment are added up some at a time, in order."""
    of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    some = max(1, _SCORES // (len(q) * q.shape[1]))
    for few, upstream, to_few in zip(*(part.split(some, dim=1) for part in (q, grad, of_q)), strict=True):
        weights = torch.softmax(torch.bmm(few, k.mT).mul_(scale), dim=-1)
        of_v.baddbmm_(weights.mT, upstream)
        of_scores = torch.bmm(upstream, v.mT)
        total = (of_scores * weights).sum(-1, keepdim=True)
        of_scores.sub_(total).mul_(weights).mul_(scale)
        to_few.copy_(torch.bmm(of_scores, k))
        of_k.baddbmm_(of_scores.mT, few)
    return of_q, of_k, of_v
