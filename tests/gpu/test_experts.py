"""A row of routed experts has the same bits on a GPU in every call, with every tile, and in a replayed graph."""

import pytest
import torch

from samebit.kernels.layout.options import ExpertOptions, ExpertWeights, RoutingOptions
from samebit.kernels.ops.activation import gated
from samebit.kernels.ops.experts.routed import routed_experts
from samebit.kernels.ops.experts.routing import Routing, route
from samebit.kernels.ops.linear import linear
from samebit.kernels.triton.experts.grouped import OneExpert
from samebit.kernels.triton.tiles.proved_equal import Layer, proved_equal
from samebit.kernels.triton.tiles.table import DTYPES, family, matmul_tiles

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SIZES = ((2048, 768, 32, 8), (100, 129, 13, 4), (2880, 2880, 4, 2))
"""Lists width, width of an expert, experts, experts of a row: as in Qwen3-30B-A3B and gpt-oss, and odd ones."""

FORMS = {
    "gated": ExpertOptions("silu", "gated"),
    "interleaved": ExpertOptions("silu", "interleaved", transposed=True, limit=7.0, alpha=1.702),
}
ROWS = 700
COUNTS = (1, 2, 3, 7, 16, 63, 64, 65, 129, 512)


class Block:
    """Holds a router and its experts, of random weights."""

    def __init__(self, sizes: tuple[int, int, int, int], form: str, dtype: torch.dtype) -> None:
        torch.manual_seed(sizes[0])
        width, inner, number, top_k = sizes
        self.options, self.routing = FORMS[form], RoutingOptions("softmax", top_k, normalised=True)
        up, down = random(number, 2 * inner, width), random(number, width, inner)
        if self.options.transposed:
            up, down = up.mT.contiguous(), down.mT.contiguous()
        biases = (random(number, 2 * inner), random(number, width)) if self.options.transposed else ()
        self.experts = ExpertWeights(*(part.to(dtype) for part in (up, down, *biases)))
        self.router = random(number, width).to(dtype)
        self.x = random(ROWS, width).to(dtype) * width**0.5

    def route(self, x: torch.Tensor) -> Routing:
        return route(x, self.router, None, None, self.routing)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.route(x)
        return routed_experts(x, chosen.ids, chosen.weights, self.experts, self.options)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda") / shape[-1] ** 0.5


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_row_has_the_same_bits_in_every_call(sizes: tuple[int, int, int, int], form: str, dtype: torch.dtype) -> None:
    block = Block(sizes, form, dtype)
    order = torch.randperm(ROWS, device="cuda")
    x = block.x.clone().requires_grad_()
    upstream = torch.randn_like(block.x)
    whole, routing = block.run(x), block.route(block.x)
    (gradient,) = torch.autograd.grad(whole, x, upstream)
    for rows in (order, *(slice(first, first + count) for count in COUNTS for first in (0, 5, ROWS - count))):
        few = block.x[rows].clone().requires_grad_()
        chosen = block.route(few.detach())
        assert torch.equal(chosen.ids, routing.ids[rows]), rows
        assert torch.equal(chosen.weights, routing.weights[rows]), rows
        found = block.run(few)
        assert torch.equal(found, whole[rows]), rows
        assert torch.equal(torch.autograd.grad(found, few, upstream[rows])[0], gradient[rows]), rows


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_an_output_of_an_expert_has_the_bits_of_a_linear_layer(
    sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    block = Block(sizes, "gated", dtype)
    for expert, rows in ((0, 1), (1, 7), (2, 300)):
        x, ids = block.x[:rows], torch.full((rows, 1), expert, dtype=torch.int32, device="cuda")
        products = linear(x, block.experts.up[expert]).chunk(2, dim=-1)
        expected = linear(gated("silu", *products), block.experts.down[expert])
        found = routed_experts(x, ids, torch.ones(rows, 1, device="cuda"), block.experts, block.options)
        assert torch.equal(found, expected)


def test_the_tiles_of_a_layer_have_equal_bits_for_experts_too() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if not any(entry.few for entry in family(device).matmul):
        pytest.skip("this GPU has one tile a layer")
    for width, inner, _, top_k in SIZES:
        for inputs, outputs, gathered in ((width, 2 * inner, top_k), (inner, width, 0)):
            for name, dtype in DTYPES.items():
                for transposed in (False, True):
                    multiply = OneExpert(gathered, transposed)
                    layer = Layer(device, inputs, outputs, dtype, transposed, multiply)
                    entry = matmul_tiles(device, inputs, outputs, dtype)
                    for rung in entry.few:
                        assert proved_equal(layer, entry.tile, rung), (layer, name, rung)


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_replays_rows_that_choose_other_experts(form: str) -> None:
    block = Block(SIZES[0], form, torch.bfloat16)
    for count in (1, 64, 300):
        x = block.x[:count].clone()
        with torch.no_grad():
            block.run(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = block.run(x)
            for rows in (block.x[:count], block.x[-count:], block.x[:1].expand(count, -1), torch.zeros_like(x)):
                expected = block.run(rows)
                x.copy_(rows)
                graph.replay()
                assert torch.equal(out, expected)
