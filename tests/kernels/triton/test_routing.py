"""The router in Triton finds the oracle's experts and weights, the lowest id among equals, for each row alone."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from samebit.kernels.layout.options import RoutingOptions
from samebit.kernels.ops.experts.routing import Routing, route

from .. import reference
from ..helpers import assert_near
from .gpu import DEVICE, poisoned

pytestmark = pytest.mark.usefixtures("on_gpu")

EXPERTS = 18
ROUTERS = {
    "Qwen3-MoE": RoutingOptions("softmax", 4, normalised=True),
    "OLMoE": RoutingOptions("softmax", 4, normalised=False, scale=1.5),
    "gpt-oss": RoutingOptions("softmax_of_chosen", 4, normalised=False),
    "all": RoutingOptions("softmax", EXPERTS, normalised=True),
    "DeepSeek-V2": RoutingOptions("softmax", 5, False, 16.0, groups=6, kept_groups=3, group_score="best"),
    "DeepSeek-V3": RoutingOptions("sigmoid", 6, True, 2.5, groups=6, kept_groups=2),
    "softmax, two best": RoutingOptions("softmax", 3, True, groups=3, kept_groups=2),
    "sigmoid of one": RoutingOptions("sigmoid", 1, False, 0.5),
}


def corrections(options: RoutingOptions) -> Iterator[torch.Tensor | None]:
    yield None
    if options.scores != "softmax_of_chosen":
        yield torch.randn(EXPERTS) / 4


def routed(logits: torch.Tensor, correction: torch.Tensor | None, options: RoutingOptions) -> Routing:
    """Route by a router whose weight is the identity."""
    added = None if correction is None else correction.to(DEVICE)
    return route(logits, torch.eye(logits.shape[1], device=DEVICE), None, added, options)


@pytest.mark.parametrize("name", ROUTERS)
def test_choice_weights_and_gradients_are_those_of_the_oracle(name: str) -> None:
    torch.manual_seed(0)
    logits, upstream = 2 * torch.randn(9, EXPERTS), torch.randn(9, ROUTERS[name].top_k)
    for correction in corrections(ROUTERS[name]):
        mine, exact = poisoned(logits).requires_grad_(), logits.double().requires_grad_()
        found = routed(mine, correction, ROUTERS[name])
        ids, weights = reference.route(exact, correction, ROUTERS[name])
        assert found.ids.tolist() == ids
        assert found.ids.dtype is torch.int32
        assert_near(found.weights, weights)
        (gradient,) = torch.autograd.grad(found.weights, mine, upstream.to(DEVICE))
        (expected,) = torch.autograd.grad(weights, exact, upstream.double())
        assert_near(gradient, expected, 4)
        some = routed(mine[3:5].detach(), correction, ROUTERS[name])
        assert torch.equal(some.ids, found.ids[3:5])
        assert torch.equal(some.weights, found.weights[3:5])


def test_the_lowest_expert_comes_first_among_equals() -> None:
    rows = torch.zeros(3, EXPERTS, device=DEVICE)
    rows[1, [4, 11, 17]], rows[2, 5:] = 1.0, 1.0
    for scores in ("softmax", "softmax_of_chosen", "sigmoid"):
        found = routed(rows, None, RoutingOptions(scores, 2, True))
        assert found.ids.tolist() == [[0, 1], [4, 11], [5, 6]]
        assert found.weights.tolist() == [[0.5, 0.5]] * 3
    grouped = RoutingOptions("sigmoid", 4, True, groups=6, kept_groups=2)
    assert routed(rows, torch.zeros(EXPERTS), grouped).ids.tolist() == [[0, 1, 2, 3], [3, 4, 5, 11], [6, 7, 8, 9]]
    grouped = replace(grouped, group_score="best", kept_groups=3)
    assert routed(rows, None, grouped).ids.tolist() == [[0, 1, 2, 3], [3, 4, 11, 17], [5, 6, 7, 8]]


@pytest.mark.filterwarnings("ignore:overflow")
def test_scores_that_are_rounded_to_equal_ones_are_none_by_their_logits() -> None:
    logits = torch.tensor([[30.0, 40.0, 35.0, -200.0, -150.0, 200.0, -300.0]], device=DEVICE)
    for scores in ("softmax", "softmax_of_chosen", "sigmoid"):
        for count, expected in ((1, [5]), (2, [1, 5]), (5, [0, 1, 2, 4, 5])):
            found = routed(logits, None, RoutingOptions(scores, count, True))
            assert found.ids.tolist() == [expected]
            assert found.weights.isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", ROUTERS)
def test_not_a_number_stays_in_its_row_and_ids_are_of_experts(name: str) -> None:
    logits = torch.randn(3, EXPERTS, device=DEVICE)
    clean = routed(logits, None, ROUTERS[name])
    logits[1, 7] = torch.nan
    spoilt = route(logits, torch.eye(EXPERTS, device=DEVICE), None, None, ROUTERS[name])
    assert spoilt.weights[1].isnan().all()
    assert len(set(spoilt.ids[1].tolist()) & set(range(EXPERTS))) == ROUTERS[name].top_k
    assert torch.equal(spoilt.ids[::2], clean.ids[::2])
    assert torch.equal(spoilt.weights[::2], clean.weights[::2])
    assert routed(logits[:0], None, ROUTERS[name]).ids.shape == (0, ROUTERS[name].top_k)
