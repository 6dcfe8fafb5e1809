"""Define the forwards that `bind` gives to a block of routed experts, to its router and to its experts.

Invariants:

* Router and experts are called as modules: hooks of theirs run (Hugging Face records a router's logits by one), and
  under FSDP2 their weights are whole inside their own calls.
* A router gives ``(logits, weights, ids)`` under every version of transformers, as Hugging Face's newer ones do, or
  ``(ids, weights, logits)`` where those of its class do: Hugging Face records logits by their place. Here logits and
  weights are float32, never rounded, and ids ascend in each row.
"""

from dataclasses import dataclass
from typing import Any

import torch

from samebit.kernels.binding.experts.routes import installed_notes
from samebit.kernels.binding.residual import Addend
from samebit.kernels.layout.options import ExpertOptions, ExpertWeights, RoutingOptions
from samebit.kernels.ops.activation import gated
from samebit.kernels.ops.experts.routed import routed_experts
from samebit.kernels.ops.experts.routing import route


@dataclass(frozen=True)
class RouterFacts:
    """Says how a router chooses.

    Attributes:
        options: the operation's.
        layer: counts the layers with experts.
        corrected: it has an ``e_score_correction_bias``; where its block has, each call is handed that.
        biased: it has a ``bias``.
        statics: as in `expert_family.Router`.
        nested: its weight is that of the module of this name inside it; empty where it is its own.
        logits_last: as in `expert_family.Router`.
    """

    options: RoutingOptions
    layer: int
    corrected: bool
    statics: bool
    biased: bool
    nested: str
    logits_last: bool


@dataclass(frozen=True)
class ExpertFacts:
    """Says how experts compute: the operation's options, and whether there are biases."""

    options: ExpertOptions
    biased: bool


@dataclass(frozen=True)
class BlockFacts:
    """Says what a block of experts is made of.

    Attributes:
        router: the name of its router.
        logits_last: as in `expert_family.Router`.
        correction: the name of the router's correction, where it has that and hands it over; empty for none.
        linears: options of experts whose weights are in the modules ``input_linear`` and ``output_linear``; None where
            they are in a module ``experts``.
        latent: experts compute on a narrower row, between ``fc1_latent_proj`` and ``fc2_latent_proj``.
        shared: what the experts of this name compute is added; empty for none.
        shared_gate: by the sigmoid of what the projection of this name gives; empty for whole.
        returns_weights: the result is a pair, with the weights of the chosen.
    """

    router: str
    logits_last: bool
    correction: str
    linears: ExpertOptions | None
    latent: bool
    shared: str
    shared_gate: str
    returns_weights: bool

    @property
    def plain(self) -> bool:
        """Return whether it is a router with all it reads, experts, and what is shared, and its result is their sum."""
        return not (self.latent or self.correction)


def router_forward(
    self: Any, hidden_states: torch.Tensor, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a router's logits ``[T, E]``, and weights and ids ``[T, top_k]`` of those chosen, in its class's order;
    ``correction``: ``[E]``, of a block that has it."""
    facts: RouterFacts = self.samebit
    holder = self.get_submodule(facts.nested) if facts.nested else self
    correction = correction_of(self, facts) if correction is None else correction
    routing = route(
        hidden_states.reshape(-1, hidden_states.shape[-1]),
        holder.weight,
        holder.bias if facts.biased else None,
        correction,
        facts.options,
    )
    notes = installed_notes()
    if notes is not None:
        notes.note(facts.layer, routing.ids)
    given = routing.logits, routing.weights, routing.ids
    return given[::-1] if facts.logits_last else given


def correction_of(router: Any, facts: RouterFacts) -> torch.Tensor | None:
    """Return the correction ``[E]`` that a router has itself; None for one that has none."""
    if facts.statics:
        (parameter,) = correction_sources(router, facts)
        return parameter.detach()[0]
    return router.e_score_correction_bias if facts.corrected else None


def correction_sources(router: Any, facts: RouterFacts) -> tuple[torch.Tensor, ...]:
    """Return the parameter that a correction is a part of; nothing where it is no part of one."""
    return (router.moe_statics.e_score_correction_bias,) if facts.statics else ()


def experts_forward(self: Any, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute all experts of a block, each on the rows ``[T, W]`` that chose it."""
    facts: ExpertFacts = self.samebit
    up = self.up_proj if facts.options.form == "plain" else self.gate_up_proj
    biases = (self.gate_up_proj_bias, self.down_proj_bias) if facts.biased else (None, None)
    return routed_experts(hidden_states, ids, weights, ExpertWeights(up, self.down_proj, *biases), facts.options)


def block_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute a block of experts; ``hidden_states``: ``[..., W]``."""
    facts: BlockFacts = self.samebit
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    given = self.get_submodule(facts.router)(x, *((self.get_buffer(facts.correction),) if facts.correction else ()))
    _, weights, ids = given[::-1] if facts.logits_last else given
    if facts.latent:
        out = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x), ids, weights))
    elif facts.linears is None:
        out = self.experts(x, ids, weights)
    else:
        experts = ExpertWeights(self.input_linear.weight, self.output_linear.weight)
        out = routed_experts(x, ids, weights, experts, facts.linears)
    out = out.view(hidden_states.shape)
    if facts.shared:
        out = out + _shared(self, facts, hidden_states)
    out = Addend.of(out)
    return (out, weights) if facts.returns_weights else out


def _shared(self: Any, facts: BlockFacts, hidden_states: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self.get_submodule(facts.shared)(hidden_states)
    if not facts.shared_gate:
        return out
    gate = self.get_submodule(facts.shared_gate)(hidden_states)
    return gated("sigmoid", gate.expand_as(out).contiguous(), out)
