"""Make tiny random-weight models of every bound family, with odd widths and logits that are not flat."""

import itertools
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from samebit.weight_sync.manifest import float32_names

from ..campaign import CAMPAIGN
from .relatives import GROUPS, MIXTURES, RELATIVES

DTYPES = (torch.float32, torch.bfloat16)
VOCAB = 1009
MAX_LEN = 320

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 200,
    "intermediate_size": 500,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LOCAL_AND_GLOBAL = {"sliding_window": 20, "query_pre_attn_scalar": 40}


def _scaled_rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {"head_dim": 32, "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **parameters}}


HUGGING_FACES_CHUNK = 32
"""Holds the chunk of Hugging Face's own scan alone, whose time grows with the square of it: longer than what it is
compared on, and no more.
"""

_MIXER = {
    "mamba_n_heads": 10,
    "mamba_d_head": 40,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": HUGGING_FACES_CHUNK,
}
_GRANITE = {
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "layer_types": ["mamba", "attention"],
    "shared_intermediate_size": 500,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    **_MIXER,
}
_CHOICE = {"num_experts": 15, "num_experts_per_tok": 4}
"""Counts experts, of which a row takes some: as many as fill no vector."""

_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"head_dim": 80}),
    "Llama, biases, rope llama3": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            **_scaled_rope(
                "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=MAX_LEN // 4
            ),
        },
    ),
    "Llama, rope yarn": ("Llama", _scaled_rope("yarn", original_max_position_embeddings=MAX_LEN // 4)),
    "Qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "Qwen3": ("Qwen3", {"head_dim": 128}),
    "Mistral": ("Mistral", {"head_dim": 64, "sliding_window": 24}),
    "Phi3": ("Phi3", {}),
    "Phi3, a part of the head rotated": ("Phi3", {"partial_rotary_factor": 0.48}),
    "Gemma2": (
        "Gemma2",
        {"head_dim": 32, **_LOCAL_AND_GLOBAL, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "Gemma3": (
        "Gemma3",
        {"head_dim": 64, **_LOCAL_AND_GLOBAL, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Olmo2": ("Olmo2", {}),
    "StableLm": ("StableLm", {"partial_rotary_factor": 0.25}),
    "GraniteMoeHybrid, dense": ("GraniteMoeHybrid", {**_GRANITE, "layer_types": ["attention", "attention"]}),
    "Qwen3Moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 50,
            "norm_topk_prob": True,
            **_CHOICE,
        },
    ),
    "Olmoe": ("Olmoe", {**_CHOICE, "intermediate_size": 100}),
    "Mixtral": ("Mixtral", {"num_local_experts": 3, "intermediate_size": 100, "sliding_window": 24}),
    "Glm4Moe": ("Glm4Moe", {"head_dim": 52, "use_qk_norm": True, **GROUPS}),
    "GptOss": (
        "GptOss",
        {
            "sliding_window": 20,
            "intermediate_size": 100,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            **_scaled_rope(
                "yarn",
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=MAX_LEN // 4,
            ),
        },
    ),
}

_LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 50,
    "qk_rope_head_dim": 10,
    "qk_nope_head_dim": 23,
    "v_head_dim": 36,
}
_LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV3": ("DeepseekV3", {**_LATENTS, **GROUPS, "q_lora_rank": 41, "first_k_dense_replace": 1}),
    "DeepseekV3, whole queries, rope yarn": (
        "DeepseekV3",
        {
            **_LATENTS,
            **GROUPS,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "rope_interleave": False,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": MAX_LEN // 4,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "Glm4MoeLite": ("Glm4MoeLite", {**_LATENTS, **GROUPS, "q_lora_rank": 41, "qk_rope_head_dim": 16}),
    "DeepseekV2": (
        "DeepseekV2",
        {
            **_LATENTS,
            **GROUPS,
            "q_lora_rank": None,
            "qk_nope_head_dim": 24,  # Hugging Face's own rotation can not run heads of an odd size
            "topk_method": "greedy",
            "first_k_dense_replace": 1,
        },
    ),
}

_INDEX = {**_LATENTS, **GROUPS, "q_lora_rank": 41, "index_topk": 19, "index_head_dim": 27, "index_n_heads": 3}
_SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "GlmMoeDsa": (
        "GlmMoeDsa",
        {
            **_INDEX,
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "DeepseekV32": ("DeepseekV32", {**_INDEX, "first_k_dense_replace": 1}),
}

LATENTS = tuple(_LATENT)
"""Lists families with latent attention."""

SPARSE = tuple(name for name, (family, _) in _SPARSE.items() if hasattr(transformers, f"{family}Config"))
"""Lists families with sparse attention over latents, of those that this transformers has."""

FAMILIES = (*_OWN, *((*LATENTS, *RELATIVES) if CAMPAIGN else LATENTS[:1]))
"""Lists families without states; relatives of others only under `make soak`, and of those with latent attention
otherwise the first.
"""

_FALCON = {
    **_MIXER,
    "mamba_n_heads": 6,
    "mamba_d_ssm": 240,
    "head_dim": 50,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [0.9, 1.2],
    "key_multiplier": 0.8,
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "attention_out_multiplier": 0.8,
    "attention_in_multiplier": 1.1,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.1,
}
_ZAMBA = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "mamba", "hybrid", "hybrid"],
    "num_mem_blocks": 1,
    "mamba_d_state": 24,
    "mamba_ngroups": 2,
    "n_mamba_heads": 10,
    "adapter_rank": 8,
    "chunk_size": HUGGING_FACES_CHUNK,
}

_HYBRID: dict[str, tuple[str, dict[str, Any]]] = {
    "NemotronH": (
        "NemotronH",
        {
            "head_dim": 50,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 40,
            "n_groups": 2,
            "ssm_state_size": 100,
            "chunk_size": HUGGING_FACES_CHUNK,
        },
    ),
    "NemotronH, one group, no convolution bias": (
        "NemotronH",
        {
            "head_dim": 50,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 9,
            "mamba_head_dim": 24,
            "n_groups": 1,
            "ssm_state_size": 129,
            "use_conv_bias": False,
            "chunk_size": HUGGING_FACES_CHUNK,
        },
    ),
    "NemotronH, experts": (
        "NemotronH",
        {
            "head_dim": 50,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 40,
            "n_groups": 2,
            "ssm_state_size": 40,
            "chunk_size": HUGGING_FACES_CHUNK,
            "moe_latent_size": 68,
            "moe_shared_expert_intermediate_size": 60,
            **GROUPS,
        },
    ),
    "Bamba": ("Bamba", {"attn_layer_indices": [1], "num_attention_heads": 5, "num_key_value_heads": 1, **_MIXER}),
    "GraniteMoeHybrid": ("GraniteMoeHybrid", _GRANITE),
    "GraniteMoeHybrid, experts": (
        "GraniteMoeHybrid",
        {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 100},
    ),
    "GraniteMoeHybrid, rotary": ("GraniteMoeHybrid", {**_GRANITE, "position_embedding_type": "rope"}),
    "FalconH1": ("FalconH1", _FALCON),
    "FalconH1, norm before gate": ("FalconH1", {**_FALCON, "mamba_rms_norm": True}),
    "FalconH1, norm after gate": ("FalconH1", {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "Zamba2": ("Zamba2", _ZAMBA),
    "Zamba2, adapters, rotary": (
        "Zamba2",
        {**_ZAMBA, "num_mem_blocks": 2, "use_shared_attention_adapter": True, "use_mem_rope": True},
    ),
    "Mamba2": (
        "Mamba2",
        {
            "num_heads": 10,
            "head_dim": 40,
            "n_groups": 2,
            "state_size": 24,
            "time_step_limit": (0.01, 0.2),
            "chunk_size": HUGGING_FACES_CHUNK,
        },
    ),
}

_LINEAR = {
    "num_hidden_layers": 3,
    "head_dim": 40,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 36,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
_SHARED_EXPERT = {**_CHOICE, "moe_intermediate_size": 50, "shared_expert_intermediate_size": 60}
_KIMI: dict[str, tuple[str, dict[str, Any]]] = {
    "KimiLinear": (
        "KimiLinear",
        {
            **_LATENTS,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "qk_rope_head_dim": 7,  # of which nothing is rotated
            "linear_num_heads": 3,
            "linear_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "num_local_experts": 15,
            "num_experts_per_tok": 4,
            "n_group": 3,
            "topk_group": 2,
            "moe_intermediate_size": 50,
        },
    ),
}
"""Holds what transformers 5.23 has, and 5.10.4 has not."""

_DELTA: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Next": (
        "Qwen3Next",
        {**_LINEAR, **_SHARED_EXPERT, "linear_conv_kernel_dim": 3, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "Qwen3_5": ("Qwen3_5", {**_LINEAR, "linear_key_head_dim": 20, "linear_value_head_dim": 50}),
    "Qwen3_5Moe": ("Qwen3_5Moe", {**_LINEAR, **_SHARED_EXPERT, "linear_conv_kernel_dim": 2}),
    "OlmoHybrid": (
        "OlmoHybrid",
        {
            **_LINEAR,
            "head_dim": 50,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 100,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "OlmoHybrid, rotary, beta up to 1": (
        "OlmoHybrid",
        {
            **_LINEAR,
            "head_dim": 50,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "linear_allow_neg_eigval": False,
        },
    ),
    **(_KIMI if find_spec("transformers.models.kimi_linear") else {}),
}

_SHORT_CONV: dict[str, tuple[str, dict[str, Any]]] = {
    "Lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "head_dim": 40,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 7,
            "block_ffn_dim_multiplier": 1.1,
        },
    ),
    "Lfm2, biases, four taps": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "full_attn_idxs": [2],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "Lfm2Moe": (
        "Lfm2Moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "moe_intermediate_size": 50,
            "routed_scaling_factor": 1.5,
            **_CHOICE,
        },
    ),
}

SHORT_CONVS = tuple(_SHORT_CONV)
"""Lists families with gated short convolutions."""

KIMI = tuple(name for name in _KIMI if name in _DELTA)
"""Lists those of transformers 5.23 that there are."""

DELTAS = tuple(_DELTA)
"""Lists families with Gated DeltaNet layers."""

HYBRIDS = (*_HYBRID, *((*DELTAS, *SHORT_CONVS) if CAMPAIGN else DELTAS[:1]))
"""Lists families with states; under `make soak` all with Gated DeltaNet layers and with gated short convolutions,
otherwise the first of these."""

DIFFERENT_HYBRIDS = (
    "NemotronH",
    "NemotronH, experts",
    "Bamba",
    "GraniteMoeHybrid, experts",
    "FalconH1",
    "FalconH1, norm after gate",
    "Zamba2, adapters, rotary",
    "Mamba2",
    "Qwen3Next",
    "Lfm2",
)
"""Lists those of `HYBRIDS` that have a forward of their own: the others are these with another option."""


def of_families(cases: Iterable[tuple[Any, ...]], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return all cases under `make soak`, and otherwise those of these families, which each has in front."""
    return [case for case in cases if CAMPAIGN or case[0] in names]


EXPERTS = (
    "Qwen3Moe",
    "Olmoe",
    "Mixtral",
    "Glm4Moe",
    "GptOss",
    "NemotronH, experts",
    "GraniteMoeHybrid, experts",
    *((*LATENTS, *MIXTURES) if CAMPAIGN else LATENTS[:1]),
)
"""Lists families with routed experts."""

WITH_EXPERTS = (*EXPERTS, *LATENTS, *MIXTURES, *SPARSE, "Qwen3Next", "Qwen3_5Moe", "Lfm2Moe", *_KIMI, "Gemma4, experts")

CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""Names what routers add to their scores where they choose."""

_IMAGES = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 4}
_QWENS_IMAGES = {**_IMAGES, "depth": 1, "num_heads": 2, "out_hidden_size": 200, "num_position_embeddings": 16}
_TOWER = {**_IMAGES, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
_GEMMA4S = {
    "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "use_clipped_linears": True},
    "audio_config": {**_IMAGES, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 24},
}
_GEMMA4_12BS = {
    "vision_config": {"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 16},
    "audio_config": {"audio_embed_dim": 24},
}
_TILES = {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]}
_CLIPS = {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 32}
_PATCHES = {**_IMAGES, "num_hidden_layers": 1, "num_attention_heads": 2, "num_patches": 16}
WHOLES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3_5": ("Qwen3_5", {"vision_config": _QWENS_IMAGES}),
    "Qwen3_5Moe": ("Qwen3_5Moe", {"vision_config": _QWENS_IMAGES}),
    "Gemma3": ("Gemma3", {"vision_config": _TOWER, "mm_tokens_per_image": 4}),
    "Gemma4": ("Gemma4", {"vision_config": _GEMMA4S["vision_config"]}),
    "Gemma4, inputs of layers, shared keys": ("Gemma4", _GEMMA4S),
    "Gemma4, experts": ("Gemma4", _GEMMA4S),
    "Gemma4Unified": ("Gemma4Unified", _GEMMA4_12BS),
    "Mistral": ("Mistral3", {"vision_config": {**_TOWER, "head_dim": 16}}),
    "Ministral3": ("Mistral3", {"vision_config": {**_TOWER, "head_dim": 16}}),
    "Glm4, as inside of GLM-4.1V": ("Glm4v", {"vision_config": {**_QWENS_IMAGES, "image_size": 16}}),
    "Glm4Moe, biases": ("Glm4vMoe", {"vision_config": {**_QWENS_IMAGES, "image_size": 16}}),
    "Qwen2": ("Qwen2_5_VL", {"vision_config": {**_QWENS_IMAGES, "fullatt_block_indexes": [0]}}),
    "Qwen2 in Qwen2VL": ("Qwen2VL", {"vision_config": {**_IMAGES, "depth": 1, "num_heads": 2, "embed_dim": 32}}),
    "Qwen3": ("Qwen3VL", {"vision_config": {**_QWENS_IMAGES, "deepstack_visual_indexes": [0]}}),
    "Qwen3Moe": ("Qwen3VLMoe", {"vision_config": {**_QWENS_IMAGES, "deepstack_visual_indexes": [0]}}),
    "Lfm2": ("Lfm2Vl", {"vision_config": _PATCHES, "projector_hidden_size": 24}),
    "Lfm2, biases, four taps": ("Lfm2Vl", {"vision_config": _PATCHES, "projector_hidden_size": 24}),
    **{
        f"{name} in InternVL": ("InternVL", {"vision_config": _TILES})
        for name in ("Qwen2", "Qwen3", "Qwen3Moe", "GptOss", "Llama")
    },
    **{f"{name} in Llava": ("Llava", {"vision_config": _CLIPS}) for name in ("Llama", "Mistral", "Qwen2")},
    **{f"{name} in LlavaNext": ("LlavaNext", {"vision_config": _CLIPS}) for name in ("Llama", "Mistral", "Qwen2")},
    "Qwen2 in LlavaOnevision": ("LlavaOnevision", {"vision_config": {**_TOWER, "vision_use_head": False}}),
}
"""Holds, by family, what Hugging Face calls the model with vision around it, and what that one's config has; behind
"in", it is one of several around that family."""

IMAGES_TURN: dict[str, dict[str, Any]] = {
    "Glm4v": {"mrope_section": [4, 5, 3]},
    "Glm4vMoe": {"mrope_section": [4, 5, 4]},
    "Qwen2_5_VL": {"mrope_section": [9, 8, 8]},
    "Qwen2VL": {"mrope_section": [9, 8, 8]},
    "Qwen3VL": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
    "Qwen3VLMoe": {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
}
"""Holds, by the name of a whole, the parameters of positions that images have, whose text model is in no other."""

_OF_ALL_LAYERS = ("model_type", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers")

_NOT_OF_MAMBA2 = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")


def in_text(name: str) -> str:
    """Return the name of a family's model without what tells the kind of vision around it."""
    return name.partition(" in ")[0]


def _config_class(family: str) -> type:
    of_text = family in ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")
    return getattr(transformers, f"{family}TextConfig" if of_text else f"{family}Config")


def make_config(name: str, **changes: Any) -> Any:
    families = {**_OWN, **RELATIVES, **_LATENT, **_SPARSE, **_HYBRID, **_DELTA, **_SHORT_CONV}
    family, own = families[in_text(name)]
    fields = {**_COMMON, **own, **changes}
    if family == "Mamba2":
        fields = {key: value for key, value in fields.items() if key not in _NOT_OF_MAMBA2}
    return _config_class(family)(**fields, attn_implementation="eager")


def make_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Return a new, unbound model in evaluation mode; always the same weights."""
    config = make_config(name, **changes)
    kind = type(config).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    return _made(kind, config, in_text(name) in WITH_EXPERTS, dtype)


def make_wrapped(
    name: str, *, tied: bool = False, around: dict[str, Any] | None = None, **changes: Any
) -> PreTrainedModel:
    """Return the same wrapped with a small model of vision, as Hugging Face publishes it; ``around``: what else the
    whole's config has."""
    kind, own = WHOLES[name]
    own = {**own, **(around or {})}
    text = make_config(name, **changes).to_dict()
    if kind in IMAGES_TURN:
        unread = () if kind in ("Qwen2_5_VL", "Qwen2VL") else _OF_ALL_LAYERS  # the others' layers have no windows
        text = {key: value for key, value in text.items() if key not in ("model_type", *unread)}
        text["rope_parameters"] = {**text["rope_parameters"], **IMAGES_TURN[kind]}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, **own, tie_word_embeddings=tied, attn_implementation="eager"
    )
    return _made(f"{kind}ForConditionalGeneration", config, in_text(name) in WITH_EXPERTS, torch.float32)


def _made(kind: str, config: Any, experts: bool, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith(("_bias", "A_log")):  # experts' biases lie together
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4)
        for layer in [part for part in model.modules() if "layer_scalar" in part._buffers]:  # Gemma 4's
            layer.get_buffer("layer_scalar").add_(torch.randn(1) * 0.1)
            layer.get_parameter("self_attn.q_norm.weight").mul_(0.3)  # nothing else scales its scores
        for part in [part for part in model.modules() if "input_min" in part._buffers]:  # and its towers': infinite
            for bound in ("input_min", "input_max", "output_min", "output_max"):
                part.get_buffer(bound).fill_(-9.0 if bound.endswith("min") else 9.0)
        for correction in _corrections(model):
            correction.normal_(std=0.1)
    if experts:
        model.set_experts_implementation("eager")  # how Hugging Face computes them: grouped_mm takes no odd widths
    return cast(model, dtype).eval()


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Move to a dtype as loading does, which keeps in float32 what the class asks for, and corrections of routers."""
    kept = float32_names(model)
    values = {name: one for name, one in model.state_dict().items() if name in kept or name.endswith(CORRECTIONS)}
    model = model.to(dtype)
    tensors = model.state_dict(keep_vars=True)
    for name, value in values.items():
        tensors[name].data = value
    return model


def _corrections(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return what routers add to their scores where they choose, buffers or parameters."""
    tensors = (*model.named_buffers(), *model.named_parameters())
    return [tensor for name, tensor in tensors if name.endswith(CORRECTIONS)]


@cache
def bound_model(name: str, dtype: torch.dtype = torch.float32, ssm_chunk: int = 64, **changes: Any) -> PreTrainedModel:
    """Return a bound model that tests share: they don't change it."""
    from samebit.kernels import bind

    return bind(make_model(name, dtype, **changes), ssm_chunk=ssm_chunk)


def paired(names: Sequence[Any], *others: Iterable[Any], shift: int = 0) -> list[tuple[Any, ...]]:
    """Return each name with each combination of the others under `make soak`, and otherwise with one, in turns.

    Tests of the same names shift the turns, so that a name meets another combination there.
    """
    combinations = list(itertools.product(*others))
    if CAMPAIGN:
        return [(name, *one) for name in names for one in combinations]
    return [(name, *combinations[(shift + number) % len(combinations)]) for number, name in enumerate(names)]


def token_ids(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Draw random sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
