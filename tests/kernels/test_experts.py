"""A row of routed experts is its own experts' alone, whatever is computed beside it, forward and back."""

from dataclasses import dataclass, replace

import pytest
import torch
from numba.core.runtime import _nrt_python, rtsys
from torch.utils.checkpoint import checkpoint

from samebit.kernels.cpu.experts import operation
from samebit.kernels.cpu.experts.sorting import sort_pairs
from samebit.kernels.layout.options import ExpertOptions, ExpertWeights, RoutingOptions
from samebit.kernels.ops.activation import gated
from samebit.kernels.ops.experts.routed import routed_experts
from samebit.kernels.ops.experts.routing import route
from samebit.kernels.ops.linear import linear

from . import reference
from .helpers import DTYPES, THREADS, assert_near, leaves, threads

FORMS = {
    "gated": ExpertOptions("silu", "gated"),
    "gelu": ExpertOptions("gelu", "gated", transposed=True),
    "plain": ExpertOptions("relu2", "plain"),
    "interleaved": ExpertOptions("silu", "interleaved", transposed=True, limit=1.5, alpha=1.702),
}
ROWS = 299
COUNTS = (1, 2, 3, 7, ROWS)


@dataclass(frozen=True)
class Layer:
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    experts: ExpertWeights
    options: ExpertOptions

    def run(self, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        return routed_experts(self.x[rows], self.ids[rows], self.weights[rows], self.experts, self.options)

    def tensors(self) -> list[torch.Tensor | None]:
        """Return all that have a gradient."""
        experts = self.experts
        return [self.x, self.weights, experts.up, experts.down, experts.up_bias, experts.down_bias]

    def with_tensors(self, x: torch.Tensor, weights: torch.Tensor, *experts: torch.Tensor | None) -> "Layer":
        return replace(self, x=x, weights=weights, experts=ExpertWeights(*experts))


def layer(
    name: str, width: int, inner: int, number: int, top_k: int, dtype: torch.dtype, *, biased: bool = True
) -> Layer:
    torch.manual_seed(width + number)
    options = FORMS[name]
    products = inner if options.form == "plain" else 2 * inner
    up, down = torch.randn(number, products, width) / width**0.5, torch.randn(number, width, inner) / inner**0.5
    if options.transposed:
        up, down = up.mT.contiguous(), down.mT.contiguous()
    biases = (torch.randn(number, products), torch.randn(number, width)) if biased else ()
    experts = ExpertWeights(*(part.to(dtype) for part in (up, down, *biases)))
    x, logits = torch.randn(ROWS, width).to(dtype), torch.randn(ROWS, number)
    routing = route(logits, torch.eye(number), None, None, RoutingOptions("softmax", top_k, normalised=True))
    return Layer(x, routing.ids, routing.weights, experts, options)


def chosen_by(layer: Layer, ids: list[list[int]]) -> Layer:
    """Return the same layer, its rows routed by this pattern over and over."""
    repeated = torch.tensor(ids, dtype=torch.int32).repeat(ROWS, 1)[:ROWS]
    return replace(layer, ids=repeated, weights=torch.rand(repeated.shape))


LAYERS = {
    "gated": ("gated", 100, 129, 13, 4),
    "no choice": ("gated", 129, 33, 7, 7),
    "one of many": ("gelu", 33, 50, 40, 1),
    "plain": ("plain", 65, 100, 13, 3),
    "interleaved": ("interleaved", 100, 65, 9, 4),
}
SKEWED = {
    "all rows on one expert": [[5]],
    "experts without rows": [[0, 12], [0, 4]],
    "one row each": [[expert] for expert in range(13)],
    "one row beside many": [[3]] * 60 + [[7]] + [[9]] * 8,
    "panels of half vectors": [[2]] * 6 + [[3]] * 20 + [[4]] * 37 + [[6]] * 107 + [[7]] * 129,
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_row_has_the_same_bits_among_any_rows(name: str, arithmetic: torch.dtype) -> None:
    whole = layer(*LAYERS[name], arithmetic)
    expected = whole.run()
    for number in THREADS:
        with threads(number):
            for count in COUNTS:
                rows = torch.randperm(ROWS)[:count]
                assert torch.equal(whole.run(rows), expected[rows]), (count, number)


@pytest.mark.parametrize("name", SKEWED)
def test_a_row_has_the_same_bits_however_the_others_are_routed(name: str, arithmetic: torch.dtype) -> None:
    skewed = chosen_by(layer(*LAYERS["gated"], arithmetic), SKEWED[name])
    expected = torch.cat([skewed.run(slice(row, row + 1)) for row in range(ROWS)])
    for number in THREADS:
        with threads(number):
            assert torch.equal(skewed.run(), expected)


@pytest.mark.parametrize("name", ["gated", "interleaved", "all rows on one expert"])
def test_a_row_has_the_same_bits_where_a_few_experts_are_computed_at_a_time(name: str) -> None:
    few = layer(*LAYERS.get(name, LAYERS["gated"]), torch.float32)
    few = chosen_by(few, SKEWED[name]) if name in SKEWED else few
    times = 8  # several thousand pairs
    many = replace(few, x=few.x.repeat(times, 1), ids=few.ids.repeat(times, 1), weights=few.weights.repeat(times, 1))
    with threads(1):
        assert torch.equal(many.run(), few.run().repeat(times, 1))
        assert torch.equal(many.run(), many.with_tensors(*leaves(*many.tensors())).run())


def test_experts_by_steps_are_computed_a_few_rows_at_a_time_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    given, sizes = layer(*LAYERS["one of many"], torch.float32), []
    expected = replace(given, x=given.x.clone().requires_grad_()).run()
    multiply = operation.multiply_grouped

    def noted(*arguments: object) -> torch.Tensor:
        products = multiply(*arguments)
        sizes.append(len(products))
        return products

    monkeypatch.setattr(operation, "multiply_grouped", noted)
    monkeypatch.setattr(operation, "_PAIRS", 100)
    assert torch.equal(given.run(), expected)
    assert sizes == [100] * 4 + [99] * 2


@pytest.mark.parametrize("name", ["gated", "plain", "interleaved"])
@pytest.mark.parametrize("biased", [False, True])
def test_without_a_graph_experts_are_one_call_with_the_bits_of_the_steps_by_themselves(
    name: str, biased: bool, arithmetic: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = layer(*LAYERS[name], arithmetic, biased=biased)
    expected = replace(given, x=given.x.clone().requires_grad_()).run()

    def refuse(*_: object) -> None:
        raise AssertionError("a step by itself")

    for step in ("sort_pairs", "multiply_grouped", "activate", "combine"):
        monkeypatch.setattr(operation, step, refuse)
    for number in THREADS:
        with threads(number):
            for rows in COUNTS:
                assert torch.equal(given.run(slice(rows)), expected[:rows])


@pytest.mark.parametrize("name", ["gated", "gelu"])
def test_outputs_of_experts_have_the_bits_of_linear_layers_and_their_sum_is_one_chain(
    name: str, arithmetic: torch.dtype
) -> None:
    """Each expert's output has the bits of linear layers, and their sum is a chain of fused multiply-adds from 0, in
    the order of the ids (in float64 a product is exact).
    """
    given = chosen_by(layer(name, 130, 70, 5, 1, arithmetic), [[0, 3, 4], [1, 2, 3], [1, 3, 4]])
    experts, transposed = given.experts, given.options.transposed
    up, down = (part.mT if transposed else part for part in (experts.up, experts.down))
    for row in (0, 1, 2, 298):
        total = torch.zeros(130)
        for expert, weight in zip(given.ids[row].tolist(), given.weights[row].double(), strict=True):
            products = linear(given.x[row], up[expert], experts.up_bias[expert]).chunk(2)
            output = linear(gated(given.options.activation, *products), down[expert], experts.down_bias[expert])
            total = (weight * output.double() + total.double()).float()
        assert torch.equal(given.run()[row], total.to(arithmetic))


def test_experts_take_their_rows_in_order() -> None:
    """Experts take their rows in order, so that a weight's gradient is a sum in an order that the ids alone decide."""
    pairs = sort_pairs(torch.tensor([[1, 2], [0, 1], [1, 3], [0, 1]], dtype=torch.int32), 5)
    assert pairs.row_of.tolist() == [1, 3, 0, 1, 2, 3, 0, 2]
    assert pairs.offsets.tolist() == [0, 2, 6, 7, 8, 8]
    assert pairs.place_of.tolist() == [[2, 6], [0, 3], [4, 7], [1, 5]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients_are_near_the_oracle(name: str, biased: bool, dtype: torch.dtype) -> None:
    given = layer(name, 33, 20, 5, 2, dtype, biased=biased)
    if name == "interleaved" and dtype is torch.bfloat16:  # rounded, a product may be on the other side of a limit
        given = replace(given, options=replace(given.options, limit=70.0))
    given = replace(chosen_by(given, [[0, 3], [1, 3], [0, 1]]), x=given.x[:40])
    given = replace(given, ids=given.ids[:40].clone(), weights=given.weights[:40])
    given.ids[17] = torch.tensor([3, 4])  # expert 4 has one row
    mine = [None if part is None else part.clone().requires_grad_() for part in given.tensors()]
    exact = [None if part is None else part.double().requires_grad_() for part in given.tensors()]
    out = given.with_tensors(*mine).run()
    oracle = reference.routed_experts(exact[0], given.ids, *exact[1:], given.options)
    upstream = torch.randn(out.shape).to(dtype)
    assert_near(out, oracle, 3)
    assert torch.equal(out, given.run()), "the forward that keeps a graph has other bits"
    out.backward(upstream)
    oracle.backward(upstream.double())
    for a, b in zip(mine, exact, strict=True):
        if a is not None and b is not None:
            assert_near(a.grad.to(dtype), b.grad, 4)
    for part in mine[2:]:
        assert part is None or not part.grad[2].any(), "an expert without rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gated", "plain", "interleaved"])
def test_the_gradient_of_a_row_does_not_depend_on_the_others(name: str, dtype: torch.dtype) -> None:
    whole = layer(*LAYERS[name], dtype)
    upstream = torch.randn_like(whole.x)

    def gradients(rows: torch.Tensor) -> list[torch.Tensor]:
        x, weights = leaves(whole.x[rows], whole.weights[rows])
        replace(whole, x=x, weights=weights, ids=whole.ids[rows]).run().backward(upstream[rows])
        return [x.grad, weights.grad]

    of_all = gradients(torch.arange(ROWS))
    for number in THREADS:
        with threads(number):
            for count in COUNTS:
                rows = torch.randperm(ROWS)[:count]
                assert all(torch.equal(a, b[rows]) for a, b in zip(gradients(rows), of_all, strict=True))


def test_gradients_are_the_same_after_recomputation() -> None:
    given = layer(*LAYERS["gated"], torch.float32)
    found = []
    for recomputed in (False, True):
        tensors = leaves(*(part for part in given.tensors() if part is not None))
        if recomputed:
            out = checkpoint(lambda *parts: given.with_tensors(*parts).run(), *tensors, use_reentrant=False)
        else:
            out = given.with_tensors(*tensors).run()
        out.square().sum().backward()
        found.append([part.grad for part in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_only_the_gradients_that_are_asked_for() -> None:
    given = layer(*LAYERS["gated"], torch.float32)
    x = given.x.clone().requires_grad_()
    replace(given, x=x).run().sum().backward()
    down = given.experts.down.clone().requires_grad_()
    replace(given, experts=replace(given.experts, down=down)).run().sum().backward()
    assert x.grad is not None
    assert down.grad is not None
    assert all(part is None or part.grad is None for part in given.tensors())
    with torch.no_grad():
        assert not replace(given, x=x).run().requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_stays_in_its_row(dtype: torch.dtype) -> None:
    given = layer(*LAYERS["gated"], dtype)
    clean = given.run()
    given.x[7, 5], given.x[9, 99] = torch.nan, torch.inf
    found = given.run()
    others = [row for row in range(ROWS) if row not in (7, 9)]
    assert found[7].isnan().all()
    assert not found[9].isfinite().any()
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_may_lie_anywhere(dtype: torch.dtype) -> None:
    given = layer(*LAYERS["gated"], dtype)
    x = torch.randn(ROWS, 3 * 100).to(dtype)
    x[:, 7:107] = given.x
    up = torch.randn(13, 100, 2 * 129 + 1).to(dtype)
    up[..., 1:] = given.experts.up.mT
    moved = replace(given, x=x[:, 7:107], experts=replace(given.experts, up=up[..., 1:].mT))
    assert torch.equal(moved.run(), given.run())
    assert given.run(slice(0, 0)).shape == (0, 100)
    empty = given.x[:0].requires_grad_()
    replace(given, x=empty, ids=given.ids[:0], weights=given.weights[:0]).run().sum().backward()
    assert empty.grad.shape == (0, 100)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"form": "sparse"}, "form of the experts is 'sparse'; allowed: gated, plain, interleaved"),
        ({"activation": "relu"}, "activation 'relu' is not exact here; allowed: silu"),
        ({"form": "plain", "activation": "silu"}, "activation 'silu' is not exact here; allowed: relu2"),
        ({"limit": 7.0}, "limit is 7.0 and alpha None of gated experts"),
        ({"form": "interleaved"}, "limit is None and alpha None of interleaved experts"),
        ({"transposed": True}, "do not fit together in experts that are gated and transposed"),
    ],
)
def test_experts_that_can_not_work_are_refused(changed: dict[str, object], message: str) -> None:
    given = layer(*LAYERS["gated"], torch.float32)
    with pytest.raises(ValueError, match=message):
        replace(given, options=replace(given.options, **changed)).run()


