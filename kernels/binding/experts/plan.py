"""Find out what `bind` has to know about the blocks of routed experts of a model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.attached import Attachment
from samebit.kernels.binding.experts.forwards import (
    BlockFacts,
    ExpertFacts,
    RouterFacts,
    block_forward,
    experts_forward,
    router_forward,
)
from samebit.kernels.binding.experts.routes import RouteLayout
from samebit.kernels.binding.families.expert_family import ExpertFamily
from samebit.kernels.binding.families.family import BindingError
from samebit.kernels.layout.options import ExpertOptions, RoutingOptions
from samebit.kernels.ops.experts.routed import check_expert_options
from samebit.kernels.ops.experts.routing import check_options

CORRECTION = "e_score_correction_bias"
"""Names what a router adds to its scores where it chooses; always float32."""

CORRECTIONS = (CORRECTION, "expert_bias")
"""Lists the names that it has: LFM2-MoE's is the second."""

_LEAST_SUM = 1e-12
"""No row's chosen experts have so little of a softmax together, short of corrections that outweigh all scores."""


class ExpertPlan:
    """Decides the forwards of blocks of experts and of the modules in them, in the order of the traversal."""

    def __init__(self, prefix: str, family: ExpertFamily, config: Any, activation: str) -> None:
        self.prefix = prefix
        self.family = family
        self.config = config
        self.activation = activation
        self.inside: dict[str, Attachment | None] = {}
        self.layers: list[int] = []

    def is_block(self, module: nn.Module) -> bool:
        """Return whether this module is a block of experts of the family."""
        return type(module).__name__ == self.prefix + self.family.block

    def computes(self, name: str) -> bool:
        """Return whether the module of this name is a part of a block that was planned."""
        return name in self.inside

    def part(self, name: str) -> Attachment | None:
        """Return the forward of a part of a block; None where the block itself computes what it would."""
        return self.inside[name]

    def block(self, name: str, module: nn.Module) -> Attachment:
        """Plan a block and its parts.

        Raises:
            BindingError: a part of another class, sizes that do not fit, or experts that are spread over processes.
        """
        children = dict(module.named_children())
        routing, options = self._routing_options(name), self._expert_options(name, children)
        router, shared = self.family.router.name, self.family.shared
        routed = self._plan_router(f"{name}.{router}", children[router], routing)
        held = self._plan_experts(name, children, options)
        if routed != held:
            raise BindingError(
                f"{self.prefix}: the router of {name} chooses among {routed} experts, and the module holds {held}: it "
                "may be a part of them (expert parallelism), which is not bound exactly. Load all experts"
            )
        self._check(name, check_options, routing, routed)
        facts = BlockFacts(
            router=router,
            logits_last=self.family.router.logits_last,
            correction=self._handed(),
            linears=None if "experts" in children else options,
            latent="fc1_latent_proj" in children,
            shared=shared.name if shared.name in children else "",
            shared_gate=shared.gate,
            returns_weights=self.family.returns_weights,
        )
        return Attachment(block_forward, facts)

    def _handed(self) -> str:
        """Return the name of the correction that a block hands to its router; empty for none."""
        router = self.family.router
        there = not router.switch or bool(getattr(self.config, router.switch))
        return router.correction if router.handed and there else ""

    def route_layout(self) -> RouteLayout | None:
        """Return the layout of notes of what the routers choose; None without routers."""
        if not self.layers:
            return None
        return RouteLayout(tuple(self.layers), self.config.num_hidden_layers, self._top_k())

    def _top_k(self) -> int:
        """Return how many experts a row takes, in each layer alike.

        Raises:
            BindingError: not in each (the config may have a list, as Hunyuan's).
        """
        given = self.config.num_experts_per_tok
        numbers = sorted({given} if isinstance(given, int) else {*given[: self.config.num_hidden_layers]})
        if len(numbers) != 1:
            raise BindingError(
                f"{self.prefix}: num_experts_per_tok={given}, which differs from layer to layer; exact: one number in "
                "all layers"
            )
        return int(numbers[0])

    def _plan_router(self, name: str, router: nn.Module, options: RoutingOptions) -> int:
        """Plan a router; return among how many experts it chooses."""
        self._check_class(name, router, self.family.router.classes)
        within = self.family.router.within
        nested = within if within in dict(router.named_children()) else ""
        corrected = self.family.scores == "sigmoid" and not self.family.router.handed
        last = self.family.router.logits_last
        statics = self.family.router.statics
        facts = RouterFacts(options, len(self.layers), corrected, statics, self.family.biased, nested, last)
        self.inside[name] = Attachment(router_forward, facts)
        if statics:
            self._check_class(f"{name}.moe_statics", router.get_submodule("moe_statics"), ("Statics",))
            self.inside[f"{name}.moe_statics"] = None
        if nested:
            self._check_class(f"{name}.{nested}", router.get_submodule(nested), ("",))
            self.inside[f"{name}.{nested}"] = None
        self.layers.append(next((int(part) for part in name.split(".") if part.isdigit()), 0))
        return len(router.get_parameter(f"{nested}.weight" if nested else "weight"))

    def _plan_experts(self, name: str, children: dict[str, nn.Module], options: ExpertOptions) -> int:
        """Plan the modules that hold the experts' weights; return how many experts they hold."""
        if "experts" not in children:
            for part in ("input_linear", "output_linear"):
                self._check_class(f"{name}.{part}", children[part], ("ParallelExperts",))
                self.inside[f"{name}.{part}"] = None
            return len(children["input_linear"].get_parameter("weight"))
        experts = children["experts"]
        self._check_class(f"{name}.experts", experts, self.family.experts)
        if vars(experts).get("_is_expert_parallel"):
            raise BindingError(
                f"{self.prefix}: {name}.experts is expert-parallel: it holds a part of the experts and sends rows to "
                "other processes, which is not bound exactly. Load the model without expert parallelism"
            )
        self.inside[f"{name}.experts"] = Attachment(experts_forward, ExpertFacts(options, self.family.biased))
        return len(experts.get_parameter("down_proj"))

    def _routing_options(self, name: str) -> RoutingOptions:
        family, config = self.family, self.config  # whose attributes have other names in Kimi-Linear's files
        groups = family.group_score != "none" and self._has_groups(name)
        key = family.normalised
        least = family.router.least_sum
        if least and getattr(config, least) > _LEAST_SUM:
            raise BindingError(
                f"{self.prefix}: {least}={getattr(config, least)} of {name}, the least that weights are divided by; "
                f"allowed: up to {_LEAST_SUM}"
            )
        return RoutingOptions(
            scores=family.scores,
            top_k=self._top_k(),
            normalised=bool(getattr(config, key)) if isinstance(key, str) and key else key is True,
            scale=float(config.routed_scaling_factor) if family.router.scaled or family.group_score != "none" else 1.0,
            floor=family.router.floor,
            groups=config.n_group if groups else 1,
            kept_groups=config.topk_group if groups else 1,
            group_score="best" if family.group_score == "best" else "best_two",
        )

    def _has_groups(self, name: str) -> bool:
        key = self.family.method
        if not key:
            return True
        method = getattr(self.config, key)
        if method not in ("greedy", "group_limited_greedy"):
            raise BindingError(f"{self.prefix}: {key}={method!r} of {name}; allowed: 'greedy', 'group_limited_greedy'")
        return bool(method == "group_limited_greedy")

    def _expert_options(self, name: str, children: dict[str, nn.Module]) -> ExpertOptions:
        family, limit, alpha = self.family, None, None
        if family.form == "interleaved":
            limit, alpha = (float(vars(children["experts"])[key]) for key in ("limit", "alpha"))
        options = ExpertOptions(self.activation, family.form, family.transposed, limit, alpha)
        self._check(name, check_expert_options, options)
        return options

    def _check(self, name: str, check: Callable[..., None], *arguments: Any) -> None:
        """Let an operation check the options of a block, and say which one it was."""
        try:
            check(*arguments)
        except ValueError as error:
            raise BindingError(f"{self.prefix}: {name}: {error}") from None

    def _check_class(self, name: str, module: nn.Module, allowed: tuple[str, ...]) -> None:
        kind = type(module).__name__
        known = [self.prefix + part if part else "Linear" for part in allowed]
        if kind not in known:
            raise BindingError(f"{self.prefix}: {name} is a {kind}, which is not bound exactly; known: {known}")


def check_corrections(model: nn.Module) -> None:
    """Check that corrections of routers have not been rounded.

    Raises:
        BindingError: one that is not float32, by name.
    """
    for name, buffer in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith(CORRECTIONS) and buffer.dtype is not torch.float32:
            raise BindingError(
                f"{name} is {buffer.dtype}; exact is torch.float32. A cast of the whole model (model.to(dtype)) rounds "
                "it, and experts are chosen by it: load the model with from_pretrained(..., dtype=...), which keeps "
                f"what its class asks for (_keep_in_fp32_modules_strict = ['{name.rpartition('.')[2]}']; MiniMax-M2's "
                "does not, and Kimi-Linear's does not before transformers 5.24, so set it there before), or give the "
                "buffer its float32 values again"
            )
