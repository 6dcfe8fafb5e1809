"""Compute the experts of a layer, each on the rows that chose it, with autograd.

Contract: an expert's output for a row has the bits of `linear` of that row alone, so a row's result depends on that row
and its own experts, never on the other rows or theirs. With g, u the outputs of the first product, rounded to the dtype
of x, the expert is ``down(act(g) * u)``, the argument of the second product rounded too, as its result o is. The sum of
a row is one chain ``fma(weight, o, sum)`` in float32 from 0, in the order of its ids, rounded once.

The gradient of a row depends on that row alone likewise: it is added up in the order of its ids. That of an expert's
weight is a sum over its rows in their order.
"""

from typing import Any

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.device import exact_dtypes, plain_backward
from samebit.kernels.layout.options import ExpertOptions, ExpertWeights
from samebit.kernels.layout.shape_checks import check_dtype, check_host, check_shape
from samebit.kernels.ops.activation import ACTIVATIONS, PLAIN_ACTIVATIONS
from samebit.kernels.ops.dispatch import operations_for

_ACTIVATIONS = {"gated": ACTIVATIONS, "plain": PLAIN_ACTIVATIONS, "interleaved": ("silu", "swish")}
"""Names the activations that are exact, by form."""


def routed_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, options: ExpertOptions
) -> torch.Tensor:
    """Compute each row by its experts, and add up their outputs.

    Args:
        x: ``[T, W]``, the dtype of the experts.
        ids: ``[T, top_k]`` int32, ascending in each row, as `route` gives them.
        weights: ``[T, top_k]`` float32, of these experts.
        experts: all E.
        options: the layer's.

    Returns:
        ``[T, W]`` in the dtype of x.

    Raises:
        ValueError: shapes that do not match, an activation that is not exact, on the CPU ids of no expert.
        TypeError: dtypes that differ, or that are not exact.
    """
    check_expert_options(options)
    _check(x, ids, weights, experts, options)
    tensors = (experts.up, experts.down, experts.up_bias, experts.down_bias)
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (x, weights, *tensors)):
        out: torch.Tensor = _RoutedExperts.apply(x, ids, weights, *tensors, options)
        return out
    return operations_for(x).experts_forward(x, ids, weights, experts, options, saving=False)[0]


def check_expert_options(options: ExpertOptions) -> None:
    """Raise ValueError unless an expert can work so."""
    if options.form not in _ACTIVATIONS:
        raise ValueError(f"the form of the experts is {options.form!r}; allowed: {', '.join(_ACTIVATIONS)}")
    allowed = _ACTIVATIONS[options.form]
    if options.activation not in allowed:
        raise ValueError(f"activation {options.activation!r} is not exact here; allowed: {', '.join(allowed)}")
    interleaved = options.form == "interleaved"
    if (options.limit is not None) != interleaved or (options.alpha is not None) != interleaved:
        raise ValueError(
            f"limit is {options.limit} and alpha {options.alpha} of {options.form} experts; allowed: numbers for "
            "interleaved ones, None for others"
        )


def _check(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, options: ExpertOptions
) -> None:
    given = {"up": experts.up, "down": experts.down, "up_bias": experts.up_bias, "down_bias": experts.down_bias}
    tensors = {name: part for name, part in given.items() if part is not None}
    _check_shapes(x, ids, weights, experts, options)
    check_dtype("ids", ids, torch.int32)
    check_dtype("weights", weights, torch.float32)
    dtypes = {name: part.dtype for name, part in tensors.items()}
    if x.dtype not in exact_dtypes(x) or set(dtypes.values()) != {x.dtype}:
        raise TypeError(
            f"x is {x.dtype}, the experts {dtypes}; allowed: all alike, of {', '.join(map(str, exact_dtypes(x)))}"
        )
    if not device.on_gpu(x):
        for name, part in (("ids", ids), ("weights", weights), *tensors.items()):
            check_host(name, part)


def _check_shapes(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, options: ExpertOptions
) -> None:
    if x.dim() != 2 or ids.dim() != 2 or experts.up.dim() != 3 or experts.down.dim() != 3:
        raise ValueError(
            f"x is {list(x.shape)}, ids {list(ids.shape)}, up {list(experts.up.shape)}, down "
            f"{list(experts.down.shape)}; allowed: [T, W], [T, top_k] and three axes each"
        )
    rows, width = x.shape
    up, down = ((part.mT if options.transposed else part).shape for part in (experts.up, experts.down))
    number, inner = down[0], down[2]
    products = options.products * inner
    if not rows == len(ids) == len(weights) or weights.shape != ids.shape:
        raise ValueError(f"x has {rows} rows, ids are {list(ids.shape)}, weights {list(weights.shape)}")
    if not 1 <= ids.shape[1] <= number or up != (number, products, width) or down[1] != width:
        kind = f"{options.form}{' and transposed' if options.transposed else ''}"
        raise ValueError(
            f"up is {list(experts.up.shape)} and down {list(experts.down.shape)} for rows of {width} and "
            f"{ids.shape[1]} experts each; these do not fit together in experts that are {kind}"
        )
    if experts.up_bias is not None:
        check_shape("up_bias", experts.up_bias, number, products)
    if experts.down_bias is not None:
        check_shape("down_bias", experts.down_bias, number, width)


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        options: ExpertOptions,
    ) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(x)
        experts = ExpertWeights(up, down, up_bias, down_bias)
        out, saved = kernels.experts_forward(x, ids, weights, experts, options, saving=True)
        ctx.save_for_backward(*saved)
        ctx.options = options
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_x, _, *others = ctx.needs_input_grad[:-1]
        of_x, *others = ctx.kernels.experts_backward(ctx.saved_tensors, grad, ctx.options, (of_x, *others))
        return of_x, None, *others, None
