"""Add a product of low rank to the result of a linear layer, row by row, with autograd.

Contract: ``add_low_rank(bases, x, deltas)[l][i]`` depends on row i of ``bases[l]`` and ``x`` alone. The two products
are `linear`; their result is scaled and added to ``base`` in float32, each an IEEE operation of its own (a fused one
would round other elements otherwise, with the number of them), and rounded once.
"""

from collections.abc import Sequence

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.lora.adapters import Delta, LowRank
from samebit.kernels.layout.shape_checks import check_host
from samebit.kernels.ops.dispatch import operations_for
from samebit.kernels.ops.linear import is_plain


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
    if not torch.is_grad_enabled() and all(is_plain(delta.down) and is_plain(delta.up) for delta in deltas):
        terms = [LowRank(delta.down.weight, delta.up.weight, delta.scale) for delta in deltas]
        _check(bases, x, terms)
        return operations_for(x).add_low_rank(bases, x, terms)
    widened = x.to(deltas[0].down.weight.dtype)
    return [
        (base + delta.up(delta.down(widened)).to(torch.float32) * delta.scale).to(base.dtype)
        for base, delta in zip(bases, deltas, strict=True)
    ]


def _check(bases: Sequence[torch.Tensor], x: torch.Tensor, terms: Sequence[LowRank]) -> None:
    by_cpu, dtype = not device.on_gpu(x), terms[0].down.dtype
    for base, (down, up, _) in zip(bases, terms, strict=True):
        rank, inputs = down.shape
        outputs, inner = up.shape
        if inputs != x.size(-1) or inner != rank or base.shape != (*x.shape[:-1], outputs):
            raise ValueError(
                f"x is {list(x.shape)}, base {list(base.shape)}, down {list(down.shape)}, up {list(up.shape)}; "
                "allowed: [..., K], [..., N], [r, K], [N, r]"
            )
        if base.dtype != x.dtype or down.dtype != dtype or up.dtype != dtype or dtype not in (torch.float32, x.dtype):
            raise TypeError(
                f"x is {x.dtype}, base {base.dtype}, down {down.dtype}, up {up.dtype}; allowed: x and base alike, the "
                "matrices of all layers alike, float32 or that of x"
            )
        if by_cpu:
            check_host("down", down)
            check_host("up", up)
