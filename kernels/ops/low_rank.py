"""Add a product of low rank to the result of a linear layer, row by row, with autograd.

Contract: ``add_low_rank(base, x, down, up, scale)[i]`` depends on row i of ``base`` and ``x`` alone. The two products
are `linear`; their result is scaled, added to ``base`` in float32, each an IEEE operation of its own (a fused one would
round other elements otherwise, with the number of them), and rounded once.
"""

from collections.abc import Sequence

import torch

from samebit.kernels.layout.adapters import Delta
from samebit.kernels.ops.linear import linears


def add_low_rank(bases: Sequence[torch.Tensor], x: torch.Tensor, deltas: Sequence[Delta]) -> list[torch.Tensor]:
    """Compute ``base + scale * up(down(x))`` for layers of one input.

    Args:
        bases: up to three, each ``[..., N]``, what the layer gave of ``x``.
        x: ``[..., K]``, the dtype of ``bases``.
        deltas: of each layer, bound modules ``[r, K]`` and ``[N, r]`` of one dtype, float32 or that of ``x``.

    Returns:
        ``[..., N]`` for each, the dtype of ``bases``.

    Raises:
        ValueError: shapes that do not match.
        TypeError: matrices of two dtypes.
    """
    widened = x.to(deltas[0].down.weight.dtype)
    inner = linears(widened, [delta.down for delta in deltas])
    return [
        (base + linears(low, (delta.up,))[0].to(torch.float32) * delta.scale).to(base.dtype)
        for base, low, delta in zip(bases, inner, deltas, strict=True)
    ]
