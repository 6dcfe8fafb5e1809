"""List families of attention and MLPs."""

from dataclasses import replace

from samebit.kernels.binding.epilogue import scaled_down, soft_capped, unchanged
from samebit.kernels.binding.families.family import (
    MULTIPLIED,
    PRE_NORM,
    RELEASE,
    WINDOW,
    AttentionFamily,
    AttentionNames,
    Family,
    LayerNorms,
    MLPFamily,
    NormFamily,
    RotationFamily,
    VisionFamily,
)
from samebit.kernels.binding.vision.tower_family import QWEN2_5_VL, QWEN2_VL, QWEN3_VL

_GEMMA_NORM = NormFamily(1.0, "eps")
HUNYUANS = AttentionFamily(
    "rotated",
    rotation=RotationFamily(by_alpha=True),
    names=AttentionNames(norms=("query_layernorm", "key_layernorm")),
)
"""Hunyuan's kind of attention, also beside experts."""
_SANDWICH = replace(
    PRE_NORM,
    norms=LayerNorms(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
)
"""Gemma's kind of layers, since its second generation."""
_POST_NORM = replace(PRE_NORM, norms=LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm"))
"""OLMo-2's kind of layers."""
_NEIGHBOURS = AttentionFamily(rotation=RotationFamily(neighbours=True))
_MISTRAL3 = VisionFamily("Mistral3")  # whose text model is of either family
_QWEN2 = Family(
    "Qwen2",
    unchanged,
    mlp=MLPFamily(class_name="Qwen2MLP"),
    layers=PRE_NORM,
    wrapped=VisionFamily("Qwen2_5_VL", text="Qwen2_5_VL", tower=QWEN2_5_VL),
)
_GEMMA4 = Family(
    "Gemma4",
    soft_capped,
    attention=AttentionFamily("head", rope_per_layer_type=True, by_layer_type=True),
    norm=NormFamily(eps="eps"),
    scaled_embedding="Gemma4TextScaledWordEmbedding",
    mlp=MLPFamily(activation="hidden_activation"),
    wrapped=VisionFamily("Gemma4", epilogue=soft_capped),
)

DENSE = (
    Family("Llama", unchanged, layers=PRE_NORM, wrapped=VisionFamily("Llava")),
    _QWEN2,
    replace(_QWEN2, wrapped=VisionFamily("Qwen2VL", text="Qwen2VL", tower=QWEN2_VL)),
    Family(
        "Qwen3",
        unchanged,
        attention=AttentionFamily("head"),
        layers=PRE_NORM,
        wrapped=VisionFamily("Qwen3VL", text="Qwen3VLText", tower=QWEN3_VL),
    ),
    Family("Mistral", unchanged, attention=WINDOW, layers=PRE_NORM, wrapped=_MISTRAL3),
    Family("Ministral", unchanged, layers=PRE_NORM),
    Family(
        "Ministral3",
        unchanged,
        attention=replace(WINDOW, scaled_queries=True),
        layers=PRE_NORM,
        wrapped=_MISTRAL3,
    ),
    Family("Phi3", unchanged, attention=replace(WINDOW, fused=True), mlp=MLPFamily("fused"), layers=PRE_NORM),
    Family("Gemma", unchanged, norm=_GEMMA_NORM, scaled_embedding="GemmaTextScaledWordEmbedding", layers=PRE_NORM),
    Family(
        "Gemma2",
        soft_capped,
        attention=AttentionFamily(soft_capped=True),
        norm=_GEMMA_NORM,
        scaled_embedding="Gemma2TextScaledWordEmbedding",
        mlp=MLPFamily(activation="hidden_activation"),
        layers=_SANDWICH,
    ),
    Family(
        "Gemma3",
        soft_capped,
        attention=AttentionFamily("head", rope_per_layer_type=True),
        norm=_GEMMA_NORM,
        scaled_embedding="Gemma3TextScaledWordEmbedding",
        mlp=MLPFamily(activation="hidden_activation"),
        layers=_SANDWICH,
        wrapped=VisionFamily("Gemma3", unread=("final_logit_softcapping",)),
    ),
    _GEMMA4,
    replace(
        _GEMMA4,
        prefix="Gemma4Unified",
        scaled_embedding="Gemma4UnifiedTextScaledWordEmbedding",
        wrapped=VisionFamily("Gemma4Unified", epilogue=soft_capped),
    ),
    Family("Olmo2", unchanged, attention=AttentionFamily("full"), layers=_POST_NORM),
    Family(
        "Olmo3",
        unchanged,
        attention=AttentionFamily(
            "full", rope_per_layer_type=RELEASE >= (5, 13), rotation=RotationFamily(unscaled_windows=True)
        ),
        layers=_POST_NORM,
    ),
    Family("StableLm", unchanged, layers=PRE_NORM),
    Family("Granite", scaled_down, layers=MULTIPLIED),
    Family("SeedOss", unchanged, layers=PRE_NORM),
    Family(
        "SmolLM3",
        unchanged,
        attention=AttentionFamily(rotation=RotationFamily(switch="use_rope")),
        layers=replace(PRE_NORM, window_switch="use_sliding_window"),
    ),
    Family("Arcee", unchanged, mlp=MLPFamily("plain"), layers=PRE_NORM),
    Family(
        "Exaone4",
        unchanged,
        attention=AttentionFamily("head", rotation=RotationFamily(windows_alone=True)),
        layers=_POST_NORM,
    ),
    Family("HunYuanDenseV1", unchanged, attention=HUNYUANS, layers=PRE_NORM),
    Family("Glm", unchanged, attention=_NEIGHBOURS, mlp=MLPFamily("fused"), layers=PRE_NORM),
    Family(
        "Glm4",
        unchanged,
        attention=_NEIGHBOURS,
        norm=NormFamily(class_name="Glm4vRMSNorm"),
        mlp=MLPFamily("fused"),
        layers=replace(
            PRE_NORM, norms=LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
        ),
        wrapped=VisionFamily("Glm4v", text="Glm4vText"),
    ),
    Family("Ernie4_5", unchanged, attention=_NEIGHBOURS, layers=PRE_NORM),
)
