"""List families of attention over latents."""

from dataclasses import replace

from samebit.kernels.binding.epilogue import unchanged
from samebit.kernels.binding.families.expert_family import SIGMOID, ExpertFamily, Router
from samebit.kernels.binding.families.family import PRE_NORM, Family
from samebit.kernels.binding.families.latent_family import IndexerFamily, LatentFamily

_SPARSE = replace(PRE_NORM, types=("deepseek_sparse_attention", "indexed_attention"))  # before 5.18, and since

LATENTS = (
    Family(
        "DeepseekV2",
        unchanged,
        latent=LatentFamily(),
        layers=PRE_NORM,
        experts=ExpertFamily(
            "Moe", "softmax", router=Router(classes=("", "TopkRouter")), group_score="best", method="topk_method"
        ),
    ),
    Family("DeepseekV3", unchanged, latent=LatentFamily("rope_interleave"), experts=SIGMOID, layers=PRE_NORM),
    Family("Glm4MoeLite", unchanged, latent=LatentFamily("rope_interleave"), experts=SIGMOID, layers=PRE_NORM),
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
)
