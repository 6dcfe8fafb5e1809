"""List families with Gated DeltaNet layers."""

from dataclasses import replace

from samebit.kernels.binding.epilogue import unchanged
from samebit.kernels.binding.families.delta_family import DeltaFamily
from samebit.kernels.binding.families.expert_family import GATED_SHARED, SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN
from samebit.kernels.binding.families.family import (
    AttentionFamily,
    Family,
    LayerFamily,
    LayerNorms,
    NormFamily,
    VisionFamily,
)
from samebit.kernels.binding.families.latent_family import LatentFamily
from samebit.kernels.binding.vision.tower_family import QWEN3_5, QWEN3_5_MOE

_DELTA_LAYERS = LayerFamily(("linear_attention", "full_attention"))

_QWEN3_NEXT = Family(
    "Qwen3Next",
    unchanged,
    attention=AttentionFamily("head", gated=True),
    norm=NormFamily(1.0, "eps"),
    delta=DeltaFamily("by_key_head"),
    experts=replace(SOFTMAX, shared=GATED_SHARED),
    layers=replace(_DELTA_LAYERS, norms=LayerNorms()),
)
_QWEN3_5 = replace(
    _QWEN3_NEXT,
    prefix="Qwen3_5",
    delta=DeltaFamily("joined"),
    experts=None,
    wrapped=VisionFamily("Qwen3_5", tower=QWEN3_5),
)

DELTAS = (
    _QWEN3_NEXT,
    _QWEN3_5,
    replace(
        _QWEN3_5,
        prefix="Qwen3_5Moe",
        wrapped=VisionFamily("Qwen3_5Moe", tower=QWEN3_5_MOE),
        # Its softmax over all experts is divided by the sum of the chosen, always: the softmax over the chosen.
        experts=replace(SOFTMAX_OF_CHOSEN, shared=GATED_SHARED),
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
