"""Measure a layer of routed experts of the sizes of Qwen3-30B-A3B: the part of benchmarks/gpu.py that is of no model.

How many of some 64 rows have other bits alone than among 4,096; the time of a forward at 1, 16, 64, 256 and 4,096 rows
as a CUDA graph, and the weights of the experts that were chosen over it, as a share of the bandwidth of a copy; and its
time, launched kernel by kernel, over the time of Hugging Face's experts with `grouped_mm` on the same choice.
"""

from collections.abc import Callable, Iterator

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from samebit.benchmarks.gpu_figures import Figure, Sizes, bandwidth, recorded, seconds
from samebit.kernels.layout.options import ExpertOptions, ExpertWeights, RoutingOptions
from samebit.kernels.ops.experts.routed import routed_experts
from samebit.kernels.ops.experts.routing import Routing, route

QWEN3_30B_A3B = Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)
"""The sizes of its layers; no more is read of it here."""


def experts(config: Qwen3MoeConfig, sizes: Sizes, device: str) -> Iterator[Figure]:
    """Count rows that differ alone and among others, then compare a forward with that of ``grouped_mm``.

    Both take the same experts and weights: the routing is not measured. Ours is measured as a graph too.
    """
    peer = _random_experts(config, device)
    weights, options = ExpertWeights(peer.gate_up_proj, peer.down_proj), ExpertOptions("silu", "gated")
    copied, nbytes = bandwidth(device), peer.gate_up_proj.nbytes + peer.down_proj.nbytes

    def ours(x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return routed_experts(x, routing.ids, routing.weights, weights, options)

    with torch.no_grad():
        x, routing = _random_rows(config, sizes.prefill_rows, device)
        yield Figure(f"rows of {len(x)} that differ alone", _differing(ours, x, routing), "")
        for count in (*sizes.sequences, sizes.prefill_rows):
            x, routing = _random_rows(config, count, device)
            few = routing.weights.to(peer.down_proj.dtype)
            eager = seconds(lambda x=x, r=routing: ours(x, r), device, sizes.repeats)
            theirs = seconds(lambda x=x, r=routing, w=few: peer(x, r.ids.long(), w), device, sizes.repeats)
            graph = seconds(recorded(lambda x=x, r=routing: ours(x, r), device), device, sizes.repeats)
            read = nbytes * len(routing.ids.unique()) / config.num_experts
            yield Figure(f"{count} rows, as a graph", graph * 1e3, "ms")
            yield Figure(f"{count} rows, as a graph: of the bandwidth", read / graph / copied, "")
            yield Figure(f"{count} rows, over grouped_mm", eager / theirs, "x")


def _random_experts(config: Qwen3MoeConfig, device: str) -> Qwen3MoeExperts:
    config._experts_implementation = "grouped_mm"
    with torch.device(device):
        layer = Qwen3MoeExperts(config).bfloat16()
    for parameter in layer.parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return layer


def _random_rows(config: Qwen3MoeConfig, count: int, device: str) -> tuple[torch.Tensor, Routing]:
    """Make rows and choose experts for them, with a router of random weights."""
    x, router = (torch.randn(rows, config.hidden_size, device=device) for rows in (count, config.num_experts))
    options = RoutingOptions("softmax", config.num_experts_per_tok, normalised=True)
    return x.bfloat16(), route(x.bfloat16(), router / config.hidden_size**0.5, None, None, options)


def _differing(run: Callable[[torch.Tensor, Routing], torch.Tensor], x: torch.Tensor, routing: Routing) -> int:
    """Count the rows, of some in all places, that have other bits alone than among all."""
    whole, differing = run(x, routing), 0
    for row in range(0, len(x), max(1, len(x) // 64)):
        own = slice(row, row + 1)
        alone = run(x[own], Routing(routing.ids[own], routing.weights[own], routing.logits[own]))
        differing += int(not torch.equal(alone[0], whole[row]))
    return differing
