"""Compute routed experts on the CPU, from pairs to rows and back."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch

from samebit.kernels import openmp
from samebit.kernels.cpu.experts.combine import add_up, combine, combine_backward
from samebit.kernels.cpu.experts.forms import activate, activate_backward
from samebit.kernels.cpu.experts.grouped import gradient_of_biases, gradient_of_weights, multiply_grouped
from samebit.kernels.cpu.experts.sorting import Pairs, sort_pairs
from samebit.kernels.layout.options import ExpertOptions, ExpertWeights, Layer, Saved

_PAIRS_A_THREAD = 2048
"""Count of pairs a thread whose products are computed before what follows them: fewer gain nothing."""


def experts_forward(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, options: ExpertOptions,
    saving: bool,
) -> tuple[torch.Tensor, Saved]:  # fmt: skip
    """Implement `Operations.experts_forward`."""
    pairs = sort_pairs(ids, len(experts.up))
    if not saving:
        return combine(_outputs(x, pairs, experts, options), pairs.place_of, weights), ()
    first, second = (experts.up, experts.up_bias), (experts.down, experts.down_bias)
    products = multiply_grouped(x, pairs.row_of, first, pairs.offsets, options.transposed)
    hidden = activate(products, options)
    outputs = multiply_grouped(hidden, None, second, pairs.offsets, options.transposed)
    out = combine(outputs, pairs.place_of, weights)
    return out, (x, weights, experts.up, experts.down, products, hidden, outputs, *pairs.saved())


def experts_backward(
    saved: Saved, grad: torch.Tensor, options: ExpertOptions, needed: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Implement `Operations.experts_backward`."""
    x, weights, up, down, products, hidden, outputs, row_of, place_of, offsets = saved
    of_x, _, of_up, of_down, of_up_bias, of_down_bias = needed
    to_outputs, to_weights = combine_backward(grad, outputs, place_of, weights)
    to_hidden = multiply_grouped(to_outputs, None, (down, None), offsets, not options.transposed)
    to_products = activate_backward(products, to_hidden, options)
    to_x = multiply_grouped(to_products, None, (up, None), offsets, not options.transposed) if of_x else None
    return (
        None if to_x is None else add_up(to_x, place_of),
        to_weights,
        gradient_of_weights(to_products, x[row_of], offsets, options.transposed) if of_up else None,
        gradient_of_weights(to_outputs, hidden, offsets, options.transposed) if of_down else None,
        gradient_of_biases(to_products, offsets) if of_up_bias else None,
        gradient_of_biases(to_outputs, offsets) if of_down_bias else None,
    )


def _outputs(x: torch.Tensor, pairs: Pairs, experts: ExpertWeights, options: ExpertOptions) -> torch.Tensor:
    """Return the outputs ``[T top_k, W]``, those of a few experts computed at a time.

    So what lies between the products of an expert takes little memory, and the same again and again: memory that is
    new to a process costs as much time as a quarter of the products.
    """
    outputs = x.new_empty(len(pairs.row_of), x.shape[1])
    bounds = pairs.offsets.tolist()
    for first, last in _runs_of_experts(bounds, _PAIRS_A_THREAD * openmp.num_threads()):
        begin, end = bounds[first], bounds[last]
        offsets = pairs.offsets[first : last + 1] - begin
        up, down = _part(experts.up, experts.up_bias, first, last), _part(experts.down, experts.down_bias, first, last)
        products = multiply_grouped(x, pairs.row_of[begin:end], up, offsets, options.transposed)
        multiply_grouped(activate(products, options), None, down, offsets, options.transposed, outputs[begin:end])
    return outputs


def _runs_of_experts(bounds: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Return runs of experts with at most that many pairs, or a single expert that has more."""
    first, last = 0, len(bounds) - 1
    while first < last:
        following = max(first + 1, bisect_right(bounds, bounds[first] + most) - 1)
        yield first, following
        first = following


def _part(weight: torch.Tensor, bias: torch.Tensor | None, first: int, last: int) -> Layer:
    return weight[first:last], None if bias is None else bias[first:last]
