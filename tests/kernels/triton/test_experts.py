"""Routed experts in Triton are near the oracle, forward and back, each row alone; only values depend on the ids.

On a GPU and under `make soak` in all dtypes; otherwise mostly in float32, for the interpreter is slow.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samebit.kernels.layout.options import ExpertOptions, ExpertWeights
from samebit.kernels.ops.activation import gated
from samebit.kernels.ops.experts.routed import routed_experts
from samebit.kernels.ops.linear import linear
from samebit.kernels.triton.experts import grouped
from samebit.kernels.triton.experts.combine import combine
from samebit.kernels.triton.experts.grouped import OneExpert
from samebit.kernels.triton.experts.sorting import sort_pairs
from samebit.kernels.triton.matmul import multiply_first
from samebit.kernels.triton.tiles.table import matmul_tiles

from ...exactness.families import CAMPAIGN
from .. import reference
from ..helpers import assert_near
from .gpu import DEVICE, DTYPES, poisoned

pytestmark = pytest.mark.usefixtures("on_gpu")

FORMS = {
    "gated": ExpertOptions("silu", "gated"),
    "gelu": ExpertOptions("gelu", "gated", transposed=True),
    "plain": ExpertOptions("relu2", "plain"),
    "interleaved": ExpertOptions("silu", "interleaved", transposed=True, limit=1.5, alpha=1.702),
}
ALL = CAMPAIGN or DEVICE == "cuda"


@dataclass(frozen=True)
class Layer:
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    experts: list[torch.Tensor | None]
    options: ExpertOptions

    def run(self, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        return self.of(self.x, self.weights, *self.experts, rows=rows)

    def of(
        self, x: torch.Tensor, weights: torch.Tensor, *experts: torch.Tensor | None, rows: Any = slice(None)
    ) -> torch.Tensor:
        given = ExpertWeights(*(None if part is None else part.to(DEVICE) for part in experts))
        parts = (part[rows].contiguous().to(DEVICE) for part in (x, self.ids, weights))
        return routed_experts(*parts, given, self.options)

    def gradients(self, rows: torch.Tensor | slice = slice(None)) -> list[torch.Tensor]:
        """Return the gradients of x, the weights, and what the experts have, for an upstream gradient of each row's
        own.
        """
        parts = [self.x, self.weights, *(part for part in self.experts if part is not None)]
        mine = [part.clone().requires_grad_() for part in parts]
        upstream = torch.randn(self.x.shape, generator=torch.Generator().manual_seed(0)).to(self.x.dtype)
        out = self.of(*mine, rows=rows)
        return list(torch.autograd.grad(out, mine, upstream[rows].to(DEVICE)))


def layer(
    name: str, ids: list[list[int]], dtype: torch.dtype, *, width: int = 100, inner: int = 33, number: int = 5,
    biased: bool = True,
) -> Layer:  # fmt: skip
    torch.manual_seed(width + number)
    options = FORMS[name]
    products = inner if options.form == "plain" else 2 * inner
    up, down = torch.randn(number, products, width) / width**0.5, torch.randn(number, width, inner) / inner**0.5
    if options.transposed:
        up, down = up.mT.contiguous(), down.mT.contiguous()
    biases = (torch.randn(number, products), torch.randn(number, width)) if biased else ()
    chosen = torch.tensor(ids, dtype=torch.int32)
    x = poisoned(torch.randn(len(ids), width).to(dtype)).cpu()
    experts: list[torch.Tensor | None] = [part.to(dtype) for part in (up, down, *biases)]
    return Layer(x, chosen, torch.rand(chosen.shape), experts, options)


PATTERN = [[0, 3], [1, 3], [0, 1], [3, 4]]
"""Lets one row alone choose expert 4, and none expert 2."""

LONGER = PATTERN + [[0, 3]] * 32
"""Has so many rows that sums over them take more than one tile."""


@pytest.mark.parametrize(
    ("name", "biased", "dtype"),
    [(name, biased, dtype) for name in FORMS for biased in (False, True) for dtype in DTYPES]
    if ALL
    else [
        ("gated", False, torch.bfloat16), ("gelu", True, torch.float32), ("plain", True, torch.float16),
        ("interleaved", True, torch.float32), ("gated", True, torch.float32),
    ],
)  # fmt: skip
def test_values_and_gradients_are_near_the_oracle(name: str, biased: bool, dtype: torch.dtype) -> None:
    given = layer(name, LONGER if ALL or name == "gelu" else PATTERN, dtype, biased=biased)
    if dtype is not torch.float32 and name == "interleaved":  # a rounded product may be on the other side of a limit
        given = replace(given, options=replace(given.options, limit=70.0))
    exact = [part.double().requires_grad_() for part in (given.x, given.weights)]
    experts = [None if part is None else part.double().requires_grad_() for part in given.experts]
    experts += [None] * (4 - len(experts))
    expected = reference.routed_experts(exact[0], given.ids, exact[1], *experts, given.options)
    assert_near(given.run(), expected, 6)
    upstream = torch.randn(given.x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    leaves = exact + [part for part in experts if part is not None]
    found, gradients = given.gradients(), torch.autograd.grad(expected, leaves, upstream.double())
    for mine, theirs in zip(found, gradients, strict=True):
        assert_near(mine.to(dtype), theirs, 8)
    assert not any(part[2].any() for part in found[2:]), "an expert without rows"


SKEWED = {
    "two tiles of one expert": [[3]] * 70 + [[1]] * 2,
    "all experts": [list(range(5))] * 3,
    "one row each": [[expert] for expert in (4, 0, 2)],
}


@pytest.mark.parametrize("dtype", DTYPES if ALL else (torch.float32,))
@pytest.mark.parametrize("name", SKEWED)
def test_a_row_and_its_gradient_have_the_same_bits_in_any_company(name: str, dtype: torch.dtype) -> None:
    ids = SKEWED[name]
    given = layer("gated", ids, dtype)
    whole, of_whole = given.run(), given.gradients()
    companies = [[0], [len(ids) // 2, 0, len(ids) - 1], [len(ids) - 1, 1]]
    for rows in map(torch.tensor, companies if ALL else companies[:2]):
        assert torch.equal(given.run(rows), whole[rows]), rows
        of_rows = given.gradients(rows)
        for mine, theirs in zip(of_rows[:2], of_whole[:2], strict=True):
            assert torch.equal(mine[rows], theirs[rows]), rows


@pytest.mark.parametrize("name", ["gated", "gelu"])
def test_an_output_of_an_expert_has_the_bits_of_a_linear_layer(name: str) -> None:
    for dtype in DTYPES if ALL else (torch.float32,):
        given = layer(name, [[3], [3], [0]], dtype, width=130, inner=70)
        given = replace(given, weights=torch.ones_like(given.weights))
        up, down, up_bias, down_bias = (part.to(DEVICE) for part in given.experts if part is not None)
        if given.options.transposed:
            up, down = up.mT, down.mT
        expected = []
        for row, (expert,) in zip(given.x.to(DEVICE), given.ids.tolist(), strict=True):
            gate, ups = linear(row[None], up[expert], up_bias[expert]).chunk(2, dim=-1)
            hidden = gated(given.options.activation, gate.contiguous(), ups.contiguous())
            expected.append(linear(hidden, down[expert], down_bias[expert]))
        assert torch.equal(given.run(), torch.cat(expected))


class Launches:
    """Launches a kernel in its place, and keeps what it was compiled for."""

    def __init__(self, kernel: Any, first_constant: int) -> None:
        self.kernel, self.first = kernel, first_constant
        self.constants: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.constants.append((args[self.first :], options))
            self.kernel[grid](*args, **options)

        return launch


@pytest.mark.parametrize("name", ["gated", "gelu"])
def test_what_is_compared_before_a_narrow_tile_is_used_is_the_layers_own_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared before a narrow tile is used computes as a linear layer, and is compiled for the same constants
    as the kernels that the layer launches.
    """
    given = layer(name, PATTERN, torch.float32)
    launches = Launches(grouped._multiply_items, grouped._multiply_items.arg_names.index("INPUTS"))
    monkeypatch.setattr(grouped, "_multiply_items", launches)
    given.run()
    layers, launches.constants = launches.constants, []
    tile = matmul_tiles(torch.device(DEVICE), 100, 66, torch.float32).tile
    for inputs, outputs, top_k in ((100, 66, 2), (33, 100, 0)):
        x, weight, bias = (torch.randn(shape, device=DEVICE) for shape in ((70, inputs), (64, inputs), (64,)))
        one = OneExpert(top_k, given.options.transposed)
        assert one == OneExpert(top_k, given.options.transposed), "layers alike are compared once"
        expected = multiply_first(x, weight.t(), bias, tile, outputs)
        assert torch.equal(one(x, weight.t(), bias, tile, outputs), expected)
    assert launches.constants == layers


