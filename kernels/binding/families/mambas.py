"""List families with Mamba2 layers."""

from dataclasses import replace

from samebit.kernels.binding.epilogue import scaled_down, scaled_up, unchanged
from samebit.kernels.binding.families.expert_family import SIGMOID
from samebit.kernels.binding.families.family import Family, LayerFamily, MambaFamily, MLPFamily
from samebit.kernels.binding.families.mixtures import GRANITE

MAMBAS = (
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
        experts=GRANITE,
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
)
