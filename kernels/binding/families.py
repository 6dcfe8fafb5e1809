"""List the model families that are bound exactly, and what tells one from another.

Hugging Face writes each family's modules out in full, under the family's own prefix (``Qwen3Attention``,
``Qwen3MLP``, ...). What the bound forward needs to know beyond the config is in `Family`.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import transformers
from packaging.version import Version

from samebit.kernels.binding.delta.family import DeltaFamily
from samebit.kernels.binding.epilogue import Epilogue, scaled_down, scaled_up, soft_capped, unchanged
from samebit.kernels.binding.experts.family import SIGMOID, ExpertFamily, Router, SharedExperts
from samebit.kernels.binding.latent.family import IndexerFamily, LatentFamily

_RELEASE = Version(transformers.__version__).release
RECURRENT_MASKS = _RELEASE >= (5, 13)
"""Tells that transformers has masks of recurrent layers, and renames Mamba and attention layers on reading."""
_NEW_NAMES = {"mamba": "linear_attention", "attention": "full_attention"} if RECURRENT_MASKS else {}


class BindingError(ValueError):
    """The model can not be bound exactly; the message names every reason."""


@dataclass(frozen=True)
class AttentionFamily:
    """Describes the attention of one family, beyond what a module has as attributes: a config may hold what its family
    does not read, as a window of Mistral's in a Llama that was made of one.

    Attributes:
        qk_norm: normalise queries and keys not at all, per head, or over all heads together.
        qk_norm_switch: the config's key for whether they are normalised; empty where they always are.
        sinks: the softmax has one more score a head, a parameter.
        fused: one ``qkv_proj`` instead of three.
        gated: ``q_proj`` also gives a gate a head, whose sigmoid is multiplied onto what is attended to.
        rope_per_layer_type: separate rotary frequencies for local and global layers.
        window_of_all: the mask of all layers has the config's window, of which the modules know nothing.
        soft_capped: scores are capped where the config has an ``attn_logit_softcapping``.
    """

    qk_norm: Literal["none", "head", "full"] = "none"
    qk_norm_switch: str = ""
    sinks: bool = False
    fused: bool = False
    gated: bool = False
    rope_per_layer_type: bool = False
    window_of_all: bool = False
    soft_capped: bool = False


@dataclass(frozen=True)
class NormFamily:
    """Describes the RMSNorm of one family: ``offset`` is added to its weight (Gemma stores weight - 1), and epsilon is
    its attribute ``eps``."""

    offset: float = 0.0
    eps: str = "variance_epsilon"


@dataclass(frozen=True)
class MLPFamily:
    """Describes the MLP of one family.

    Attributes:
        form: its projections: a gate and one up, both in one ``gate_up_proj`` or ``input_linear``, or no gate (plain).
        activation: the config's name for it.
    """

    form: Literal["separate", "fused", "input_linear", "plain"] = "separate"
    activation: str = "hidden_act"


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
class LayerFamily:
    """Describes the layers of one family.

    Attributes:
        types: those that a layer may have; of names that transformers 5.13 changed on reading, the older ones.
        required: a layer type without which Hugging Face can not run the family, if there is one.
        pre_norm: they add attention or a mixer of a norm, then an MLP or experts of one: each is one call in a rollout.
        masks_since: the transformers since which a decoder with recurrent ones takes a mask for each kind of layer.
    """

    types: tuple[str, ...] = ("full_attention", "sliding_attention")
    required: str = ""
    pre_norm: bool = False
    masks_since: tuple[int, int] = (5, 13)

    @property
    def allowed(self) -> tuple[str, ...]:
        """Return the types that a layer may have, as configs of this version of transformers name them."""
        return tuple(dict.fromkeys(_NEW_NAMES.get(kind, kind) for kind in self.types))


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
        wrapped: Hugging Face has its text model alone, and inside a ``...ForConditionalGeneration`` with vision too.
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
    wrapped: bool = False

    @property
    def masks_by_layer(self) -> bool:
        """Return whether its decoder takes masks by kinds of layers for recurrent ones, and drops a ready one there."""
        return self.layers.masks_since <= _RELEASE

    @property
    def model_classes(self) -> tuple[str, ...]:
        """Return the class names of its causal language models."""
        ends = ("ForCausalLM", "ForConditionalGeneration") if self.wrapped else ("ForCausalLM",)
        return tuple(map(self.class_name, ends))

    def class_name(self, part: str) -> str:
        """Return Hugging Face's name of one of the family's classes: 'Attention', 'MLP', ..."""
        return self.prefix + part


_HEAD_NORMS = AttentionFamily("head")
_WINDOW = AttentionFamily(window_of_all=True)
_GEMMA_NORM = NormFamily(1.0, "eps")
_PRE_NORM = LayerFamily(pre_norm=True)
_SPARSE = LayerFamily(("deepseek_sparse_attention", "indexed_attention"), pre_norm=True)  # before 5.18, and since
_GRANITE_ROUTER = Router("router", ("TopKGating", "TopKRouter"), logits_last=_RELEASE < (5, 21))
_DELTA_LAYERS = LayerFamily(("linear_attention", "full_attention"))
_QWEN_SHARED = SharedExperts("shared_expert", "shared_expert_gate")
_OF_CHOSEN = ExpertFamily("SparseMoeBlock", "softmax_of_chosen")
_SOFTMAX = ExpertFamily("SparseMoeBlock", "softmax", normalised="norm_topk_prob")

_QWEN3_NEXT = Family(
    "Qwen3Next",
    unchanged,
    attention=AttentionFamily("head", gated=True),
    norm=_GEMMA_NORM,
    delta=DeltaFamily("by_key_head"),
    experts=replace(_SOFTMAX, shared=_QWEN_SHARED),
    layers=replace(_DELTA_LAYERS, pre_norm=True),
)
_QWEN3_5 = replace(_QWEN3_NEXT, prefix="Qwen3_5", delta=DeltaFamily("joined"), experts=None, wrapped=True)

FAMILIES = {
    name: family
    for family in (
        Family("Llama", unchanged, layers=_PRE_NORM),
        Family("Qwen2", unchanged, layers=_PRE_NORM),
        Family("Qwen3", unchanged, attention=_HEAD_NORMS, layers=_PRE_NORM),
        Family("Mistral", unchanged, attention=_WINDOW, layers=_PRE_NORM),
        Family("Phi3", unchanged, attention=replace(_WINDOW, fused=True), mlp=MLPFamily("fused")),
        Family(
            "Gemma2",
            soft_capped,
            attention=AttentionFamily(soft_capped=True),
            norm=_GEMMA_NORM,
            scaled_embedding="Gemma2TextScaledWordEmbedding",
            mlp=MLPFamily(activation="hidden_activation"),
        ),
        Family(
            "Gemma3",
            soft_capped,
            attention=AttentionFamily("head", rope_per_layer_type=True),
            norm=_GEMMA_NORM,
            scaled_embedding="Gemma3TextScaledWordEmbedding",
            mlp=MLPFamily(activation="hidden_activation"),
        ),
        Family("Olmo2", unchanged, attention=AttentionFamily("full")),
        Family("StableLm", unchanged),
        Family("Qwen3Moe", unchanged, attention=_HEAD_NORMS, experts=_SOFTMAX, layers=_PRE_NORM),
        Family("Olmoe", unchanged, attention=AttentionFamily("full"), experts=_SOFTMAX, layers=_PRE_NORM),
        Family("Mixtral", unchanged, attention=_WINDOW, experts=_OF_CHOSEN, layers=_PRE_NORM),
        Family(
            "Glm4Moe",
            unchanged,
            attention=AttentionFamily("head", "use_qk_norm"),
            experts=SIGMOID,
            layers=_PRE_NORM,
        ),
        Family(
            "DeepseekV2",
            unchanged,
            latent=LatentFamily(),
            layers=_PRE_NORM,
            experts=ExpertFamily(
                "Moe", "softmax", router=Router(classes=("", "TopkRouter")), group_score="best", method="topk_method"
            ),
        ),
        Family("DeepseekV3", unchanged, latent=LatentFamily("rope_interleave"), experts=SIGMOID, layers=_PRE_NORM),
        Family("Glm4MoeLite", unchanged, latent=LatentFamily("rope_interleave"), experts=SIGMOID, layers=_PRE_NORM),
        Family(
            "DeepseekV32",
            unchanged,
            latent=LatentFamily(indexer=IndexerFamily(halves=True, shares=False)),
            experts=SIGMOID,
            layers=_SPARSE,
        ),
        Family(
            "GlmMoeDsa",
            unchanged,
            latent=LatentFamily(by_version=True, indexer=IndexerFamily(halves=False, shares=True)),
            experts=SIGMOID,
            layers=_SPARSE,
        ),
        Family(
            "GptOss",
            unchanged,
            attention=AttentionFamily(sinks=True),
            experts=ExpertFamily(
                "MLP",
                "softmax_of_chosen",
                router=Router("router"),
                form="interleaved",
                transposed=True,
                biased=True,
                returns_weights=True,
            ),
        ),
        Family(
            "Bamba",
            unchanged,
            mamba=MambaFamily("Mixer", ("BambaRMSNormGated",), "mamba_conv_bias"),
            layers=LayerFamily(("mamba", "attention", "full_attention")),
        ),
        Family(
            "GraniteMoeHybrid",
            scaled_down,
            mlp=MLPFamily("input_linear"),
            experts=ExpertFamily("MoE", "softmax_of_chosen", router=_GRANITE_ROUTER),
            mamba=MambaFamily("MambaLayer", ("GraniteMoeHybridRMSNormGated",), "mamba_conv_bias"),
            layers=LayerFamily(("mamba", "attention", "full_attention")),
        ),
        Family(
            "NemotronH",
            unchanged,
            mlp=MLPFamily("plain", "mlp_hidden_act"),
            experts=replace(SIGMOID, form="plain"),
            mamba=MambaFamily(
                "Mamba2Mixer", ("Zamba2RMSNormGated", "NemotronHRMSNormGated"), "use_conv_bias", dt_floor=True
            ),
            layers=LayerFamily(("mamba", "attention", "mlp", "moe")),
        ),
        Family(
            "FalconH1",
            scaled_up,
            mamba=MambaFamily("Mixer", ("FalconH1RMSNormGated",), "mamba_conv_bias"),
            layers=LayerFamily(("hybrid",)),
        ),
        Family(
            "Zamba2",
            unchanged,
            mlp=MLPFamily("fused"),
            mamba=MambaFamily("MambaMixer", ("Zamba2RMSNormGated",), "use_conv_bias", dt_floor=True),
            layers=LayerFamily(("mamba", "hybrid"), required="hybrid", masks_since=(5, 15)),
        ),
        Family(
            "Mamba2",
            unchanged,
            mamba=MambaFamily("Mixer", ("MambaRMSNormGated",), "use_conv_bias", drops_positions=True),
            layers=LayerFamily(("mamba",)),
        ),
        _QWEN3_NEXT,
        _QWEN3_5,
        replace(
            _QWEN3_5,
            prefix="Qwen3_5Moe",
            # Its softmax over all experts is divided by the sum of the chosen, always: the softmax over the chosen.
            experts=ExpertFamily("SparseMoeBlock", "softmax_of_chosen", shared=_QWEN_SHARED),
        ),
        Family(
            "OlmoHybrid",
            unchanged,
            attention=AttentionFamily("full"),
            delta=DeltaFamily("apart", norm="o_norm", out="o_proj", negative_eigenvalues="linear_allow_neg_eigval"),
            layers=_DELTA_LAYERS,
        ),
        Family(
            "KimiLinear",
            unchanged,
            delta=DeltaFamily("by_channel", norm="o_norm", out="o_proj", mixer="DeltaAttention"),
            latent=LatentFamily(rotated=False),
            experts=SIGMOID,
            layers=_DELTA_LAYERS,
        ),
    )
    for name in family.model_classes
}
"""Finds a family by the class name of one of its causal language models."""

EXACT_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Lists the rotary scalings whose frequencies are fixed by the config alone."""

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("dropout", "residual_dropout", "embedding_dropout"),
)