@pytest.mark.parametrize(
    "ids",
    [
        torch.stack([torch.randperm(6)[:3].sort().values for _ in range(900)]), torch.full((130, 1), 4),
        torch.arange(6)[None], torch.empty(0, 2), torch.tensor([[0, 5]] * 64),
    ],
    ids=["many", "one expert", "one row", "no row", "tiles that are full"],
)  # fmt: skip
def test_pairs_are_sorted_and_each_is_one_items(ids: torch.Tensor) -> None:
    ids = ids.int().to(DEVICE)
    pairs = sort_pairs(ids, 6)
    order = torch.sort(ids.flatten(), stable=True)
    assert torch.equal(pairs.choice_of.long(), order.indices)
    assert torch.equal(pairs.place_of.flatten()[order.indices].long(), torch.arange(ids.numel(), device=DEVICE))
    assert pairs.offsets.tolist() == torch.searchsorted(order.values, torch.arange(7, device=DEVICE)).tolist()
    for rows in (16, 64):
        items = pairs.items(rows)
        assert len(items) == ids.numel() // rows + 6
        taken = [
            (place, expert) for expert, first, end in items.tolist() for place in range(first, min(first + rows, end))
        ]
        assert taken == list(enumerate(order.values.tolist()))


def test_outputs_are_added_in_the_order_of_the_ids() -> None:
    """Outputs are added in the order of the ids: from the last to the first, these would add up to 0."""
    outputs = torch.tensor([[1e8], [-1e8], [1.0]], device=DEVICE)
    for ids in ([[0, 1, 2]], [[1, 3, 4]]):
        pairs = sort_pairs(torch.tensor(ids, dtype=torch.int32, device=DEVICE), 5)
        assert combine(outputs, pairs, torch.ones(1, 3, device=DEVICE)).item() == 1.0


