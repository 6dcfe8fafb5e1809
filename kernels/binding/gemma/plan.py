"""Find out what `bind` has to know about layers that differ by their type, as Gemma 4's do."""

import re
from inspect import signature
from typing import Any

from torch import nn

from samebit.kernels.binding.attached import Attachment
from samebit.kernels.binding.attention.forwards import AttentionFacts
from samebit.kernels.binding.families.family import BindingError, Family
from samebit.kernels.binding.gemma.experts import GemmaExpertPlan
from samebit.kernels.binding.gemma.forwards import (
    ActivationFacts,
    GemmaAttentionFacts,
    activation_forward,
    attention_forward,
    reading_forward,
    unscaled_norm_forward,
)
from samebit.kernels.binding.modules import NormFacts
from samebit.kernels.layout.options import AttentionOptions

_GLOBAL, _GLOBAL_SIZE = "full_attention", "global_head_dim"
"""Name the type of layers that see all tokens, and, in transformers' older configs, the size of their heads."""

_OF_LAYERS = "embed_tokens_per_layer"
"""Names the embedding that gives each layer a part of its own."""

_ACTIVATION = re.compile(r"(^|\.)layers\.\d+\.act_fn$")
"""Finds what a layer calls itself, on the gate of its own input; that of an MLP the bound MLP computes."""


class GemmaPlan:
    """Decides the forwards of what other families do not have, in the order of the traversal.

    Attributes:
        attentions: facts of the layers' attention, which this plan goes on with.
        own: how many layers, the first ones, have keys of their own.
        sizes: of the heads in layers of each type.
        pages: those of the last layer of each type that has keys of its own, which layers without read.
    """

    def __init__(self, family: Family, config: Any, attentions: list[AttentionFacts], exact: bool) -> None:
        self.family = family
        self.config = config
        self.attentions = attentions
        self.exact = exact
        self.activation: str = config.to_dict()[family.mlp.activation]
        self.types: list[str] = config.layer_types
        self.own = config.num_hidden_layers - config.num_kv_shared_layers
        self.sizes: dict[str, set[int]] = {}
        self.pages: dict[str, int] = {}
        self.experts = GemmaExpertPlan(family.prefix, config, self.activation)
        self._check_shared()

    def _check_shared(self) -> None:
        """Check that layers without keys find some before them.

        Raises:
            BindingError: one that finds none, by its type.
        """
        shared, layers = self.config.num_kv_shared_layers, self.config.num_hidden_layers
        if not 0 <= shared < layers:
            raise BindingError(
                f"{self.family.prefix}: num_kv_shared_layers={shared} of num_hidden_layers={layers}; allowed: 0 up to "
                f"{layers - 1}"
            )
        missing = sorted({*self.types[self.own :]} - {*self.types[: self.own]})
        if missing:
            raise BindingError(
                f"{self.family.prefix}: the last {shared} layers (num_kv_shared_layers) read the keys of an earlier "
                f"layer of their type, and there is none of type {missing[0]!r}"
            )

    def part(self, name: str, module: nn.Module) -> Attachment | None:
        """Return what a module gets that other families do not have; None for any other, and for what torch computes
        with ``exact=False``."""
        kind = type(module).__name__
        if kind in self.family.class_names("Attention"):
            return self._attention(name, module)
        of_experts = self.experts.part(name, module)
        if of_experts is not None:
            return of_experts if self.exact else Attachment(type(module).forward)
        if kind == self.family.class_name("RMSNorm") and "weight" not in module._parameters and self.exact:
            return Attachment(unscaled_norm_forward, NormFacts(vars(module)[self.family.norm.eps], 0.0))
        if _ACTIVATION.search(name) and self.exact:
            return Attachment(activation_forward, ActivationFacts(self.activation))
        return None

    @property
    def has_layer_inputs(self) -> bool:
        """Return whether each layer takes an embedding of its own; the class of the 12B knows none."""
        return bool(self.config.to_dict().get("hidden_size_per_layer_input"))

    def embedded_width(self, name: str, embedding: nn.Module) -> int:
        """Return how wide what an embedding gives to the model is, or to each layer.

        Raises:
            BindingError: one of layers that does not know every token.
        """
        if name.rpartition(".")[2] != _OF_LAYERS:
            return int(self.config.hidden_size)
        known = len(embedding.get_parameter("weight"))
        if known < self.config.vocab_size:
            raise BindingError(
                f"{self.family.prefix}: {name} knows {known} tokens (vocab_size_per_layer_input), and there are "
                f"{self.config.vocab_size} (vocab_size); allowed: at least as many"
            )
        return int(self.config.hidden_size_per_layer_input)

    def drops_rows(self, model: nn.Module) -> bool:
        """Return whether the decoder's class takes how many rows logits are made of, and leaves others out."""
        kind = self.family.class_name("TextModel")
        decoders = (module for module in model.modules() if type(module).__name__ == kind)
        return any("logits_to_keep" in signature(type(decoder).forward).parameters for decoder in decoders)

    def rotary_arguments(self, layer_type: str, kind: str) -> tuple[Any, dict[str, str]]:
        """Return what the frequencies of a layer type are computed from: a config, and arguments.

        Newer transformers have a config for each type of layers, and before that a key for the size of global heads.
        """
        arguments = {"layer_type": layer_type}
        if _GLOBAL_SIZE not in self.config.to_dict():
            return self.config.per_layer_config[layer_type], arguments
        of_global_heads = layer_type == _GLOBAL and kind == "proportional"
        return self.config, {**arguments, "head_dim_key": _GLOBAL_SIZE} if of_global_heads else arguments

    def _attention(self, name: str, module: nn.Module) -> Attachment:
        own, layer = vars(module), vars(module)["layer_idx"]
        kind, size, reads = self.types[layer], own["head_dim"], layer >= self.own
        self.sizes.setdefault(kind, set()).add(size)
        facts = AttentionFacts(
            kv_heads=self.attentions[self.pages[kind]].kv_heads if reads else self._kv_heads(name, module, size),
            head_dim=size,
            fused=False,
            qk_norm="head",
            names=self.family.attention.names,
            options=AttentionOptions(
                self.pages[kind] if reads else len(self.attentions), own["scaling"], own["sliding_window"] or 0
            ),
        )
        if reads:
            last = kind not in self.types[layer + 1 :]
            return Attachment(reading_forward, GemmaAttentionFacts(facts, kind, last=last))
        self.pages[kind] = len(self.attentions)
        self.attentions.append(facts)
        read = kind in self.types[self.own :] and kind not in self.types[layer + 1 : self.own]
        own_values = "v_proj" in dict(module.named_children())
        return Attachment(attention_forward, GemmaAttentionFacts(facts, kind if read else "", own_values))

    def _kv_heads(self, name: str, attention: nn.Module, size: int) -> int:
        """Return how many heads of keys a layer has.

        Raises:
            BindingError: a number that does not divide that of its queries.
        """
        keys = attention.get_submodule("k_proj")
        keys = dict(keys.named_children()).get("base_layer", keys)  # of a layer that peft wraps
        kv_heads = len(keys.get_parameter("weight")) // size
        if self.config.num_attention_heads % kv_heads:
            raise BindingError(
                f"{self.family.prefix}: {name} has num_attention_heads={self.config.num_attention_heads}, no multiple "
                f"of its {kv_heads} heads of keys"
            )
        return kv_heads
