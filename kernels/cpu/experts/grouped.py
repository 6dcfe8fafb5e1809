"""Multiply each expert with its own rows: the bits of `cpu.linear` of each row by itself.

P pairs, sorted by expert; E experts, K inputs, N outputs.
"""

from itertools import pairwise

import torch

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import kind_of
from samebit.kernels.cpu.gemm import amx_tiles, dots_vectors, grouped
from samebit.kernels.cpu.linear import PRODUCTS_AN_ELEMENT, write_gradient_of_weight
from samebit.kernels.layout.options import Layer


def multiply_grouped(
    x: torch.Tensor,
    row_of: torch.Tensor | None,
    layer: Layer,
    offsets: torch.Tensor,
    transposed: bool,
) -> torch.Tensor:
    """Return ``[P, N]``: each row times the weight of its expert.

    Args:
        x: ``[*, K]``.
        row_of: ``[P]`` int32, the row of x of each pair; None where x has a row for each.
        layer: weight ``[E, N, K]``, transposed ``[E, K, N]``, and bias ``[E, N]`` or None.
        offsets: ``[E + 1]``, where each expert's pairs begin.
        transposed: how the weights lie.
    """
    x, weight, bias = x.contiguous(), layer[0].contiguous(), None if layer[1] is None else layer[1].contiguous()
    inputs, outputs = weight.shape[1:] if transposed else weight.shape[:0:-1]
    pairs = len(x) if row_of is None else len(row_of)
    out = x.new_empty(pairs, outputs)
    product = grouped.Product(
        x=x.data_ptr(),
        row_of=0 if row_of is None else row_of.data_ptr(),
        offsets=offsets.data_ptr(),
        groups=len(weight),
        inputs=inputs,
        outputs=outputs,
        weight=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        transposed=transposed,
    )
    kernel_of(x.dtype)(pairs * inputs * outputs // PRODUCTS_AN_ELEMENT, product, kind_of(x.dtype))
    return out


def kernel_of(dtype: torch.dtype) -> SharedKernel:
    """Return what multiplies elements of this type on this processor: a `gemm.grouped.Product`."""
    if dtype != torch.bfloat16:
        return grouped.multiply
    if amx_tiles.available():
        return grouped.multiply_by_tiles
    return grouped.multiply_by_pairs if dots_vectors.available() else grouped.multiply


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
            write_gradient_of_weight(left[first:last], right[first:last], out[expert])
    return out


def gradient_of_biases(grad: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the gradient ``[E, N]`` of the biases from that of the product."""
    return torch.stack([rows.sum(0) for rows in grad.split(offsets.diff().tolist())])