class Calls(TorchDispatchMode):
    """Keeps what is asked of torch: its operations, with the sizes of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.seen.append((str(func), list(out.shape) if isinstance(out, torch.Tensor) else out))
        return out


def calls(run: Callable[[], object]) -> list[tuple[str, Any]]:
    with Calls() as mode:
        run()
    return mode.seen


def test_no_number_that_depends_on_the_ids_comes_to_the_host() -> None:
    """No number that depends on the ids comes to the host, so that a CUDA graph can be recorded with some ids, and
    replayed with others.
    """
    one, other = (layer("gated", ids, torch.float32) for ids in ([[3, 4]] * 6, [[0, 1], [2, 3], [1, 4]] * 2))
    one.run()  # the first call of a layer compares its tiles
    seen = calls(lambda: one.run())
    assert seen == calls(lambda: other.run())
    assert not [name for name, _ in seen if "local_scalar" in name or "nonzero" in name]


def test_rows_that_there_is_only_room_for_change_no_bit() -> None:
    """Rows that there is only room for, which are zeros and choose the first experts, change no bit of the others."""
    given = layer("interleaved", PATTERN, torch.float32)
    more = replace(
        given, x=torch.cat([given.x, torch.zeros(5, 100)]), weights=torch.cat([given.weights, torch.ones(5, 2) / 2]),
        ids=torch.cat([given.ids, torch.tensor([[0, 1]] * 5, dtype=torch.int32)]),
    )  # fmt: skip
    assert torch.equal(more.run()[: len(PATTERN)], given.run())


def test_only_the_gradients_that_are_asked_for_and_of_no_rows() -> None:
    given = layer("gated", PATTERN, torch.float32, biased=False)
    x = given.x.clone().requires_grad_()
    given.of(x, given.weights, *given.experts).sum().backward()
    assert x.grad is not None
    nobody = given.gradients(slice(0, 0))
    assert not any(part.any() for part in nobody)
