"""The product of each expert with its own rows: the bits of `cpu.linear` of each row by itself.

P pairs, sorted by expert; K inputs, N outputs.
"""

from itertools import pairwise

import torch

from samebit.kernels.cpu.linear import multiply


def multiply_grouped(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Return ``[P, N]``: each row of ``x`` ``[P, K]`` times the weight of its expert.

    Args:
        x: rows in the order of their experts.
        weight: ``[E, N, K]``, transposed ``[E, K, N]``.
        bias: ``[E, N]`` or None.
        offsets: ``[E + 1]``, where each expert's rows begin.
        transposed: how the weight lies.
    """
    weight = weight.mT if transposed else weight
    out = x.new_empty(len(x), weight.shape[1])
    bounds = offsets.tolist()
    for expert, (first, last) in enumerate(pairwise(bounds)):
        if first < last:
            layer = weight[expert], None if bias is None else bias[expert]
            out[first:last] = multiply(x[first:last], (layer,))[0]
    return out


def gradient_of_weights(grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Return the gradient of the weight, each expert's summed over its rows in their order.

    Args:
        grad: ``[P, N]``, of the product.
        x: ``[P, K]``, what was multiplied.
        offsets: where each expert's rows begin.
        transposed: how the weight lies.
    """
    left, right = (x, grad) if transposed else (grad, x)
    out = grad.new_zeros(len(offsets) - 1, left.shape[1], right.shape[1])
    bounds = offsets.tolist()
    for expert, (first, last) in enumerate(pairwise(bounds)):
        if first < last:
            torch.mm(left[first:last].T, right[first:last], out=out[expert])
    return out


def gradient_of_biases(grad: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the gradient ``[E, N]`` of the biases from that of the product."""
    return torch.stack([rows.sum(0) for rows in grad.split(offsets.diff().tolist())])
