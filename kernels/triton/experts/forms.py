"""Compute what an expert does between its two products, element by element in float32, rounded once; with gradients.

P sorted pairs, I the width of an expert, W that of a row.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.options import ExpertOptions
from samebit.kernels.triton.activation import KINDS, value_and_slope
from samebit.kernels.triton.experts.sorting import Pairs
from samebit.kernels.triton.numeric import jit, sigmoid
from samebit.kernels.triton.tiles.table import ELEMENTS

_GATED, _PLAIN, _INTERLEAVED = (tl.constexpr(form) for form in range(3))
_FORMS = {"gated": 0, "plain": 1, "interleaved": 2}


def activate(products: torch.Tensor, options: ExpertOptions) -> torch.Tensor:
    """Return what goes into the second product, ``[P, I]``."""
    pairs, width = products.shape
    hidden = width if options.form == "plain" else width // 2
    out = torch.empty(pairs, hidden, dtype=products.dtype, device=products.device)
    if out.numel():
        _activate[(pairs, ceil_div(hidden, ELEMENTS))](
            products, out, *_constants(options), hidden, *_kind(options), ELEMENTS
        )
    return out


def activate_backward(
    products: torch.Tensor, to_hidden: torch.Tensor, pairs: Pairs, weights: torch.Tensor, options: ExpertOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient of the products, what `activate` gave times each pair's weight, and the gradient of those.

    ``to_hidden``: ``[P, I]`` float32, ``grad @ down`` of each pair, without its weight ``[T, top_k]``.
    """
    to_products, weighted = torch.empty_like(products), torch.empty_like(to_hidden, dtype=products.dtype)
    to_weights = torch.empty_like(weights)
    count, hidden = to_hidden.shape
    if count:
        _activate_gradients[(count,)](
            products, to_hidden, pairs.choice_of, weights, to_products, weighted, to_weights, *_constants(options),
            hidden, *_kind(options), ELEMENTS,
        )  # fmt: skip
    return to_products, weighted, to_weights


def _constants(options: ExpertOptions) -> tuple[float, float]:
    """Return limit and alpha of the interleaved form; other forms do not read them."""
    return options.limit or 0.0, options.alpha or 0.0


def _kind(options: ExpertOptions) -> tuple[int, int]:
    return _FORMS[options.form], KINDS[options.activation]


@jit()
def _gates_and_ups(
    products: tensor, pair: tensor, first: tensor, HIDDEN: tl.constexpr, FORM: tl.constexpr, SIZE: tl.constexpr
) -> Any:
    """Load a pair's from the ``first`` on, float32; of a plain expert the same twice."""
    column = first + tl.arange(0, SIZE)
    real = column < HIDDEN
    if FORM == _INTERLEAVED:
        both = 2 * first + tl.arange(0, 2 * SIZE)
        values = tl.load(products + pair * (2 * HIDDEN) + both, mask=both < 2 * HIDDEN, other=0.0)
        gate, up = tl.split(tl.reshape(values, (SIZE, 2)))
    elif FORM == _GATED:
        gate = tl.load(products + pair * (2 * HIDDEN) + column, mask=real, other=0.0)
        up = tl.load(products + pair * (2 * HIDDEN) + HIDDEN + column, mask=real, other=0.0)
    else:
        gate = tl.load(products + pair * HIDDEN + column, mask=real, other=0.0)
        up = gate
    return gate.to(tl.float32), up.to(tl.float32)


@jit()
def _store_gates_and_ups(
    products: tensor, pair: tensor, first: tensor, gate: tensor, up: tensor, HIDDEN: tl.constexpr, FORM: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Write where `_gates_and_ups` reads."""
    column = first + tl.arange(0, SIZE)
    real = column < HIDDEN
    gate, up = gate.to(products.dtype.element_ty), up.to(products.dtype.element_ty)
    if FORM == _INTERLEAVED:
        both = 2 * first + tl.arange(0, 2 * SIZE)
        values = tl.reshape(tl.join(gate, up), (2 * SIZE,))
        tl.store(products + pair * (2 * HIDDEN) + both, values, mask=both < 2 * HIDDEN)
    elif FORM == _GATED:
        tl.store(products + pair * (2 * HIDDEN) + column, gate, mask=real)
        tl.store(products + pair * (2 * HIDDEN) + HIDDEN + column, up, mask=real)
    else:
        tl.store(products + pair * HIDDEN + column, gate, mask=real)


@jit()
def _value_and_slopes(
    gate: tensor, up: tensor, limit: tensor, alpha: tensor, FORM: tl.constexpr, KIND: tl.constexpr
) -> Any:
    """Return what the expert computes of a gate and an up, and its derivatives by them."""
    if FORM == _GATED:
        value, slope = value_and_slope(gate, KIND)
        result, of_gate, of_up = value * up, slope * up, value
    elif FORM == _PLAIN:
        result, of_gate = value_and_slope(gate, KIND)
        of_up = of_gate
    else:
        g, u = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        share = sigmoid(alpha * g)
        value = g * share
        result = (u + 1.0) * value
        of_gate = tl.where(gate > limit, 0.0, (u + 1.0) * share * (1.0 + alpha * g * (1.0 - share)))
        of_up = tl.where((up > limit) | (up < -limit), 0.0, value)
    return result, of_gate, of_up


@jit(do_not_specialize=["limit", "alpha"])
def _activate(
    products: tensor, out: tensor, limit: tensor, alpha: tensor, HIDDEN: tl.constexpr, FORM: tl.constexpr,
    KIND: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SIZE
    column = first + tl.arange(0, SIZE)
    gate, up = _gates_and_ups(products, pair, first, HIDDEN, FORM, SIZE)
    result, _, _ = _value_and_slopes(gate, up, limit, alpha, FORM, KIND)
    tl.store(out + pair * HIDDEN + column, result.to(out.dtype.element_ty), mask=column < HIDDEN)


@jit(do_not_specialize=["limit", "alpha"])
def _activate_gradients(
    products: tensor, to_hidden: tensor, choice_of: tensor, weights: tensor, to_products: tensor, weighted: tensor,
    to_weights: tensor, limit: tensor, alpha: tensor, HIDDEN: tl.constexpr, FORM: tl.constexpr, KIND: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    choice = tl.load(choice_of + pair)
    weight = tl.load(weights + choice)
    total = tl.zeros((SIZE,), tl.float32)
    for first in range(0, HIDDEN, SIZE):
        at, real = pair * HIDDEN + first + tl.arange(0, SIZE), first + tl.arange(0, SIZE) < HIDDEN
        gate, up = _gates_and_ups(products, pair, first, HIDDEN, FORM, SIZE)
        result, of_gate, of_up = _value_and_slopes(gate, up, limit, alpha, FORM, KIND)
        upstream = tl.load(to_hidden + at, mask=real, other=0.0)
        total += upstream * result.to(products.dtype.element_ty).to(tl.float32)
        tl.store(weighted + at, (weight * result).to(weighted.dtype.element_ty), mask=real)
        upstream *= weight
        _store_gates_and_ups(to_products, pair, first, upstream * of_gate, upstream * of_up, HIDDEN, FORM, SIZE)
    tl.store(to_weights + choice, tl.sum(total, axis=0))