def inexact_features(family: Family | None, config: dict[str, Any], parameter_names: list[str]) -> list[str]:
    """Return what a model has that is not exact, each with where it was seen; empty for a plain dense decoder.

    Args:
        family: of the model, if it is known.
        config: the Hugging Face config as a dictionary.
        parameter_names: of the model's state dict.
    """
    found = [f"dropout ({name}={config[name]})" for name in _DROPOUTS if config.get(name)]
    if family is None or family.experts is None:
        found += [f"routed experts ({name}={config[name]})" for name in _EXPERT_COUNTS if config.get(name)]
    if config.get("router_jitter_noise"):
        noise = config["router_jitter_noise"]
        found.append(f"random factors on the router's input (router_jitter_noise={noise}; exact: 0.0)")
    if config.get("clip_qkv") is not None:
        found.append(f"clamped queries, keys and values (clip_qkv={config['clip_qkv']}; exact: None)")
    found += _layer_features(family, config) + _rope_features(config)
    sinks = [name for name in parameter_names if name.endswith("sinks")]
    if sinks and not (family is not None and family.attention.sinks):
        found.append(f"attention sinks ({sinks[0]})")
    if config.get("alibi") or config.get("position_embedding_type") == "alibi":
        found.append("ALiBi position biases")
    if config.get("kv_lora_rank") and (family is None or family.latent is None):
        found.append(f"latent attention (kv_lora_rank={config['kv_lora_rank']})")
    if config.get("use_bidirectional_attention"):
        found.append("bidirectional attention (use_bidirectional_attention)")
    if not config.get("is_causal", True):  # transformers' masks read it of every config
        found.append(f"bidirectional attention (is_causal={config['is_causal']}; exact: True)")
    if config.get("use_parallel_residual"):
        found.append("parallel residual (use_parallel_residual)")
    if config.get("qk_layernorm"):
        found.append("per-head LayerNorm of queries and keys (qk_layernorm)")
    if config.get("mamba_ssm_cache_dtype", "float32") != "float32":
        found.append(f"a state that is not float32 (mamba_ssm_cache_dtype={config['mamba_ssm_cache_dtype']})")
    if config.get("quantization_config"):
        found.append("quantized weights (quantization_config)")
    return found


def _layer_features(family: Family | None, config: dict[str, Any]) -> list[str]:
    """Name the layers that Hugging Face may take for attention although the config calls them something else."""
    given = {*(config.get("layer_types") or ()), *(config.get("layers_block_type") or ())}
    layers = LayerFamily() if family is None else family.layers
    names = f"layer types given: {', '.join(sorted(given))}; allowed: {', '.join(layers.allowed)}"
    found = [f"layers of type {kind!r} ({names})" for kind in sorted(given - {*layers.allowed})]
    if layers.required and layers.required not in given:
        found.append(f"no layer of type {layers.required!r}, without which Hugging Face can not run it ({names})")
    return found


def _rope_features(config: dict[str, Any]) -> list[str]:
    parameters = config.get("rope_parameters") or {}
    sets = [entry for entry in parameters.values() if isinstance(entry, dict)] or [parameters]
    kinds = sorted({str(entry.get("rope_type", "default")) for entry in sets} - set(EXACT_ROPE_TYPES))
    return [f"{kind} rotary scaling (it depends on the longest position of the whole call)" for kind in kinds]
