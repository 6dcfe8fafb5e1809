"""Say what tells one family of decoders from another, beyond a model's config.

Hugging Face writes each family's modules out in full, under the family's own prefix (``Qwen3Attention``,
``Qwen3MLP``, ...). `Family` is what the bound forward needs to know of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import transformers
from packaging.version import Version

from samebit.kernels.binding.epilogue import Epilogue, unchanged
from samebit.kernels.binding.families.delta_family import DeltaFamily
from samebit.kernels.binding.families.expert_family import ExpertFamily
from samebit.kernels.binding.families.latent_family import LatentFamily
from samebit.kernels.binding.vision.tower_family import TowerFamily

RELEASE = Version(transformers.__version__).release
"""Holds the numbers of transformers' version."""

RECURRENT_MASKS = RELEASE >= (5, 13)
"""Tells that transformers has masks of recurrent layers, and renames Mamba and attention layers on reading."""
_NEW_NAMES = {"mamba": "linear_attention", "attention": "full_attention"} if RECURRENT_MASKS else {}


class BindingError(ValueError):
    """The model can not be bound exactly; the message names every reason."""


@dataclass(frozen=True)
class AttentionNames:
    """Names modules of an attention: the norms of heads of queries and keys, and the projection of the result."""

    norms: tuple[str, str] = ("q_norm", "k_norm")
    out: str = "o_proj"


@dataclass(frozen=True)
class RotationFamily:
    """Describes how one family's attention rotates queries and keys.

    Attributes:
        neighbours: elements that are rotated together stand side by side, not a half apart.
        switch: a module's attribute for whether it rotates (a NoPE layer does not); empty where all do.
        width: the key by which published configs say how many elements of a head are rotated, which not every
            transformers reads; empty for none.
        windows_alone: where the config has a window, only the layers that have it are rotated; their modules say so by
            ``is_sliding``, and hold the window either way.
        unscaled_windows: a scaling is not meant for layers with a window, and not every transformers knows that.
        by_alpha: a scaling called ``dynamic`` that has an ``alpha`` is another: the alpha alone fixes the frequencies.
    """

    neighbours: bool = False
    switch: str = ""
    width: str = ""
    windows_alone: bool = False
    unscaled_windows: bool = False
    by_alpha: bool = False

    def is_fixed_by_alpha(self, parameters: dict[str, Any]) -> bool:
        """Return whether these parameters of a rotary embedding have such an alpha."""
        return self.by_alpha and parameters.get("rope_type") == "dynamic" and bool(parameters.get("alpha"))


def frequencies_by_alpha(config: Any) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies ``[R]`` that an alpha fixes, and the scaling, as Hugging Face's classes do."""
    size, parameters = config.head_dim, config.rope_parameters
    base = parameters["rope_theta"] * parameters["alpha"] ** (size / (size - 2))
    return 1.0 / (base ** (torch.arange(0, size, 2, device="cpu").float() / size)), 1.0


@dataclass(frozen=True)
class AttentionFamily:
    """Describes the attention of one family, beyond what a module has as attributes: a config may hold what its family
    does not read, as a window of Mistral's in a Llama that was made of one.

    Attributes:
        qk_norm: normalise queries and keys not at all, per head, over all heads together, or per head once they are
            rotated.
        qk_norm_switch: the config's key for whether they are normalised; empty where they always are.
        sinks: the softmax has one more score a head, a parameter.
        fused: one ``qkv_proj`` instead of three.
        gated: ``q_proj`` also gives a gate a head, whose sigmoid is multiplied onto what is attended to.
        rope_per_layer_type: separate rotary frequencies for local and global layers.
        window_of_all: the mask of all layers has the config's window, of which the modules know nothing.
        soft_capped: scores are capped where the config has an ``attn_logit_softcapping``.
        scaled_queries: queries are multiplied by ``1 + beta log(1 + position // n)``; beta and n are the
            ``llama_4_scaling_beta`` and ``original_max_position_embeddings`` of the config's ``rope_parameters``.
        rotation: of its queries and keys.
        names: of its modules.
        by_layer_type: layers of each type have heads of their own number and size, global ones perhaps no values beside
            their keys, the last perhaps no keys, and those with values a norm of them, as Gemma 4's (`gemma`).
    """

    qk_norm: Literal["none", "head", "full", "rotated"] = "none"
    qk_norm_switch: str = ""
    sinks: bool = False
    fused: bool = False
    gated: bool = False
    rope_per_layer_type: bool = False
    window_of_all: bool = False
    soft_capped: bool = False
    scaled_queries: bool = False
    rotation: RotationFamily = RotationFamily()
    names: AttentionNames = AttentionNames()
    by_layer_type: bool = False


