"""Route rows: choose which experts of a layer compute a row, and with what weights.

Contract: a row's experts and weights depend on that row alone. Logits are float32 sums that are never rounded, whatever
the dtype of the model: rounded ones are equal in every twentieth row, and torch's ``topk`` takes any of equal ones.
Among equals the lowest expert id comes first. Ids ascend in each row, so that what is summed in their order does not
depend on which of two nearly equal weights is the greater.

Scores, weights and their gradients are float32. Experts are chosen by their scores plus the correction; the weights are
of the scores alone. Neither the choice nor the correction has a gradient.
"""

from dataclasses import dataclass
from typing import Any

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.options import RoutingOptions
from samebit.kernels.layout.shape_checks import check_dtype, check_host, check_shape
from samebit.kernels.ops.dispatch import operations_for
from samebit.kernels.ops.linear import linear

_SCORES = ("softmax", "softmax_of_chosen", "sigmoid")
_GROUP_SCORES = ("best", "best_two")


@dataclass(frozen=True)
class Routing:
    """Says which experts compute each row.

    Attributes:
        ids: ``[T, top_k]`` int32, ascending in each row.
        weights: ``[T, top_k]`` float32, of these experts.
        logits: ``[T, E]`` float32, of all experts.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    options: RoutingOptions,
) -> Routing:
    """Choose the experts of every row.

    Args:
        x: ``[T, W]``, of a dtype that is exact.
        weight: ``[E, W]``, of a dtype that is exact.
        bias: ``[E]`` on the logits, or None.
        correction: ``[E]`` float32 on the scores where experts are chosen, or None; it has no gradient.
        options: the layer's.

    Raises:
        ValueError: shapes that do not match, more choices than experts, groups that do not divide the experts.
        TypeError: a correction that is not float32 (a router's bias that was cast with its model), or other dtypes.
    """
    _check(x, weight, correction, options)
    logits = linear(x.float(), weight.float(), None if bias is None else bias.float())
    if torch.is_grad_enabled() and logits.requires_grad:
        ids, weights = _Route.apply(logits, correction, options)
    else:
        ids, weights, _ = operations_for(logits).route_forward(logits, correction, options)
    return Routing(ids, weights, logits)


def _check(x: torch.Tensor, weight: torch.Tensor, correction: torch.Tensor | None, options: RoutingOptions) -> None:
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"x is {list(x.shape)} and weight {list(weight.shape)}; allowed: [T, W] and [E, W]")
    experts = len(weight)
    check_options(options, experts)
    if correction is not None:
        check_shape("correction", correction, experts)
        check_dtype("correction", correction, torch.float32)
        if options.scores == "softmax_of_chosen":
            raise ValueError("a softmax of the chosen has no scores to correct before the choice; allowed: None")
        if not device.on_gpu(x):
            check_host("correction", correction)


def check_options(options: RoutingOptions, experts: int) -> None:
    """Raise ValueError unless a router of this many experts can work so."""
    if options.scores not in _SCORES or options.group_score not in _GROUP_SCORES:
        raise ValueError(
            f"scores are {options.scores!r}, of groups {options.group_score!r}; "
            f"allowed: {', '.join(_SCORES)}, and {', '.join(_GROUP_SCORES)}"
        )
    if not 0 < options.scale <= torch.finfo(torch.float32).max:
        raise ValueError(f"the scale is {options.scale}; allowed: above 0, and finite in float32")
    groups, kept = options.groups, options.kept_groups
    if not 1 <= kept <= groups or experts % groups:
        raise ValueError(f"{kept} of {groups} groups of {experts} experts; allowed: some of groups of equal size")
    size = experts // groups
    if groups > 1 and options.group_score == "best_two" and size < 2:
        raise ValueError(f"groups of {size} experts have no two best; allowed: at least 2 in a group")
    if not 1 <= options.top_k <= kept * size:
        raise ValueError(f"{options.top_k} experts are chosen of {kept * size} in {kept} groups; allowed: 1 to all")


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, correction: torch.Tensor | None, options: RoutingOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kernels = ctx.kernels = operations_for(logits)
        ids, weights, saved = kernels.route_forward(logits, correction, options)
        ctx.save_for_backward(*saved)
        ctx.options = options
        ctx.mark_non_differentiable(ids)
        return ids, weights

    @staticmethod
    @plain_backward
    def backward(ctx: Any, _: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.kernels.route_backward(ctx.saved_tensors, grad, ctx.options), None, None
