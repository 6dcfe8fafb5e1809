"""Plan which forward each module of a model gets; `bind` carries the plan out."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from samebit.kernels.binding import modules as bound
from samebit.kernels.binding.attached import Attachment, Attachments
from samebit.kernels.binding.attention.forwards import attention_forward
from samebit.kernels.binding.attention.plan import AttentionPlan
from samebit.kernels.binding.causal_lm import HeadFacts, causal_forward, head_forward, keeping_positions, own_forward
from samebit.kernels.binding.delta.layer import MIXER
from samebit.kernels.binding.delta.layer import facts_of as facts_of_delta
from samebit.kernels.binding.delta.plan import DeltaPlan
from samebit.kernels.binding.experts.plan import ExpertPlan
from samebit.kernels.binding.experts.routes import RouteLayout
from samebit.kernels.binding.families.family import BindingError, Family, LayerNorms
from samebit.kernels.binding.gemma.plan import GemmaPlan
from samebit.kernels.binding.latent.plan import LatentPlan
from samebit.kernels.binding.layers.attention import facts_of
from samebit.kernels.binding.layers.known import LayerFacts
from samebit.kernels.binding.layers.latent import facts_of as facts_of_latent
from samebit.kernels.binding.layers.one_call import one_call_forward
from samebit.kernels.binding.lora.forwards import LinearFacts, layer_forward, linear_forward
from samebit.kernels.binding.lora.plan import ADAPTABLE, AdapterPlan
from samebit.kernels.binding.mamba.plan import MambaPlan
from samebit.kernels.binding.recurrent_plan import RecurrentPlan
from samebit.kernels.binding.shared_layer import adapter_of
from samebit.kernels.binding.short_conv.plan import ShortConvPlan
from samebit.kernels.binding.vision.plan import PlannedVision
from samebit.kernels.binding.vision.wrapping import WrappingFacts, wrapping_forward
from samebit.kernels.binding.wrapped import modules_of_vision, wrapping_module
from samebit.kernels.layout.kv_pages import PageLayout
from samebit.kernels.layout.states.memory import StateLayout

_CONTAINERS = (
    "ForCausalLM",
    "DecoderLayer",
    "Block",
    "MambaDecoderLayer",
    "AttentionDecoderLayer",
    "LinearAttentionDecoderLayer",
    "HybridLayer",
)
"""Ends the names of classes that only call others, behind the prefix."""

_NOTHING = Attachment(nn.Module.forward)
"""Says, as what a rule has found, that a module keeps the forward of its class."""


class Plan:
    """Decides, module by module in the order of the traversal, which forward it gets."""

    def __init__(self, family: Family, config: Any, model: nn.Module, ssm_chunk: int, exact: bool) -> None:
        self.family = family
        self.config = config
        self.facts: dict[str, Any] = config.to_dict()
        self.exact = exact
        self.wrapping = wrapping_module(family, model)
        of_tower = None if family.wrapped is None else family.wrapped.tower
        self.vision = PlannedVision.of(of_tower, self.wrapping, exact=exact)
        self.attention = AttentionPlan(family, config)
        self.mixers = _recurrent_plan(family, config, ssm_chunk)
        self.gemma = (
            GemmaPlan(family, config, self.attention.attentions, exact) if family.attention.by_layer_type else None
        )
        self.lora = AdapterPlan()
        self.latent = None if family.latent is None else LatentPlan(family.prefix, family.latent, config)
        self.experts = (
            None if family.experts is None else ExpertPlan(family.prefix, family.experts, config, self._activation)
        )

    @cached_property
    def unreached(self) -> frozenset[nn.Module]:
        """Return the modules of vision."""
        return modules_of_vision(self.wrapping)

    def kv_layout(self) -> PageLayout:
        """Return the layout of the KV, or of the latents, of the attention layers found."""
        if self.latent is not None:
            return self.latent.layout()
        return self.attention.kv_layout()

    def state_layout(self) -> StateLayout | None:
        """Return the layout of the states of the recurrent layers found; None without any."""
        return self.mixers.state_layout()

    def route_layout(self) -> RouteLayout | None:
        """Return the layout of notes of what routers choose; None without routers, or where torch computes them."""
        experts = self.experts if self.gemma is None else self.gemma.experts
        return None if experts is None or not self.exact else experts.route_layout()

    def of_model(self, model: nn.Module, parts: Attachments) -> list[tuple[nn.Module, Attachment]]:
        """Return what can be bound only when all modules are known: the decoder, its layers, the head, and the whole.

        ``parts``: what `attachment_of` gave for each module.
        """
        self.attention.check_heads(None if self.gemma is None else self.gemma.sizes)
        if self.latent is not None:
            self.latent.check_rotated([pairs for _, pairs, _ in self.attention.rotated])
        head = Attachment(head_forward, HeadFacts(self.family.epilogue, self.config))
        return [
            *self._decoders(model),
            *self._layers(model, parts).items(),
            *([(model.get_submodule("lm_head"), head)] if self.exact else []),
            (model, self._whole(model)),
        ]

    def _decoders(self, model: nn.Module) -> list[tuple[nn.Module, Attachment]]:
        """Plan what runs all layers, and what is around that where there is vision."""
        facts = bound.DecoderFacts(
            attends=self.kv_layout().num_layers > 0 or bool(self.family.layers.short_conv),
            masks_by_layer=self.state_layout() is not None and self.family.masks_by_layer,
            wrapped=self.family.wrapped is not None,
            plain=self.exact and self.family.layers.norms is not None,
            angles_by_type=self.family.attention.rope_per_layer_type,
            names=self.family.layers.around,
            embedding_factor=self.family.layers.embedding_factor,
            adapters=self.lora.adapters(),
            layer_inputs=self.gemma is not None and self.gemma.has_layer_inputs,
            drops_rows=self.gemma is not None and self.gemma.drops_rows(model),
            float32_residual=any(vars(module).get("residual_in_fp32", False) for module in model.modules()),
        )
        decoder = Attachment(bound.decoder_forward, facts)
        found = [(module, decoder) for module in model.modules() if self._is_decoder(module)]
        if self.wrapping is None:
            return found
        facts_around = WrappingFacts(self.vision.layout, self.vision.why_none)
        return [*found, (self.wrapping, Attachment(wrapping_forward, facts_around))]

    @property
    def _activation(self) -> str:
        """Return the activation of MLPs and experts."""
        return self.family.mlp.activation_of(self.facts)

    def _layers(self, model: nn.Module, parts: Attachments) -> dict[nn.Module, Attachment]:
        """Plan the decoder layers: those that may be one call, and where there are adapters all that are recomputed."""
        norms = self.family.layers.norms
        found = self._one_call_layers(model, parts, norms) if self.exact and norms is not None else {}
        if self.lora.layers:
            layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
            found |= {layer: Attachment(layer_forward) for layer in layers if layer not in found}
        return found

    def _whole(self, model: nn.Module) -> Attachment:
        own = own_forward(model)
        # A class of the same name from elsewhere, as code of a model's folder, may have another epilogue.
        known = own is type(model).forward and type(model).__module__.startswith("transformers.")
        own = keeping_positions(own) if self.family.mamba.drops_positions else own
        return Attachment(causal_forward(own, known=known and self.exact))

    def _one_call_layers(self, model: nn.Module, parts: Attachments, norms: LayerNorms) -> dict[nn.Module, Attachment]:
        """Return the decoder layers that a rollout may compute in one call; their class must be transformers' own."""
        kind = self.family.class_name("DecoderLayer")
        layers = [module for module in model.modules() if type(module).__name__ == kind]
        known = [layer for layer in layers if type(layer).__module__.startswith("transformers.")]
        adapted = bool(self.lora.layers)
        found = [(layer, self._facts_of_layer(layer, norms)(layer, parts, adapted)) for layer in known]
        return {layer: Attachment(one_call_forward, facts) for layer, facts in found if facts is not None}

    def _facts_of_layer(
        self, layer: nn.Module, norms: LayerNorms
    ) -> Callable[[nn.Module, Attachments, bool], LayerFacts | None]:
        """Return what puts together the facts of a layer of this kind."""
        if MIXER in layer._modules:
            return facts_of_delta
        if self.latent is not None:
            return facts_of_latent
        return partial(facts_of, family=self.family.layers, norms=norms)

    def _is_decoder(self, module: nn.Module) -> bool:
        return self.family.is_decoder(type(module).__name__)

    def attachment_of(self, name: str, module: nn.Module) -> Attachment | None:
        """Return what a module gets, by the first rule that knows it; None for one that keeps the forward of its class.

        Raises:
            BindingError: one that no rule knows, or that is not exact, by name.
        """
        self._check_weights(name, module)
        rules = (
            self._with_the_model, self._of_adapters, self._of_attention, self._of_mixers, self._of_angles,
            self._of_embedding, self._of_experts, self._rowwise, self._without_binding,
        )  # fmt: skip
        for rule in rules:
            found = rule(name, module)
            if found is not None:
                return None if found is _NOTHING else found
        raise BindingError(f"{self.family.prefix}: {name} is a {type(module).__name__}, which is not bound exactly")

    def _check_weights(self, name: str, module: nn.Module) -> None:
        """Check that weights are parameters: kernels read them, and no hook runs that would make them anew."""
        made = [key for key in ("weight", "bias") if isinstance(vars(module).get(key), torch.Tensor)]
        if made and module not in self.unreached:
            raise BindingError(
                f"{self.family.prefix}: the {made[0]} of {name} is no parameter but made anew before each call, as by "
                "torch.nn.utils.prune, weight_norm or spectral_norm, which is not bound exactly: make it a parameter "
                "first (prune.remove, remove_weight_norm, remove_spectral_norm)"
            )

    def _with_the_model(self, _name: str, module: nn.Module) -> Attachment | None:
        """Leave the decoder and what is around it to `of_model`; of vision nothing is reached but a bound tower."""
        if module in self.unreached:
            return self.vision.attachment_of(module) or _NOTHING
        return _NOTHING if self._is_decoder(module) or module is self.wrapping else None

    def _of_adapters(self, name: str, module: nn.Module) -> Attachment | None:
        """Plan a layer that peft wraps, or a part of one."""
        if self.lora.computes(name):
            return self.lora.part(name) or _NOTHING
        wrapped = self.lora.wrapped(name, module)
        if wrapped is None:
            return None
        parts = [plan for plan in (self.experts, self.latent) if plan is not None]
        if name == "lm_head" or self._in_indexer(name) or any(plan.computes(name) for plan in parts):
            raise BindingError(
                f"{self.family.prefix}: an adapter on {name}, which is not bound exactly; exact are adapters on "
                f"{ADAPTABLE}"
            )
        if not self.exact:
            raise BindingError(f"{self.family.prefix}: exact=False computes no adapters, and {name} has one")
        return wrapped

    def _of_attention(self, name: str, module: nn.Module) -> Attachment | None:
        """Plan attention, or a part of one over latents; of Gemma 4 what only it has."""
        if self.gemma is not None:
            return self.gemma.part(name, module)
        if type(module).__name__ == self.family.class_name("Attention"):
            if self.latent is not None:
                return self.latent.attention(name, module)
            return Attachment(attention_forward, self.attention.attention(name, module))
        if self.latent is not None and self.latent.computes(name):
            return self.latent.part(name) or _NOTHING
        return None

    def _of_mixers(self, name: str, module: nn.Module) -> Attachment | None:
        return self.mixers.mixer(name, module) if self.mixers.is_mixer(module) else None

    def _of_angles(self, _name: str, module: nn.Module) -> Attachment | None:
        known = type(module).__name__ in self.family.class_names("RotaryEmbedding")
        arguments_of = None if self.gemma is None else self.gemma.rotary_arguments
        return Attachment(bound.rotary_forward, self.attention.rotary(module, arguments_of)) if known else None

    def _of_embedding(self, name: str, module: nn.Module) -> Attachment | None:
        """Plan an embedding that does more than look up; one that writes to its weight is refused."""
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise BindingError(
                f"{self.family.prefix}: {name} has max_norm={module.max_norm}, which writes to its weight in each "
                "forward"
            )
        if type(module).__name__ != self.family.scaled_embedding:
            return None
        width = self.config.hidden_size if self.gemma is None else self.gemma.embedded_width(name, module)
        return Attachment(bound.embedding_forward, bound.EmbeddingFacts(width**0.5))

    def _of_experts(self, name: str, _module: nn.Module) -> Attachment | None:
        """Plan a part of a block of experts, which torch computes with ``exact=False``."""
        if self.experts is None or not self.experts.computes(name):
            return None
        return (self.experts.part(name) if self.exact else None) or _NOTHING

    def _rowwise(self, name: str, module: nn.Module) -> Attachment | None:
        """Plan what torch computes too, only with bits that depend on the batch; with ``exact=False`` it does."""
        found = self._exact_rowwise(name, module)
        return found if found is None or self.exact else _NOTHING

    def _without_binding(self, name: str, module: nn.Module) -> Attachment | None:
        return _NOTHING if self.mixers.computes(name) or self._needs_no_binding(module) else None

    def _in_indexer(self, name: str) -> bool:
        return self.latent is not None and self.latent.is_of_indexer(name)

    def _exact_rowwise(self, name: str, module: nn.Module) -> Attachment | None:
        family, kind = self.family, type(module).__name__
        if self.experts is not None and self.experts.is_block(module):
            return self.experts.block(name, module)
        if kind in (*family.class_names("MLP"), family.mlp.class_name):
            return Attachment(bound.mlp_forward, self._mlp(name, module))
        if kind in (family.class_name("RMSNorm"), family.norm.class_name):
            facts = bound.NormFacts(vars(module)[family.norm.eps], family.norm.offset)
            return Attachment(bound.rms_norm_forward, facts)
        if type(module) is nn.Linear:
            named = not self._in_indexer(name)  # no adapter can change what is in one
            return Attachment(linear_forward, LinearFacts(name) if named else None)
        if type(module) is nn.LayerNorm and module.weight is not None and module.bias is not None:
            return Attachment(bound.layer_norm_forward)
        return None

    def _needs_no_binding(self, module: nn.Module) -> bool:
        containers = [name for part in _CONTAINERS for name in self.family.class_names(part)]
        containers.append(self.family.whole_class)
        idle = isinstance(module, nn.Dropout) and module.p == 0.0
        activation = type(module) is type(ACT2FN[self._activation])  # the bound MLP computes it
        return (
            type(module).__name__ in containers
            or type(module) in (nn.ModuleList, nn.Sequential, nn.Embedding, nn.Identity)
            or idle
            or activation
        )

    def _mlp(self, name: str, module: nn.Module) -> bound.MLPFacts:
        gate, down = (vars(module).get(f"{part}_multiplier", 1.0) for part in ("gate", "down"))
        adapter = adapter_of(self.family.prefix, self.config, name, module, "gate_up_proj_adapter_list")
        return bound.MLPFacts(self._activation, self.family.mlp.form, gate, down, adapter, self.family.mlp.names)


def _recurrent_plan(family: Family, config: Any, ssm_chunk: int) -> RecurrentPlan:
    """Return what finds out about the recurrent layers of a family; of one without, Mamba2's, which finds none."""
    if family.layers.short_conv:
        return ShortConvPlan(family.prefix, family.layers.short_conv, ssm_chunk)
    if family.delta is not None:
        return DeltaPlan(family.prefix, family.delta, config, ssm_chunk)
    return MambaPlan(family, config, ssm_chunk)