@dataclass(frozen=True)
class NormFamily:
    """Describes the RMSNorm of one family: ``offset`` is added to its weight (Gemma stores weight - 1), and epsilon is
    its attribute ``eps``. ``class_name``: of its module, where that is not the family's for RMSNorm inside of every
    model."""

    offset: float = 0.0
    eps: str = "variance_epsilon"
    class_name: str = ""


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names the projections of an MLP, as nearly all families do."""


@dataclass(frozen=True)
class MLPFamily:
    """Describes the MLP of one family.

    Attributes:
        form: its projections: a gate and one up, both in one ``gate_up_proj`` or ``input_linear``, or no gate (plain).
        activation: the config's name for it; empty where it always is silu.
        names: of gate, up and down, where these are three.
        class_name: of its module, where that is not the family's for MLP inside of every model.
    """

    form: Literal["separate", "fused", "input_linear", "plain"] = "separate"
    activation: str = "hidden_act"
    names: tuple[str, str, str] = PROJECTIONS
    class_name: str = ""

    def activation_of(self, config: dict[str, Any]) -> str:
        """Return the activation that a config says."""
        return config[self.activation] if self.activation else "silu"


@dataclass(frozen=True)
class MambaFamily:
    """Describes the Mamba2 layers of one family.

    Attributes:
        mixer: what follows the prefix in the class name of the mixer; empty for a family without.
        gated_norms: class names of its norm, over the versions of transformers.
        conv_bias: the config's key for whether the mixers' convolutions have a bias.
        dt_floor: the mixer's time step is at least the config's ``time_step_min``, not within ``time_step_limit``.
        drops_positions: the causal language model does not hand ``position_ids`` on.
    """

    mixer: str = ""
    gated_norms: tuple[str, ...] = ()
    conv_bias: str = ""
    dt_floor: bool = False
    drops_positions: bool = False


@dataclass(frozen=True)
class LayerNorms:
    """Names the norms of a layer that adds attention or a mixer to its input, then an MLP or experts to the sum: before
    each, and of what each gives; empty for none."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""

    @property
    def names(self) -> tuple[str, str, str, str]:
        """Return them in the order of the calls."""
        return self.before_attention, self.after_attention, self.before_mlp, self.after_mlp


@dataclass(frozen=True)
class DecoderNames:
    """Names modules of a decoder: that of the angles, and the norm behind all layers."""

    angles: str = "rotary_emb"
    norm: str = "norm"


@dataclass(frozen=True)
class LayerFamily:
    """Describes the layers of one family.

    Attributes:
        types: those that a layer may have; of names that transformers 5.13 changed on reading, the older ones.
        required: a layer type without which Hugging Face can not run the family, if there is one.
        norms: of layers of which each is one call in a rollout, in a decoder that embeds, runs them, and a last norm;
            None for other layers.
        mlp: a layer's module for its MLP or its block of experts.
        around: names of what the decoder has around them.
        beside: its MLP that computes every row beside a block of experts, where a layer has one; empty for none.
        factor: attribute of a layer, a factor on what it adds; empty for none.
        embedding_factor: attribute of the decoder, a factor on the embeddings that the first layer takes; likewise.
        masks_since: the transformers since which a decoder with recurrent ones takes a mask for each kind of layer.
        window_switch: the config's key for whether the attention of a sliding layer has a window, which its mask always
            has; empty where both agree.
        short_conv: ends the class name of a gated short convolution, which some have instead of attention; empty for
            none.
    """

    types: tuple[str, ...] = ("full_attention", "sliding_attention")
    required: str = ""
    norms: LayerNorms | None = None
    mlp: str = "mlp"
    around: DecoderNames = DecoderNames()
    beside: str = ""
    factor: str = ""
    embedding_factor: str = ""
    masks_since: tuple[int, int] = (5, 13)
    window_switch: str = ""
    short_conv: str = ""

    @property
    def allowed(self) -> tuple[str, ...]:
        """Return the types that a layer may have, as configs of this version of transformers name them."""
        return tuple(dict.fromkeys(_NEW_NAMES.get(kind, kind) for kind in self.types))


