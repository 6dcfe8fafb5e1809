"""List families with gated short convolutions."""

from samebit.kernels.binding.epilogue import unchanged
from samebit.kernels.binding.families.family import AttentionFamily, AttentionNames, Family, LayerFamily, MLPFamily

SHORT_CONVS = (
    Family(
        "Lfm2",
        unchanged,
        attention=AttentionFamily("head", names=AttentionNames(("q_layernorm", "k_layernorm"), "out_proj")),
        mlp=MLPFamily(activation="", names=("w1", "w3", "w2")),
        layers=LayerFamily(("conv", "full_attention"), short_conv="ShortConv"),
    ),
)
