"""Compute the linear layer: one kernel (`matmul`) serves the forward (``x @ W.T``) and its gradients.

That of x is ``grad @ W``, that of W ``grad.T @ x``, a sum over the rows in their order. The tiles are the layer's;
gradients take the one for many rows. Layers of one input share a launch where each was seen to keep its bits, gate and
up with their activation.
T rows, K inputs, N outputs.
"""

from collections.abc import Sequence

import torch

from samebit.kernels.layout.lora.adapters import LowRanks
from samebit.kernels.layout.options import Layer, Saved
from samebit.kernels.triton.activation import gated_forward
from samebit.kernels.triton.layers.gated import multiply_both
from samebit.kernels.triton.matmul import multiply as multiply_tiles
from samebit.kernels.triton.matmul import multiply_layers
from samebit.kernels.triton.numeric import aligned
from samebit.kernels.triton.tiles.file import MatmulTile
from samebit.kernels.triton.tiles.proved_equal import joined_tiles_of, tiles_of
from samebit.kernels.triton.tiles.table import matmul_tiles


def multiply(x: torch.Tensor, layers: Sequence[Layer]) -> list[torch.Tensor]:
    """Implement `Operations.multiply`."""
    rows = aligned(x.reshape(-1, x.shape[-1]))
    products = _in_one_launch(rows, layers)
    if products is None:
        products = [_product(rows, layer, len(layer[0])) for layer in layers]
    return [product.view(*x.shape[:-1], product.shape[1]) for product in products]


def multiply_part(x: torch.Tensor, part: Layer, outputs: int) -> torch.Tensor:
    """Implement `Operations.multiply_part`."""
    product = _product(aligned(x.reshape(-1, x.shape[-1])), part, outputs)
    return product.view(*x.shape[:-1], product.shape[1])


def multiply_gated(
    activation: str, x: torch.Tensor, layers: Sequence[Layer], *, kept: bool
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.multiply_gated`."""
    rows = aligned(x.reshape(-1, x.shape[-1]))
    tile = _joined_tile(rows, layers, activation)
    if tile is None:
        gate, up = multiply(x, layers)
        return gated_forward(activation, gate, up)
    weights = [aligned(weight) for weight, _ in layers]
    products = multiply_both(activation, rows, weights, _biases(layers) or None, tile, len(weights[0]), kept=kept)
    out, *saved = (product.view(*x.shape[:-1], product.shape[1]) for product in products)
    return out, tuple(saved)


def _in_one_launch(rows: torch.Tensor, layers: Sequence[Layer]) -> list[torch.Tensor] | None:
    """Return the products of all layers; None if they have not been seen to have the bits of a launch each."""
    tile = _joined_tile(rows, layers, None)
    if tile is None:
        return None
    weights = [aligned(weight) for weight, _ in layers]
    return multiply_layers(rows, weights, _biases(layers) or None, tile, [len(weight) for weight in weights])


def _joined_tile(rows: torch.Tensor, layers: Sequence[Layer], activation: str | None) -> MatmulTile | None:
    """Return the tile of a launch of all layers, and of their activation if there is one; None to launch each."""
    biases = _biases(layers)
    if len(layers) < 2 or len(biases) not in (0, len(layers)):
        return None
    outputs = tuple(len(weight) for weight, _ in layers)
    rungs = joined_tiles_of(rows.device, rows.shape[1], outputs, rows.dtype, bool(biases), activation)
    return next((rung.tile for rung in rungs if len(rows) <= rung.up_to_rows), None)


def _biases(layers: Sequence[Layer]) -> list[torch.Tensor]:
    return [bias for _, bias in layers if bias is not None]


def _product(rows: torch.Tensor, layer: Layer, outputs: int) -> torch.Tensor:
    """Multiply with the tile of a layer of ``outputs`` outputs."""
    weight, bias = layer
    tile = tiles_of(rows.device, weight.shape[1], outputs, rows.dtype, bias is not None).for_rows(len(rows))
    return multiply_tiles(rows, aligned(weight).t(), bias, tile)


def add_low_rank(bases: Sequence[torch.Tensor], x: torch.Tensor, terms: LowRanks) -> list[torch.Tensor]:
    """Implement `Operations.add_low_rank`."""
    each = terms.each
    dtypes = {term.down.dtype for term in each}
    if len(dtypes) == 1:
        lows = multiply(x.to(dtypes.pop()), [(term.down, None) for term in each])
    else:
        lows = [multiply(x.to(term.down.dtype), ((term.down, None),))[0] for term in each]
    products = [multiply(low, ((term.up, None),))[0].to(torch.float32) for low, term in zip(lows, each, strict=True)]
    return [
        product.mul_(term.scale).add_(base).to(base.dtype)
        for base, product, term in zip(bases, products, each, strict=True)
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
