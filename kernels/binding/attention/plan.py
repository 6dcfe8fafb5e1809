"""Find out what `bind` has to know about attention with keys and values, and about its rotary embeddings."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from samebit.kernels.binding.attention.forwards import AttentionFacts
from samebit.kernels.binding.families.family import BindingError, Family, frequencies_by_alpha
from samebit.kernels.binding.families.inexact import exact_positions
from samebit.kernels.binding.modules import RotaryFacts
from samebit.kernels.binding.shared_layer import adapter_of
from samebit.kernels.layout.kv_pages import PageLayout, layout_of_heads
from samebit.kernels.layout.options import AttentionOptions
from samebit.kernels.ops.rope import QueryFactors

ArgumentsOf = Callable[[str, str], tuple[Any, dict[str, str]]]
"""Returns, for a layer type and a rope type, the config that frequencies are computed from, and arguments."""


class AttentionPlan:
    """Decides the facts of attention, in the order of the traversal.

    Attributes:
        attentions: those found.
        rotated: of each rotary embedding the type of its layers, the pairs that it turns, and the part of a head that
            the config says these are.
    """

    def __init__(self, family: Family, config: Any) -> None:
        self.family = family
        self.config = config
        self.facts: dict[str, Any] = config.to_dict()
        self.attentions: list[AttentionFacts] = []
        self.rotated: list[tuple[str, int, float]] = []

    def kv_layout(self) -> PageLayout:
        """Return the layout of the keys and values of the layers found."""
        return layout_of_heads([(facts.kv_heads, facts.head_dim) for facts in self.attentions])

    def attention(self, name: str, module: nn.Module) -> AttentionFacts:
        """Return the facts of an attention, the next one in the order of the layers."""
        own = vars(module)
        cap = self.facts["attn_logit_softcapping"] if self.family.attention.soft_capped else None
        facts = AttentionFacts(
            kv_heads=self.config.num_key_value_heads,
            head_dim=own["head_dim"],
            fused=self.family.attention.fused,
            qk_norm=self._qk_norm(),
            sinks=self.family.attention.sinks,
            gated=self.family.attention.gated,
            options=AttentionOptions(len(self.attentions), own["scaling"], self._window(own), cap or 0.0),
            key_multiplier=own.get("key_multiplier", 1.0),
            adapter=adapter_of(self.family.prefix, self.config, name, module, "linear_q_adapter_list"),
            scaled_queries=self.family.attention.scaled_queries,
            rotation=self._rotation(own),
            names=self.family.attention.names,
        )
        if facts.qk_norm == "full":
            self._check_norms(name, module, facts.head_dim)
        self.attentions.append(facts)
        return facts

    def _check_norms(self, name: str, module: nn.Module, head_dim: int) -> None:
        """Check that the norms over all heads are as wide as these are.

        Raises:
            BindingError: a norm of another width, by name.
        """
        for part, heads in (("q", self.config.num_attention_heads), ("k", self.config.num_key_value_heads)):
            width = module.get_parameter(f"{part}_norm.weight").numel()
            if width != heads * head_dim:
                raise BindingError(
                    f"{self.family.prefix}: {name}.{part}_norm has {width} weights; here {heads} heads of {head_dim} "
                    f"elements (head_dim) have {heads * head_dim}"
                )

    def _qk_norm(self) -> Literal["none", "head", "full", "rotated"]:
        attention = self.family.attention
        switch = attention.qk_norm_switch
        return attention.qk_norm if not switch or self.facts[switch] else "none"

    def _window(self, attention: dict[str, Any]) -> int:
        """Return how many tokens an attention with these attributes looks back at, itself the last; 0 for all."""
        if self.family.attention.rotation.windows_alone and not attention["is_sliding"]:
            return 0
        of_all = self.facts["sliding_window"] if self.family.attention.window_of_all else None
        window: int | None = attention.get("sliding_window", of_all)
        if window == 0:  # Qwen2-MoE's, of a config with such layers and without use_sliding_window
            raise BindingError(f"{self.family.prefix}: sliding_window=0, where nothing is seen; allowed: None, above 0")
        return window or 0

    def _rotation(self, attention: dict[str, Any]) -> Literal["none", "halves", "neighbours"]:
        """Return how an attention with these attributes rotates its queries and keys."""
        family = self.family.attention.rotation
        windows_alone = family.windows_alone and attention["sliding_window"] is not None
        if not (attention["is_sliding"] if windows_alone else attention.get(family.switch, True)):
            return "none"
        return "neighbours" if family.neighbours else "halves"

    def rotary(self, module: Any, arguments_of: ArgumentsOf | None) -> RotaryFacts:
        """Return the frequencies of a rotary module, computed anew: the ones that it has may have been cast.

        ``arguments_of``: says what those of a layer type are computed from; None where that is the model's config.
        """
        frequencies, scaling, rotation = {}, {}, self.family.attention.rotation
        for layer_type in sorted(set(self.config.layer_types)) if self.family.attention.rope_per_layer_type else [""]:
            parameters = self.config.rope_parameters
            parameters = parameters[layer_type] if layer_type else parameters
            kind = parameters["rope_type"]
            compute = module.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
            compute = frequencies_by_alpha if rotation.is_fixed_by_alpha(parameters) else compute
            config, arguments = self.config, {"layer_type": layer_type} if layer_type else {}
            if arguments_of is not None:
                config, arguments = arguments_of(layer_type, kind)
            part = parameters.get("partial_rotary_factor", self.facts.get("partial_rotary_factor"))
            part = 1.0 if part is None else part
            if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
                raise BindingError(f"{self.family.prefix}: partial_rotary_factor={part!r}; allowed: above 0, up to 1")
            with torch.device("cpu"):  # a GPU's powers, where it is torch's default device, are other numbers
                inverse, factor = compute(config, **arguments)
            self.rotated.append((layer_type, inverse.numel(), part))
            frequencies[layer_type] = inverse.to(torch.float32)
            scaling[layer_type] = float(factor)
        scaled = self.family.attention.scaled_queries
        factors = QueryFactors.of(self.config.rope_parameters) if scaled else None
        axes = self._axes(frequencies)
        return RotaryFacts(frequencies, scaling, factors, exact_positions(self.family, self.facts), axes)

    def _axes(self, frequencies: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Return by which position of an image's token each frequency turns, of a family whose vision is bound."""
        vision = self.family.wrapped
        if vision is None or vision.tower is None:
            return None
        return vision.tower.axes_of(self.config.rope_parameters.get("mrope_section"), len(frequencies[""]))

    def check_heads(self, sizes_of: dict[str, set[int]] | None) -> None:
        """Check that each query head has its keys, and each rotated element its pair, in all layers.

        ``sizes_of``: the sizes of heads in layers of each type; None where they are alike.

        Raises:
            BindingError: sizes that can not be computed, by their numbers.
        """
        heads, kv_heads = self.facts.get("num_attention_heads"), self.facts.get("num_key_value_heads")
        if self.attentions and heads and kv_heads and heads % kv_heads:
            raise BindingError(
                f"{self.family.prefix}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        sizes = {facts.head_dim for facts in self.attentions}
        for layer_type, pairs, part in self.rotated:
            for size in sizes if sizes_of is None else sizes_of[layer_type]:
                self._check_rotated(size, pairs, part)

    def _check_rotated(self, size: int, pairs: int, part: float) -> None:
        prefix = self.family.prefix
        found = [rotated for rotated in (int(size * part), size) if (rotated + 1) // 2 == pairs]
        if not found:
            raise BindingError(
                f"{prefix}: the rotary embedding has {pairs} frequencies, which turn {2 * pairs} elements of a head; "
                f"here heads have {size} (partial_rotary_factor={part})"
            )
        if found[0] % 2:
            raise BindingError(
                f"{prefix}: of heads of {size} elements {found[0]} are rotated, an odd number, which has no pairs; "
                "allowed: an even head size (head_dim, or hidden_size / num_attention_heads), and an even part of it "
                "(partial_rotary_factor)"
            )
