"""Find what the one call of a block of routed experts reads, behind that of a decoder layer.

What the block computes stands in the facts that `bind` gave to it and to its modules.
"""

from typing import Any

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
from samebit.kernels.binding.layers.linears import is_plain_mlp, linears_of
from samebit.kernels.binding.layers.untouched import runs
from samebit.kernels.binding.modules import mlp_forward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.experts import BlockOptions, BlockWeights
from samebit.kernels.layout.layers.weights import GatedWeights
from samebit.kernels.layout.options import ExpertWeights, Layer


def block_behind(block: Any, context: ForwardContext, wrapped: bool) -> ExpertBlock | None:
    """Return what the call of the experts behind a layer reads; None where a call of their modules does more than
    compute with it, for another kind of MLP, and where an adapter changes them. ``wrapped``: peft has put adapters into
    the model."""
    facts = block.__dict__.get("samebit")
    if not isinstance(facts, BlockFacts) or not facts.plain or not runs(block, block_forward):
        return None
    router, experts = block._modules[facts.router], block._modules["experts"]
    if not (runs(router, router_forward) and runs(experts, experts_forward)):
        return None
    of_router: RouterFacts = router.samebit
    correction = correction_of(router, of_router)
    every_row = _every_row(block, facts, context, wrapped)
    if of_router.nested or every_row is None:
        return None
    of_experts: ExpertFacts = experts.samebit
    options, (shared, gate) = of_experts.options, every_row
    weight, held = router._parameters["weight"], experts._parameters
    first = "up_proj" if options.form == "plain" else "gate_up_proj"
    biases = (held["gate_up_proj_bias"], held["down_proj_bias"]) if of_experts.biased else (None, None)
    weights = BlockWeights(
        (weight, router._parameters["bias"] if of_router.biased else None),
        ExpertWeights(held[first], held["down_proj"], *biases),
        shared,
        gate,
        correction,
    )
    number, width = weight.shape
    inner = held["down_proj"].shape[1 if options.transposed else 2]
    of_every_row = 0 if shared is None else len(shared.gate[0])
    sources = [*weights.present, *correction_sources(router, of_router)]
    return ExpertBlock(weights, BlockOptions(of_router.options, options, width, number, inner, of_every_row), sources)


def _every_row(
    block: Any, facts: BlockFacts, context: ForwardContext, wrapped: bool
) -> tuple[GatedWeights | None, Layer | None] | None:
    """Return what computes every row, and its gate, each None without; None where their modules have to be called."""
    if not facts.shared:
        return None, None
    mlp = block._modules[facts.shared]
    if not runs(mlp, mlp_forward) or not is_plain_mlp(mlp.samebit):
        return None
    inside = mlp._modules
    groups = [(inside["gate_proj"], inside["up_proj"]), (inside["down_proj"],)]
    groups += [(block._modules[facts.shared_gate],)] if facts.shared_gate else []
    linears = linears_of(tuple(groups), context, wrapped)
    if linears is None or any(linears[1]):
        return None
    (gate, up), (down,), *gates = linears[0]
    return GatedWeights(gate, up, down), gates[0][0] if gates else None
