"""List families of attention and routed experts."""

from samebit.kernels.binding.epilogue import unchanged
from samebit.kernels.binding.families.expert_family import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN, ExpertFamily, Router
from samebit.kernels.binding.families.family import AttentionFamily, Family, LayerFamily

_WINDOW = AttentionFamily(window_of_all=True)
_PRE_NORM = LayerFamily(pre_norm=True)

MIXTURES = (
    Family("Qwen3Moe", unchanged, attention=AttentionFamily("head"), experts=SOFTMAX, layers=_PRE_NORM),
    Family("Olmoe", unchanged, attention=AttentionFamily("full"), experts=SOFTMAX, layers=_PRE_NORM),
    Family(
        "Mixtral", unchanged, attention=AttentionFamily(window_of_all=True), experts=SOFTMAX_OF_CHOSEN, layers=_PRE_NORM
    ),
    Family(
        "Glm4Moe",
        unchanged,
        attention=AttentionFamily("head", "use_qk_norm"),
        experts=SIGMOID,
        layers=_PRE_NORM,
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
)