PRE_NORM = LayerFamily(norms=LayerNorms())
"""Llama's kind of layers."""

MULTIPLIED = replace(PRE_NORM, factor="residual_multiplier", embedding_factor="embedding_multiplier")
"""Granite's kind of layers."""

WINDOW = AttentionFamily(window_of_all=True)
"""Mistral's kind of attention."""


@dataclass(frozen=True)
class VisionFamily:
    """Describes what Hugging Face puts around the text model of one family: a ``...ForConditionalGeneration``.

    Attributes:
        prefix: of its class names.
        text: of the class names of the text model in it; empty where they are those of the text model alone.
        unread: keys of the text model's config that the text model alone reads, and the whole does not.
        normalised: its routers divide weights by their sum, and have no key that says so.
        epilogue: what the whole does to the logits of its head.
        attention: that of the text model in it, where it is not that of the text model alone.
        tower: its vision, where that is bound; None where images are refused.
    """

    prefix: str
    text: str = ""
    unread: tuple[str, ...] = ()
    normalised: bool = False
    epilogue: Epilogue = unchanged
    attention: AttentionFamily | None = None
    tower: TowerFamily | None = None


@dataclass(frozen=True)
class Family:
    """Describes one Hugging Face decoder family.

    Attributes:
        prefix: of its class names.
        epilogue: what its causal language model does to the logits of its head. Every family says it.
        attention: its attention; of latents, `latent`.
        norm: its RMSNorm.
        mlp: its MLP.
        experts: its blocks of routed experts; None for a family without.
        layers: its layers.
        mamba: its Mamba2 layers.
        delta: its Gated DeltaNet layers; None for a family without.
        latent: its attention over latents; None for a family with keys and values.
        scaled_embedding: class of an embedding that multiplies by sqrt(hidden_size), if any.
        wrapped: what is around its text model where Hugging Face also has it with vision; None for text alone.
    """

    prefix: str
    epilogue: Epilogue
    attention: AttentionFamily = AttentionFamily()
    norm: NormFamily = NormFamily()
    mlp: MLPFamily = MLPFamily()
    experts: ExpertFamily | None = None
    layers: LayerFamily = LayerFamily()
    mamba: MambaFamily = MambaFamily()
    delta: DeltaFamily | None = None
    latent: LatentFamily | None = None
    scaled_embedding: str = ""
    wrapped: VisionFamily | None = None

    @property
    def masks_by_layer(self) -> bool:
        """Return whether its decoder takes masks by kinds of layers for recurrent ones, and drops a ready one there."""
        return self.layers.masks_since <= RELEASE

    @property
    def model_class(self) -> str:
        """Return the class name of its causal language model of text alone."""
        return self.class_name("ForCausalLM")

    @property
    def with_vision(self) -> Family:
        """Return the family as it is inside of one with vision."""
        if self.wrapped is None:
            return self
        experts, attention = self.experts, self.wrapped.attention or self.attention
        if experts is not None and self.wrapped.normalised:
            experts = replace(experts, normalised=True)
        inside = replace(self, attention=attention, experts=experts)
        return replace(inside, prefix=self.wrapped.text or self.prefix, epilogue=self.wrapped.epilogue)

    @property
    def whole_class(self) -> str:
        """Return the class name of the model with vision around it; empty where there is none."""
        return "" if self.wrapped is None else f"{self.wrapped.prefix}ForConditionalGeneration"

    @property
    def wrapping_class(self) -> str:
        """Return the class name of the module that holds text model and vision, without a head; empty likewise."""
        return "" if self.wrapped is None else f"{self.wrapped.prefix}Model"

    def is_decoder(self, kind: str) -> bool:
        """Return whether a class of this name runs all layers of the text model."""
        return kind in map(self.class_name, ("Model", "TextModel")) and kind != self.wrapping_class

    def class_name(self, part: str) -> str:
        """Return Hugging Face's name of one of the family's classes: 'Attention', 'MLP', ..."""
        return self.prefix + part

    def class_names(self, part: str) -> tuple[str, str]:
        """Return it as it is, and as it may be where the family has other such classes for vision."""
        return self.class_name(part), self.class_name(f"Text{part}")
