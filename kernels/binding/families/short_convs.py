"""List families with gated short convolutions."""

from dataclasses import replace

from samebit.kernels.binding.epilogue import unchanged
from samebit.kernels.binding.families.expert_family import ExpertFamily, Router
from samebit.kernels.binding.families.family import (
    AttentionFamily,
    AttentionNames,
    DecoderNames,
    Family,
    LayerFamily,
    LayerNorms,
    MLPFamily,
    VisionFamily,
)

_LFM2 = Family(
    "Lfm2",
    unchanged,
    attention=AttentionFamily("head", names=AttentionNames(("q_layernorm", "k_layernorm"), "out_proj")),
    mlp=MLPFamily(activation="", names=("w1", "w3", "w2")),
    layers=LayerFamily(
        ("conv", "full_attention"),
        norms=LayerNorms("operator_norm", before_mlp="ffn_norm"),
        mlp="feed_forward",
        around=DecoderNames(norm="embedding_norm"),
        short_conv="ShortConv",
    ),
)

_ROUTER = Router(
    classes=("", "TopKRouter"),  # a linear layer before transformers 5.13
    handed=True,
    correction="expert_bias",
    switch="use_expert_bias",
    scaled=True,
    floor=1e-6,
)

SHORT_CONVS = (
    replace(_LFM2, wrapped=VisionFamily("Lfm2Vl")),
    replace(
        _LFM2,
        prefix="Lfm2Moe",
        layers=replace(_LFM2.layers, around=DecoderNames("pos_emb", "embedding_norm")),
        experts=ExpertFamily("SparseMoeBlock", "sigmoid", normalised="norm_topk_prob", router=_ROUTER),
    ),
)
