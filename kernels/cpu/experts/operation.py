"""Compute routed experts on the CPU, from pairs to rows and back."""

from collections.abc import Sequence

import torch

from samebit.kernels.cpu.experts.combine import add_up, combine, combine_backward
from samebit.kernels.cpu.experts.forms import activate, activate_backward
from samebit.kernels.cpu.experts.grouped import gradient_of_biases, gradient_of_weights, multiply_grouped
from samebit.kernels.cpu.experts.one_call import compute, is_one_call
from samebit.kernels.cpu.experts.sorting import sort_pairs
from samebit.kernels.layout.options import ExpertOptions, ExpertWeights, Saved

_PAIRS = 1 << 13
"""Count of pairs that are computed at a time where neither gradients are kept nor all is one call: what lies between
the products takes little memory."""


def experts_forward(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, options: ExpertOptions,
    saving: bool,
) -> tuple[torch.Tensor, Saved]:  # fmt: skip
    """Implement `Operations.experts_forward`."""
    if saving:
        return _by_steps(x, ids, weights, experts, options)
    if is_one_call(options):
        return compute(x, ids, weights, experts, options), ()
    rows = max(1, _PAIRS // ids.shape[1])
    parts = zip(x.split(rows), ids.split(rows), weights.split(rows), strict=True)
    return torch.cat([_by_steps(*part, experts, options)[0] for part in parts]), ()


def _by_steps(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, options: ExpertOptions
) -> tuple[torch.Tensor, Saved]:
    pairs = sort_pairs(ids, len(experts.up))
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
