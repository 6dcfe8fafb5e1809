"""Compute the linear layer: one kernel (`matmul`) serves the forward (``x @ W.T``) and its gradients.

That of x is ``grad @ W``, that of W ``grad.T @ x``, a sum over the rows in their order. The tiles are the layer's;
gradients take the one for many rows. T rows, K inputs, N outputs.
"""

from collections.abc import Sequence

import torch

from samebit.kernels.layout.lora.adapters import LowRank
from samebit.kernels.layout.options import Layer
from samebit.kernels.triton.matmul import multiply as multiply_tiles
from samebit.kernels.triton.numeric import aligned
from samebit.kernels.triton.tiles.proved_equal import tiles_of
from samebit.kernels.triton.tiles.table import matmul_tiles


def multiply(x: torch.Tensor, layers: Sequence[Layer]) -> list[torch.Tensor]:
    """Implement `Operations.multiply`."""
    rows = aligned(x.reshape(-1, x.shape[-1]))
    results = []
    for weight, bias in layers:
        outputs, inputs = weight.shape
        tile = tiles_of(x.device, inputs, outputs, x.dtype, bias is not None).for_rows(len(rows))
        out = multiply_tiles(rows, aligned(weight).t(), bias, tile)
        results.append(out.view(*x.shape[:-1], outputs))
    return results


def add_low_rank(bases: Sequence[torch.Tensor], x: torch.Tensor, terms: Sequence[LowRank]) -> list[torch.Tensor]:
    """Implement `Operations.add_low_rank`."""
    dtypes = {term.down.dtype for term in terms}
    if len(dtypes) == 1:
        lows = multiply(x.to(dtypes.pop()), [(term.down, None) for term in terms])
    else:
        lows = [multiply(x.to(term.down.dtype), ((term.down, None),))[0] for term in terms]
    products = [multiply(low, ((term.up, None),))[0].to(torch.float32) for low, term in zip(lows, terms, strict=True)]
    return [
        product.mul_(term.scale).add_(base).to(base.dtype)
        for base, product, term in zip(bases, products, terms, strict=True)
    ]


def gradient_of_inputs(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.gradient_of_inputs`."""
    rows = grad.reshape(-1, grad.shape[-1])
    return _gradient_of_inputs(rows, weight, weight.dtype).view(*grad.shape[:-1], weight.shape[1])


def gradient_of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.gradient_of_weight`."""
    tile = matmul_tiles(x.device, x.shape[1], grad.shape[1], x.dtype).tile
    return multiply_tiles(aligned(grad).t(), aligned(x), None, tile)


def add_gradient_of_inputs(sums: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> None:
    """Implement `Operations.add_gradient_of_inputs`."""
    sums += _gradient_of_inputs(grad, weight, torch.float32)


def _gradient_of_inputs(grad: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    outputs, inputs = weight.shape
    tile = matmul_tiles(weight.device, inputs, outputs, weight.dtype).tile
    return multiply_tiles(aligned(grad), aligned(weight), None, tile, dtype)