def test_tensors_that_do_not_fit_are_refused() -> None:
    given = layer(*LAYERS["gated"], torch.float32)
    experts = given.experts
    for wrong, message in (
        (replace(given, x=given.x[:, 1:]), r"up is \[13, 258, 100\] and down \[13, 100, 129\] for rows of 99"),
        (replace(given, ids=given.ids[:, :3]), r"x has 299 rows, ids are \[299, 3\], weights \[299, 4\]"),
        (replace(given, x=given.x[None]), r"x is \[1, 299, 100\]"),
        (replace(given, ids=given.ids + 1), "ids are 1 to 13; allowed: 0 to 12"),
        (replace(given, ids=given.ids - 1), "ids are -1 to 11"),
        (
            replace(given, experts=replace(experts, up_bias=experts.up_bias[:, 1:])),
            r"up_bias has the shape \[13, 257\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrong.run()
        with pytest.raises(ValueError, match=message):
            replace(wrong, x=wrong.x.clone().requires_grad_()).run()
    for wrong, message in (
        (replace(given, ids=given.ids.long()), "ids is torch.int64; allowed: torch.int32"),
        (replace(given, weights=given.weights.bfloat16()), "weights is torch.bfloat16; allowed: torch.float32"),
        (replace(given, x=given.x.bfloat16()), "x is torch.bfloat16, the experts"),
    ):
        with pytest.raises(TypeError, match=message):
            wrong.run()


def test_what_was_allocated_for_ids_of_no_expert_is_freed() -> None:
    given = layer(*LAYERS["gated"], torch.float32)
    wrong = replace(given, ids=given.ids + 1)
    _nrt_python.memsys_enable_stats()
    try:
        before = rtsys.get_allocation_stats()
        for refused in (wrong, replace(wrong, x=wrong.x.clone().requires_grad_())):
            with pytest.raises(ValueError, match="ids are 1 to 13"):
                refused.run()
        after = rtsys.get_allocation_stats()
    finally:
        _nrt_python.memsys_disable_stats()
    made, freed = after.mi_alloc - before.mi_alloc, after.mi_free - before.mi_free
    assert made > 0
    assert freed == made
