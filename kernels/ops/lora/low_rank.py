"""Add a product of low rank to the result of a linear layer, row by row, with autograd.

Contract: ``add_low_rank(bases, x, deltas)[l][i]`` depends on row i of ``bases[l]`` and ``x`` alone. The two products
are `linear`; their result is scaled and added to ``base`` in float32, each an IEEE operation of its own (a fused one
would round other elements otherwise, with the number of them), and rounded once.
"""

from collections.abc import Sequence

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.lora.adapters import Deltas, KeptTerms, LowRank, LowRanks
from samebit.kernels.layout.shape_checks import check_host
from samebit.kernels.ops.dispatch import operations_for
from samebit.kernels.ops.linear import is_plain, some_listen_to_all, weight_and_bias


def add_low_rank(
    bases: Sequence[torch.Tensor], x: torch.Tensor, deltas: Deltas, kept: KeptTerms | None = None
) -> list[torch.Tensor]:
    """Compute ``base + scale * up(down(x))`` for layers of one input.

    Args:
        bases: up to three, each ``[..., N]``, what the layer gave of ``x``. They are given away: without gradients
            the results may take their memory.
        x: ``[..., K]``, the dtype of ``bases``.
        deltas: of each layer, bound modules ``[r, K]`` and ``[N, r]`` of one dtype, float32 or that of ``x``.
        kept: where the caller says when the matrices change.

    Returns:
        ``[..., N]`` for each, the dtype of ``bases``.

    Raises:
        ValueError: shapes that do not match.
        TypeError: matrices of two dtypes.
    """
    terms = None if torch.is_grad_enabled() else known_terms(deltas, kept)
    if terms is not None:
        _check(bases, x, terms.each)
        return operations_for(x).add_low_rank(bases, x, terms)
    return [
        (base + delta.up(delta.down(x.to(delta.down.weight.dtype))).to(torch.float32) * delta.scale).to(base.dtype)
        for base, delta in zip(bases, deltas.each, strict=True)
    ]


def add_checked(bases: Sequence[torch.Tensor], x: torch.Tensor, terms: LowRanks) -> list[torch.Tensor]:
    """Do as `add_low_rank` without gradients, with matrices that it has taken for such bases and such an ``x``."""
    return operations_for(x).add_low_rank(bases, x, terms)


def known_terms(deltas: Deltas, kept: KeptTerms | None) -> LowRanks | None:
    """Return the matrices as they are now; None where a module does more than multiply."""
    return deltas.fixed or _terms_now(deltas, kept)


def _terms_now(deltas: Deltas, kept: KeptTerms | None) -> LowRanks | None:
    found = None if kept is None or any(deltas.hooks) or some_listen_to_all() else kept.of(deltas)
    if found is not None:
        return found
    if not all(is_plain(delta.down) and is_plain(delta.up) for delta in deltas.each):
        return None
    terms = tuple(
        LowRank(weight_and_bias(delta.down)[0], weight_and_bias(delta.up)[0], delta.scale) for delta in deltas.each
    )
    return LowRanks(terms) if kept is None else kept.keep(deltas, terms)


def _check(bases: Sequence[torch.Tensor], x: torch.Tensor, terms: Sequence[LowRank]) -> None:
    *shape, inputs = x.shape
    dtype, by_cpu = x.dtype, not device.on_gpu(x)
    for base, (down, up, _) in zip(bases, terms, strict=True):
        (rank, width), (outputs, inner) = down.shape, up.shape
        if width != inputs or inner != rank or base.shape != (*shape, outputs):
            raise ValueError(
                f"x is {list(x.shape)}, base {list(base.shape)}, down {list(down.shape)}, up {list(up.shape)}; "
                "allowed: [..., K], [..., N], [r, K], [N, r]"
            )
        matrices = down.dtype
        if base.dtype is not dtype or up.dtype is not matrices or matrices not in (dtype, torch.float32):
            raise TypeError(
                f"x is {dtype}, base {base.dtype}, down {matrices}, up {up.dtype}; allowed: x and base alike, and the "
                "two matrices alike, float32 or that of x"
            )
        if by_cpu:
            check_host("down", down)
            check_host("up", up)
