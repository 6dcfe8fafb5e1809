"""The router gives every row its own experts, the lowest among equals, whatever is routed beside it."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from samebit.kernels.layout.options import RoutingOptions
from samebit.kernels.ops.experts.routing import Routing, route
from samebit.kernels.ops.linear import linear

from . import reference
from .helpers import DTYPES, THREADS, assert_near, leaves, threads

SOFTMAX = RoutingOptions("softmax", 4, normalised=True)
ROUTERS = {
    "Qwen3-MoE": SOFTMAX,
    "OLMoE": replace(SOFTMAX, normalised=False),
    "scaled": replace(SOFTMAX, scale=2.5),
    "gpt-oss": RoutingOptions("softmax_of_chosen", 4, normalised=False),
    "one": replace(SOFTMAX, top_k=1, normalised=False),
    "all": replace(SOFTMAX, top_k=18),
    "DeepSeek-V2": RoutingOptions("softmax", 5, False, 16.0, groups=6, kept_groups=3, group_score="best"),
    "softmax, two best": RoutingOptions("softmax", 4, True, groups=3, kept_groups=2),
    "DeepSeek-V3": RoutingOptions("sigmoid", 6, True, 2.5, groups=6, kept_groups=2),
    "LFM2-MoE": RoutingOptions("sigmoid", 4, True, 1.5, floor=1e-6),
    "a floor that counts": RoutingOptions("sigmoid", 2, True, floor=0.5),
    "sigmoid": RoutingOptions("sigmoid", 3, False, 0.5),
    "sigmoid of one": RoutingOptions("sigmoid", 1, False, 1.5),
}
EXPERTS = 18
CORRECTED = [
    (name, corrected) for name in ROUTERS for corrected in (False, True) if (name, corrected) != ("gpt-oss", True)
]


def layer(rows: int, width: int, experts: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Draw x, the router's weight and bias, the correction."""
    torch.manual_seed(width)
    x, weight, bias = torch.randn(rows, width), torch.randn(experts, width) / width**0.5 * 2, torch.randn(experts)
    return *(part.to(dtype) for part in (x, weight, bias)), torch.randn(experts) / 4


