"""Find a family by the class of a model."""

from dataclasses import replace

from torch import nn

from samebit.kernels.binding.families.deltas import DELTAS
from samebit.kernels.binding.families.dense import DENSE
from samebit.kernels.binding.families.family import Family, VisionFamily
from samebit.kernels.binding.families.latents import LATENTS
from samebit.kernels.binding.families.mambas import MAMBAS
from samebit.kernels.binding.families.mixtures import MIXTURES
from samebit.kernels.binding.families.short_convs import SHORT_CONVS

_LISTED = (*DENSE, *MIXTURES, *LATENTS, *MAMBAS, *DELTAS, *SHORT_CONVS)

FAMILIES = {family.model_class: family for family in _LISTED}
"""Finds a family by the class name of its causal language model."""

_AROUND_ANY = {
    "InternVL": ("Llama", "Qwen2", "Qwen3", "Qwen3Moe"),
    "Llava": ("Mistral", "Qwen2"),
    "LlavaNext": ("Llama", "Mistral", "Qwen2"),
    "LlavaOnevision": ("Qwen2",),
}
"""Lists, by the prefix of the class names of models with vision that may hold a text model of any family, those of the
families that are known in them, beside those that say it themselves. None does anything to the logits of a head."""

_WITH_VISION = (
    *(family for family in _LISTED if family.wrapped is not None),
    *(
        replace(FAMILIES[f"{prefix}ForCausalLM"], wrapped=VisionFamily(around))
        for around, prefixes in _AROUND_ANY.items()
        for prefix in prefixes
    ),
)
"""Lists families once for each kind of model with vision that they are in."""

KNOWN_CLASSES = (*FAMILIES, *dict.fromkeys(family.whole_class for family in _WITH_VISION))
"""Lists the class names of all models that are bound, also of those with vision."""

CLASSES_WITH_IMAGES = tuple(
    dict.fromkeys(
        family.whole_class for family in _WITH_VISION if family.wrapped is not None and family.wrapped.tower is not None
    )
)
"""Lists those whose vision is bound too."""


def family_of(model: nn.Module) -> Family | None:
    """Return the family of a causal language model by its class; of one with vision, that of the text model in it, of
    which one class may hold several kinds. None for any other model."""
    kind = type(model).__name__
    if kind in FAMILIES:
        return FAMILIES[kind]
    around = [family.with_vision for family in _WITH_VISION if family.whole_class == kind]
    inside = {type(module).__name__ for module in model.modules()} if around else set()
    return next((family for family in around if any(map(family.is_decoder, inside))), None)
