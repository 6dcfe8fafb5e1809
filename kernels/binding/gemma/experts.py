"""Bind routed experts that a layer calls itself, beside its MLP: their plan, and the forward of their router.

The router normalises its input without a weight, and the weights of the chosen are multiplied with a factor of each
expert. What experts compute is that of other families.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from samebit.kernels.binding.attached import Attachment
from samebit.kernels.binding.experts.forwards import ExpertFacts, experts_forward
from samebit.kernels.binding.experts.routes import RouteLayout, installed_notes
from samebit.kernels.binding.families.family import BindingError
from samebit.kernels.layout.options import ExpertOptions, RoutingOptions
from samebit.kernels.ops.experts.routed import check_expert_options
from samebit.kernels.ops.experts.routing import check_options, route


@dataclass(frozen=True)
class GemmaRouterFacts:
    """Says how a router chooses; ``layer`` counts the layers with experts."""

    options: RoutingOptions
    layer: int


class GemmaExpertPlan:
    """Decides the forwards of routers and experts, in the order of the traversal.

    layers: those with experts.
    """

    def __init__(self, prefix: str, config: Any, activation: str) -> None:
        self.prefix = prefix
        self.config = config
        self.activation = activation
        self.layers: list[int] = []

    def part(self, name: str, module: nn.Module) -> Attachment | None:
        """Return the forward of a router, of its projection, or of experts; None for any other module.

        Raises:
            BindingError: what is not exact, by name.
        """
        kind, last = type(module).__name__.removeprefix(self.prefix), name.rpartition(".")[2]
        if (kind, last) == ("TextRouter", "router"):
            return self._router(name, module)
        if (kind, last) == ("TextExperts", "experts"):
            return self._experts(name, module)
        return Attachment(projection_forward) if name.endswith(".router.proj") else None

    def route_layout(self) -> RouteLayout | None:
        """Return the layout of notes of what the routers choose; None without routers."""
        if not self.layers:
            return None
        return RouteLayout(tuple(self.layers), self.config.num_hidden_layers, self.config.top_k_experts)

    def _router(self, name: str, router: nn.Module) -> Attachment:
        projection = router.get_submodule("proj")
        if type(projection) is not nn.Linear:
            kind = type(projection).__name__
            raise BindingError(f"{self.prefix}: {name}.proj is a {kind}, exact is one of torch, without an adapter")
        options = RoutingOptions("softmax_of_chosen", self.config.top_k_experts, normalised=False)
        try:
            check_options(options, projection.out_features)
        except ValueError as error:
            raise BindingError(f"{self.prefix}: {name}: {error}") from None
        facts = GemmaRouterFacts(options, len(self.layers))
        self.layers.append(next(int(part) for part in name.split(".") if part.isdigit()))
        return Attachment(router_forward, facts)

    def _experts(self, name: str, experts: nn.Module) -> Attachment:
        held = len(experts.get_parameter("down_proj"))
        if vars(experts).get("_is_expert_parallel") or held != self.config.num_experts:
            raise BindingError(
                f"{self.prefix}: {name} holds {held} of {self.config.num_experts} experts, as a part of several "
                "processes (expert parallelism), which is not bound exactly. Load all experts"
            )
        options = ExpertOptions(self.activation, "gated")
        check_expert_options(options)
        return Attachment(experts_forward, ExpertFacts(options, biased=False))


def projection_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Raise: the router reads the weight, whose products are not rounded there."""
    raise ValueError("the projection of a bound router is not called by itself: call the router")


def router_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return probabilities ``[T, E]`` of the experts for rows ``[T, W]``, and weights and ids ``[T, top_k]`` of those
    chosen."""
    facts: GemmaRouterFacts = self.samebit
    x = self.norm(hidden_states) * self.scale * self.scalar_root_size
    routing = route(x, self.proj.weight, None, None, facts.options)
    notes = installed_notes()
    if notes is not None:
        notes.note(facts.layer, routing.ids)
    factors = F.embedding(routing.ids, self.per_expert_scale[:, None])[..., 0]
    # The probabilities are for who records them: no layer reads them.
    return routing.logits.softmax(dim=-1), routing.weights * factors.float(), routing.ids
