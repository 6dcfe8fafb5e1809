"""Find what the one call of a block of routed experts reads, behind that of a decoder layer.

What the block computes stands in the facts that `bind` gave to it and to its modules.
"""

from typing import Any

import torch

from samebit.kernels.binding.experts.forwards import (
    BlockFacts,
    ExpertFacts,
    RouterFacts,
    block_forward,
    correction_of,
    correction_sources,
    experts_forward,
    router_forward,
)
from samebit.kernels.binding.layers.known import ExpertBlock
from samebit.kernels.binding.layers.linears import in_parts, is_fused_mlp, is_plain_mlp, linears_of
from samebit.kernels.binding.layers.untouched import runs
from samebit.kernels.binding.modules import mlp_forward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.experts import BlockOptions, BlockWeights
from samebit.kernels.layout.layers.weights import GatedWeights
from samebit.kernels.layout.options import ExpertOptions, ExpertWeights, Layer


def block_behind(
    block: Any, context: ForwardContext, wrapped: bool, beside: Any = None, factor: float = 1.0
) -> ExpertBlock | None:
    """Return what the call of the experts behind a layer reads; None where a call of their modules does more than
    compute with it, for another kind of MLP, and where an adapter changes them.

    Args:
        block: of experts.
        context: of the call.
        wrapped: peft has put adapters into the model.
        beside: the layer's MLP that computes every row; None for the block's own, or none.
        factor: on what both give, before it is added to the residual.
    """
    facts = block.__dict__.get("samebit")
    if not isinstance(facts, BlockFacts) or not facts.plain or not runs(block, block_forward):
        return None
    router, held = block._modules[facts.router], _experts(block, facts)
    every_row = _every_row(block, facts, beside, context, wrapped)
    if held is None or every_row is None or not runs(router, router_forward):
        return None
    of_router: RouterFacts = router.samebit
    holder = router._modules[of_router.nested] if of_router.nested else router
    correction = correction_of(router, of_router)
    (experts, options), (shared, gate, parents) = held, every_row
    weight = holder._parameters["weight"]
    bias = holder._parameters["bias"] if of_router.biased else None
    weights = BlockWeights((weight, bias), experts, shared, gate, correction)
    number, width = weight.shape
    inner = experts.down.shape[1 if options.transposed else 2]
    of_every_row = 0 if shared is None else len(shared.gate[0])
    sources = [*weights.present, *correction_sources(router, of_router), *parents]
    of_block = BlockOptions(of_router.options, options, width, number, inner, of_every_row, factor)
    return ExpertBlock(weights, of_block, sources)


def _experts(block: Any, facts: BlockFacts) -> tuple[ExpertWeights, ExpertOptions] | None:
    """Return the weights of the experts; None where their module has to be called."""
    inside = block._modules
    if facts.linears is not None:  # whose modules the block does not call
        weights = (inside[name]._parameters["weight"] for name in ("input_linear", "output_linear"))
        return ExpertWeights(*weights), facts.linears
    experts = inside["experts"]
    if not runs(experts, experts_forward):
        return None
    of_experts: ExpertFacts = experts.samebit
    options, held = of_experts.options, experts._parameters
    first = "up_proj" if options.form == "plain" else "gate_up_proj"
    biases = (held["gate_up_proj_bias"], held["down_proj_bias"]) if of_experts.biased else (None, None)
    return ExpertWeights(held[first], held["down_proj"], *biases), options


_EveryRow = tuple[GatedWeights | None, Layer | None, list[torch.Tensor]]
"""Holds an MLP that computes every row, its gate, and parameters that weights of it are a part of."""


def _every_row(block: Any, facts: BlockFacts, beside: Any, context: ForwardContext, wrapped: bool) -> _EveryRow | None:
    """Return what computes every row, and its gate, each None without; None where their modules have to be called."""
    mlp = block._modules[facts.shared] if facts.shared else beside
    if mlp is None:
        return None, None, []
    if not runs(mlp, mlp_forward):
        return None
    inside, fused = mlp._modules, is_fused_mlp(mlp.samebit)
    groups: list[tuple[Any, ...]]
    if fused:
        groups = [(inside["input_linear"],), (inside["output_linear"],)]
    elif is_plain_mlp(mlp.samebit):
        groups = [(inside["gate_proj"], inside["up_proj"]), (inside["down_proj"],)]
    else:
        return None
    groups += [(block._modules[facts.shared_gate],)] if facts.shared and facts.shared_gate else []
    linears = whole = linears_of(tuple(groups), context, wrapped)
    if whole is None or any(whole[1]):
        return None
    if fused:
        half = len(whole[0][0][0][0]) // 2
        linears = in_parts(whole, (half, half))
    if linears is None:
        return None
    (gate, up), (down,), *gates = linears[0]
    parents = [part for part in whole[0][0][0] if part is not None] if fused else []
    return GatedWeights(gate, up, down), gates[0][0] if gates else None, parents