def assert_equal(found: Routing, expected: Routing) -> None:
    for name in ("ids", "weights", "logits"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(("name", "corrected"), CORRECTED)
def test_choice_weights_and_gradients_are_those_of_the_oracle(name: str, corrected: bool) -> None:
    x, weight, bias, correction = layer(40, 100, EXPERTS)
    added, options = correction if corrected else None, ROUTERS[name]
    mine, exact = leaves(x, weight, bias), leaves(x.double(), weight.double(), bias.double())
    found = route(*mine, added, options)
    ids, weights = reference.route(reference.linear(*exact), added, options)
    assert found.ids.tolist() == ids
    assert found.ids.dtype is torch.int32
    assert_near(found.weights, weights)
    assert_equal(found, route(x, weight, bias, added, options))
    upstream = torch.randn(weights.shape)
    found.weights.backward(upstream)
    weights.backward(upstream.double())
    for a, b in zip(mine, exact, strict=True):
        assert_near(a.grad, b.grad, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUTERS)
def test_a_row_is_routed_alike_in_every_call(name: str, dtype: torch.dtype) -> None:
    x, weight, bias, correction = layer(299, 129, EXPERTS, dtype)
    added, options = None if name == "gpt-oss" else correction, ROUTERS[name]
    whole = route(x, weight, bias, added, options)
    upstream = torch.randn_like(whole.weights)

    def gradient(rows: torch.Tensor) -> torch.Tensor:
        logits = whole.logits[rows].clone().requires_grad_()
        ids, weights = whole.ids[rows], route_logits(logits, added, options)
        assert torch.equal(weights.detach(), whole.weights[rows]), ids
        return torch.autograd.grad(weights, logits, upstream[rows])[0]

    of_all = gradient(torch.arange(299))
    for count in (1, 2, 3, 7, 299):
        rows = torch.randperm(299)[:count]
        for number in THREADS:
            with threads(number):
                found = route(x[rows], weight, bias, added, options)
                assert torch.equal(gradient(rows), of_all[rows])
            assert_equal(found, Routing(whole.ids[rows], whole.weights[rows], whole.logits[rows]))


def route_logits(logits: torch.Tensor, correction: torch.Tensor | None, options: RoutingOptions) -> torch.Tensor:
    """Return the weights of given logits, by a router whose weight is the identity."""
    return route(logits, torch.eye(logits.shape[1]), None, correction, options).weights


def test_logits_are_never_rounded() -> None:
    x, weight, bias, _ = layer(20, 100, EXPERTS, torch.bfloat16)
    found = route(x, weight, bias, None, SOFTMAX)
    assert torch.equal(found.logits, linear(x.float(), weight.float(), bias.float()))
    assert not torch.equal(found.logits, found.logits.bfloat16().float())


@pytest.mark.parametrize("experts", [1, 5, 33, 128])
def test_the_lowest_expert_comes_first_among_equals(experts: int) -> None:
    x, weight, _, _ = layer(9, 100, experts)
    for options in (SOFTMAX, ROUTERS["sigmoid"], ROUTERS["gpt-oss"]):
        chosen = replace(options, top_k=min(4, experts))
        for correction in (None, torch.zeros(experts)):
            if options.scores == "softmax_of_chosen" and correction is not None:
                continue
            assert (route(x, 0 * weight, None, correction, chosen).ids == torch.arange(chosen.top_k)).all()
            for first, second in ((0, experts - 1), (experts // 2, experts // 2 + 1)):
                if second < experts and first < second:
                    twins = weight.clone()
                    twins[second] = twins[first]
                    one = route(x, twins, None, correction, replace(chosen, top_k=1)).ids
                    assert not (one == second).any()
    x, weight, _, _ = layer(9, 100, 12)
    grouped = RoutingOptions("sigmoid", 3, True, groups=4, kept_groups=2)
    assert (route(x, 0 * weight, None, torch.zeros(12), grouped).ids == torch.arange(3)).all()


def test_weights_of_scores_that_are_next_to_nothing_are_divided_by_more_than_nothing() -> None:
    """Weights of tiny scores are divided by at least 1e-20, as DeepSeek-V3's are: without it scores of 1e-35 had
    weights that add up to one.
    """
    weight = torch.tensor([-80.0, -81.0, -200.0])[:, None]
    options = replace(ROUTERS["sigmoid"], top_k=2, normalised=True, scale=1.0, groups=1, kept_groups=1)
    found = route(torch.ones(1, 1), weight, None, torch.zeros(3), options)
    assert found.ids.tolist() == [[0, 1]]
    assert 0 < float(found.weights.sum()) < 1e-14


def test_of_equals_the_highest_expert_makes_room_for_a_greater_one() -> None:
    for values, expected in (([1, 1, 2], [0, 2]), ([0, 1, 1, 1, 2], [1, 4]), ([1, 1, 2, 1, 3], [2, 4])):
        weight = torch.tensor(values, dtype=torch.float32)[:, None]
        found = route(torch.ones(1, 1), weight, None, None, replace(SOFTMAX, top_k=2))
        assert found.ids.tolist() == [expected]


def test_scores_that_are_rounded_to_equal_ones_are_none_by_their_logits() -> None:
    logits = torch.tensor([[30.0, 40.0, 35.0, -200.0, -150.0, 200.0, -300.0]])
    for scores in ("softmax", "softmax_of_chosen", "sigmoid"):
        for count, expected in ((1, [5]), (2, [1, 5]), (5, [0, 1, 2, 4, 5])):
            found = route(logits, torch.eye(7), None, None, RoutingOptions(scores, count, True))
            assert found.ids.tolist() == [expected]
            assert found.weights.isfinite().all()


def test_the_correction_changes_the_choice_and_no_weight() -> None:
    logits, correction = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([9.0, 0.0, 0.0, 8.0])
    correction.requires_grad_()
    for options in (RoutingOptions("sigmoid", 2, True, 2.0), RoutingOptions("softmax", 2, True, 2.0)):
        found = route(logits.clone().requires_grad_(), torch.eye(4), None, correction, options)
        scores = logits.sigmoid()[0, [0, 3]] if options.scores == "sigmoid" else logits[0, [0, 3]].exp()
        assert found.ids.tolist() == [[0, 3]]
        assert_near(found.weights[0], 2 * scores.double() / scores.double().sum())
        found.weights.sum().backward()
        assert correction.grad is None


def test_a_recomputed_forward_chooses_the_same_experts() -> None:
    x, weight, _, _ = layer(65, 129, EXPERTS, torch.bfloat16)
    weight[7] = weight[3]
    chosen: list[torch.Tensor] = []

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = route(x, weight, None, None, SOFTMAX)
        chosen.append(found.ids)
        return found.weights.square()

    kept, again = leaves(x, weight), leaves(x, weight)
    run(*kept).sum().backward()
    checkpoint(run, *again, use_reentrant=False).sum().backward()
    assert len(chosen) == 3
    assert all(torch.equal(ids, chosen[0]) for ids in chosen)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(kept, again, strict=True))


def test_not_a_number_stays_in_its_row() -> None:
    x, weight, _, correction = layer(5, 20, 12)
    clean = route(x, weight, None, correction, ROUTERS["sigmoid"])
    x[2, 3] = torch.nan
    found = route(x, weight, None, correction, ROUTERS["sigmoid"])
    others = [0, 1, 3, 4]
    assert found.weights[2].isnan().all()
    assert len(set(found.ids[2].tolist()) & set(range(12))) == 3
    assert torch.equal(found.ids[others], clean.ids[others])
    assert torch.equal(found.weights[others], clean.weights[others])


def test_no_rows_have_no_experts() -> None:
    x, weight, _, _ = layer(5, 20, 12)
    found = route(x[:0].requires_grad_(), weight, None, None, SOFTMAX)
    assert found.ids.shape == found.weights.shape == (0, 4)
    found.weights.sum().backward()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"top_k": 13}, "13 experts are chosen of 12 in 1 groups; allowed: 1 to all"),
        ({"top_k": 0}, "0 experts are chosen"),
        ({"groups": 5}, "1 of 5 groups of 12 experts; allowed: some of groups of equal size"),
        ({"groups": 3, "kept_groups": 4}, "4 of 3 groups"),
        ({"groups": 4, "kept_groups": 1}, "4 experts are chosen of 3 in 1 groups"),
        ({"groups": 12, "kept_groups": 6}, "groups of 1 experts have no two best"),
        ({"scores": "relu"}, "scores are 'relu', of groups 'best_two'; allowed: softmax"),
        ({"scale": 0.0}, "the scale is 0.0; allowed: above 0"),
        ({"scale": 1e39}, r"the scale is 1e\+39; allowed: above 0, and finite in float32"),
    ],
)
def test_routers_that_can_not_work_are_refused(changed: dict[str, object], message: str) -> None:
    x, weight, _, _ = layer(5, 20, 12)
    with pytest.raises(ValueError, match=message):
        route(x, weight, None, None, replace(SOFTMAX, **changed))


def test_tensors_that_do_not_fit_are_refused() -> None:
    x, weight, bias, correction = layer(5, 20, 12)
    with pytest.raises(ValueError, match=r"x is \[5, 20\] and weight \[20\]; allowed: \[T, W\] and \[E, W\]"):
        route(x, weight[0], None, None, SOFTMAX)
    with pytest.raises(ValueError, match="x is \\[5, 19\\], weight \\[12, 20\\]"):
        route(x[:, 1:], weight, bias, None, SOFTMAX)
    with pytest.raises(ValueError, match=r"correction has the shape \[11\]; allowed: \[12\]"):
        route(x, weight, None, correction[1:], SOFTMAX)
    with pytest.raises(TypeError, match=r"correction is torch\.bfloat16; allowed: torch\.float32"):
        route(x, weight, None, correction.bfloat16(), SOFTMAX)
    with pytest.raises(ValueError, match="no scores to correct"):
        route(x, weight, None, correction, ROUTERS["gpt-oss"])
