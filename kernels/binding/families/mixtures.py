"""List families of attention and routed experts."""

from dataclasses import replace

from samebit.kernels.binding.epilogue import scaled_down, unchanged
from samebit.kernels.binding.families.dense import HUNYUANS
from samebit.kernels.binding.families.expert_family import (
    GATED_SHARED,
    SIGMOID,
    SOFTMAX,
    SOFTMAX_OF_CHOSEN,
    ExpertFamily,
    Router,
    SharedExperts,
)
from samebit.kernels.binding.families.family import (
    MULTIPLIED,
    PRE_NORM,
    RELEASE,
    WINDOW,
    AttentionFamily,
    Family,
    MLPFamily,
    NormFamily,
    RotationFamily,
    VisionFamily,
)
from samebit.kernels.binding.vision.tower_family import QWEN3_VL_MOE

GRANITE = ExpertFamily(
    "MoE",
    "softmax_of_chosen",
    router=Router("router", ("TopKGating", "TopKRouter"), logits_last=RELEASE < (5, 21)),
)
"""Granite's kind, also in layers beside Mamba's."""

_GRANITE_LAYERS = replace(MULTIPLIED, mlp="block_sparse_moe")

MIXTURES = (
    Family("Qwen2Moe", unchanged, experts=replace(SOFTMAX, shared=GATED_SHARED), layers=PRE_NORM),
    Family(
        "Qwen3Moe",
        unchanged,
        attention=AttentionFamily("head"),
        experts=SOFTMAX,
        layers=PRE_NORM,
        wrapped=VisionFamily("Qwen3VLMoe", text="Qwen3VLMoeText", normalised=True, tower=QWEN3_VL_MOE),
    ),
    Family("Olmoe", unchanged, attention=AttentionFamily("full"), experts=SOFTMAX, layers=PRE_NORM),
    Family("Mixtral", unchanged, attention=WINDOW, experts=SOFTMAX_OF_CHOSEN, layers=PRE_NORM),
    Family(
        "Glm4Moe",
        unchanged,
        attention=AttentionFamily("head", "use_qk_norm"),
        norm=NormFamily(class_name="Glm4vMoeRMSNorm"),  # that of the last norm in GLM-4.5V
        experts=SIGMOID,
        layers=PRE_NORM,
        wrapped=VisionFamily("Glm4vMoe", text="Glm4vMoeText", attention=AttentionFamily()),  # without such norms
    ),
    Family("Dots1", unchanged, attention=AttentionFamily("head"), experts=SIGMOID, layers=PRE_NORM),
    Family("SolarOpen", unchanged, experts=SIGMOID, layers=PRE_NORM),
    Family(
        "MiniMaxM2",
        unchanged,
        attention=AttentionFamily("full", rotation=RotationFamily(width="rotary_dim")),
        experts=ExpertFamily("SparseMoeBlock", "sigmoid", router=Router(handed=True), normalised=True),
        layers=PRE_NORM,
    ),
    Family("GraniteMoe", scaled_down, experts=GRANITE, layers=_GRANITE_LAYERS),
    Family(
        "GraniteMoeShared",
        scaled_down,
        mlp=MLPFamily("input_linear"),
        experts=GRANITE,
        layers=replace(_GRANITE_LAYERS, beside="shared_mlp"),
    ),
    Family(
        "Ernie4_5_Moe",
        unchanged,
        attention=AttentionFamily(rotation=RotationFamily(neighbours=True)),
        experts=replace(SOFTMAX, normalised=True, router=Router(statics=True, least_sum="moe_norm_min")),
        layers=PRE_NORM,
    ),
    Family(
        "HunYuanMoEV1",
        unchanged,
        attention=HUNYUANS,
        experts=ExpertFamily(
            "Moe",
            "softmax",
            router=Router(classes=("Gate",), within="wg"),
            normalised=True,
            shared=SharedExperts("shared_mlp"),
        ),
        layers=PRE_NORM,
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
        layers=PRE_NORM,
        wrapped=VisionFamily("InternVL"),
    ),
)
