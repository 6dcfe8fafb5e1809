"""Compute routed experts from pairs to rows, and back.

With ``o = down h + bias`` the output of a row's expert and w its weight, gradients need no o: ``<grad, o>`` is
``<grad @ down, h> + <grad, bias>``, and that of ``down`` is the sum of ``grad.T @ (w h)``.
"""

from collections.abc import Sequence

import torch

from samebit.kernels.layout.options import ExpertOptions, ExpertWeights, Saved
from samebit.kernels.triton.experts.combine import add_up, combine
from samebit.kernels.triton.experts.forms import activate, activate_backward
from samebit.kernels.triton.experts.grouped import gradient_of_rows, multiply_grouped
from samebit.kernels.triton.experts.sorting import Pairs, sort_pairs
from samebit.kernels.triton.experts.sums import sum_of_pairs, sum_of_products, weighted_sum_of_rows
from samebit.kernels.triton.matmul import multiply
from samebit.kernels.triton.numeric import aligned
from samebit.kernels.triton.tiles.table import matmul_tiles


def experts_forward(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, options: ExpertOptions,
    saving: bool,
) -> tuple[torch.Tensor, Saved]:  # fmt: skip
    """Implement `Operations.experts_forward`."""
    x, weights = aligned(x), aligned(weights)
    up, down = _inputs_first(experts.up, options), _inputs_first(experts.down, options)
    pairs = sort_pairs(ids, len(up))
    products = multiply_grouped(x, up, experts.up_bias, pairs, gathered=True)
    outputs = multiply_grouped(activate(products, options), down, experts.down_bias, pairs, gathered=False)
    out = combine(outputs, pairs, weights)
    if not saving:
        return out, ()
    down_bias = x.new_empty(0, x.shape[1]) if experts.down_bias is None else experts.down_bias
    return out, (x, ids, weights, experts.up, experts.down, down_bias, products, *pairs.saved())


def experts_backward(
    saved: Saved, grad: torch.Tensor, options: ExpertOptions, needed: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Implement `Operations.experts_backward`."""
    x, ids, weights, up, down, down_bias, products, *sorted_pairs = saved
    of_x, of_weights, of_up, of_down, of_up_bias, of_down_bias = needed
    grad, pairs = aligned(grad), Pairs(*sorted_pairs)
    up, down = _inputs_first(up, options), _inputs_first(down, options)
    to_hidden = gradient_of_rows(grad, down, pairs, gathered=True, dtype=torch.float32)
    to_products, hidden, to_weights = activate_backward(products, to_hidden, pairs, weights, options)
    if len(down_bias):
        to_weights += _products_with_biases(grad, down_bias).gather(1, ids.long())
    to_x = gradient_of_rows(to_products, up, pairs, gathered=False, dtype=x.dtype) if of_x else None
    return (
        None if to_x is None else add_up(to_x, pairs),
        to_weights if of_weights else None,
        _gradient_of_weight(x, to_products, up, pairs, rows_first=options.transposed) if of_up else None,
        _gradient_of_weight(grad, hidden, down, pairs, rows_first=not options.transposed) if of_down else None,
        sum_of_pairs(to_products, pairs) if of_up_bias else None,
        weighted_sum_of_rows(grad, weights, pairs) if of_down_bias else None,
    )


def _inputs_first(weight: torch.Tensor, options: ExpertOptions) -> torch.Tensor:
    """Return ``[E, K, N]``, a view of what is contiguous."""
    return aligned(weight) if options.transposed else aligned(weight).mT


def _products_with_biases(grad: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """Multiply each row with the bias of each expert: ``[T, E]`` float32."""
    tile = matmul_tiles(grad.device, grad.shape[1], len(biases), grad.dtype).tile
    return multiply(grad, aligned(biases).t(), None, tile, torch.float32)


def _gradient_of_weight(
    rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, pairs: Pairs, *, rows_first: bool
) -> torch.Tensor:
    """Add up the products of each expert's rows ``[T, ...]`` and the values of its pairs ``[P, ...]``.

    ``weight``: ``[E, K, N]``, whose tile it takes; ``rows_first``: the gradient has an element of a row before one of a
    pair.
    """
    _, inputs, outputs = weight.shape
    tile = matmul_tiles(rows.device, inputs, outputs, rows.dtype).tile
    left, right = (rows, values) if rows_first else (values, rows)
    return sum_of_products(left, right, pairs, tile, left_gathered=rows_first)
